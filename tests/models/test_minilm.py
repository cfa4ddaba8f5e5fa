"""The forward pass: against a plain reference in double precision, and its invariants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from heterolab.models import minilm, weights
from heterolab.models.encoder import Encoder
from heterolab.models.weights import DIM, HEADS, LAYERS, Loaded

Float = NDArray[np.float64]
_erf = np.vectorize(math.erf)


def reference(stored: Any, ids: NDArray[np.int32]) -> Float:
    """BERT as the paper has it, one text, float64, the checkpoint's own matrices, erf exact."""

    def get(name: str) -> Float:
        return np.asarray(stored[name], np.float64)

    def dense(name: str, x: Float) -> Float:
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def norm(name: str, x: Float) -> Float:
        scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return scaled * get(f"{name}.LayerNorm.weight") + get(f"{name}.LayerNorm.bias")

    x = get("embeddings.word_embeddings.weight")[ids]
    x = x + get("embeddings.position_embeddings.weight")[: len(ids)]
    x = norm("embeddings", x + get("embeddings.token_type_embeddings.weight")[0])
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        query, key, value = (dense(f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for head in range(HEADS):
            mine = slice(32 * head, 32 * head + 32)
            scores = np.exp(query[:, mine] @ key[:, mine].T / math.sqrt(32))
            heads.append(scores / scores.sum(1, keepdims=True) @ value[:, mine])
        attended = dense(f"{name}.attention.output.dense", np.concatenate(heads, axis=1))
        x = norm(f"{name}.attention.output", x + attended)
        wide = dense(f"{name}.intermediate.dense", x)
        wide = wide * 0.5 * (1 + _erf(wide / math.sqrt(2)))
        x = norm(f"{name}.output", x + dense(f"{name}.output.dense", wide))
    return x


def check_against_reference(loaded: Loaded, ids: NDArray[np.int32]) -> None:
    hidden, lengths = minilm.forward(np, minilm.arrange(loaded.arrays), ids[None])
    assert hidden.dtype == np.float32
    assert lengths.tolist() == [len(ids)]
    expected = reference(loaded.arrays, ids)
    np.testing.assert_allclose(hidden[0], expected, atol=1e-4 * np.abs(expected).max())


def test_equals_the_reference_with_random_weights() -> None:
    loaded = Loaded(weights.random_arrays(1), None)
    check_against_reference(loaded, np.random.default_rng(1).integers(1000, 30000, 9).astype(np.int32))


def test_equals_the_reference_with_trained_weights(trained: Encoder) -> None:
    loaded = weights.load()
    text = "Every answer is checked against a slower and simpler one, and they must agree."
    check_against_reference(loaded, trained.tokenize([text])[0])
    mean = reference(loaded.arrays, trained.tokenize([text])[0]).mean(axis=0)
    np.testing.assert_allclose(trained.encode([text])[0], mean / np.linalg.norm(mean), atol=1e-5)


def test_padding_changes_nothing_and_is_zero(untrained: Encoder) -> None:
    rng = np.random.default_rng(0)
    ids = np.zeros((3, 12), np.int32)
    for row, length in enumerate((12, 5, 1)):
        ids[row, :length] = rng.integers(1000, 30000, length)
    hidden, lengths = minilm.forward(np, untrained.arrays, ids)
    assert lengths.tolist() == [12, 5, 1]
    for row, length in enumerate((12, 5, 1)):
        alone, _ = minilm.forward(np, untrained.arrays, ids[row : row + 1, :length])
        np.testing.assert_allclose(hidden[row, :length], alone[0], atol=2e-5)
        assert not hidden[row, length:].any()


def test_a_row_of_padding_alone_is_zero(untrained: Encoder) -> None:
    hidden, lengths = minilm.forward(np, untrained.arrays, np.zeros((1, 4), np.int32))
    assert lengths.tolist() == [0]
    assert not hidden.any()


def test_gelu_is_as_near_as_it_says() -> None:
    x = np.linspace(-12, 12, 4801)
    got = x.astype(np.float32)
    minilm.gelu(np, got)
    exact = x * 0.5 * (1 + _erf(x / math.sqrt(2)))
    np.testing.assert_allclose(got, exact, atol=1e-6)


def test_images_are_cut_into_patches_row_by_row() -> None:
    w = minilm.image_arrays()
    images = np.zeros((1, 3, 224, 224), np.uint8)
    images[0, :, 16:32, 48:64] = 255  # the second row of patches, the fourth column
    hidden, lengths = minilm.forward_images(np, w, images)
    assert hidden.shape == (1, 196, DIM)
    assert lengths.tolist() == [196]
    different = np.flatnonzero(np.abs(hidden[0] - hidden[0, 0]).max(axis=1) > 1e-6)
    assert different.tolist() == [14 + 3]
    np.testing.assert_allclose(hidden[0, 17], w["patch.weight"].sum(axis=0), atol=1e-4)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_images_of_bytes_and_of_floats_give_the_same(dtype: str) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 224, 224), dtype=np.uint8)
    w = minilm.image_arrays()
    expected, _ = minilm.forward_images(np, w, images)
    got, _ = minilm.forward_images(np, w, images.astype(dtype))
    np.testing.assert_array_equal(got, expected)
