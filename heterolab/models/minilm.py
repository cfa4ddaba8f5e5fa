"""MiniLM, a small BERT, written once over an array module.

``xp`` is NumPy on the CPU and CuPy on a GPU; the same lines run on both. Six layers, each of
them attention (every token looks at every other one) and a feed-forward part (every token by
itself), turn token ids (B, L) into one vector of 384 numbers a token: *hidden*, (B, L, 384).
Shapes: B texts, L tokens (the longest text's; shorter ones are padded), H = 12 heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.models.weights import DIM, HEADS, LAYERS, PAD

Array = Any  # NumPy's or CuPy's
Arrays = Mapping[str, Array]

#: Images are 224 × 224 RGB, cut into 14 × 14 patches of 16 × 16 pixels.
IMAGE, PATCH = 224, 16
PATCHES = (IMAGE // PATCH) ** 2
PATCH_NUMBERS = 3 * PATCH * PATCH

_EPSILON = 1e-12


# -- the forward pass -----------------------------------------------------------------------


def forward(xp: Any, w: Arrays, ids: Array) -> tuple[Array, Array]:
    """Token ids int32 (B, L), 0 where padded → hidden float32 (B, L, 384), lengths int32 (B,)."""
    return forward_embeddings(xp, w, w["word"][ids], ids != PAD)


def forward_embeddings(xp: Any, w: Arrays, x: Array, real: Array) -> tuple[Array, Array]:
    """The same from the tokens' word embeddings `x` (B, L, 384), which are overwritten.

    `real` (B, L) is False where a text is padded; the hidden vectors there are 0.
    """
    x += w["position"][: x.shape[1]]
    layer_norm(xp, x, w["norm.scale"], w["norm.shift"])

    # Padding must not be looked at: −10000 before the softmax is a weight of 0 after it.
    mask = real[:, None, None, :].astype(np.float32)
    mask -= 1
    mask *= 1e4
    for layer in range(LAYERS):
        part = f"{layer}."
        x += attention(xp, w, part, x, mask)
        layer_norm(xp, x, w[part + "norm1.scale"], w[part + "norm1.shift"])
        x += feed_forward(xp, w, part, x)
        layer_norm(xp, x, w[part + "norm2.scale"], w[part + "norm2.shift"])
    x *= real[:, :, None]
    return x, real.sum(axis=1, dtype=np.int32)


def attention(xp: Any, w: Arrays, part: str, x: Array, mask: Array) -> Array:
    """Each token gathers from the others what its query finds in their keys."""
    batch, tokens, dim = x.shape
    qkv = linear(xp, x, w[part + "qkv.weight"], w[part + "qkv.bias"])
    qkv = qkv.reshape(batch, tokens, 3, HEADS, dim // HEADS)
    query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))  # (B, H, L, 32) each
    scores = xp.matmul(query, key.swapaxes(2, 3))  # (B, H, L, L); 1/√32 is inside query's weights
    scores += mask
    softmax(xp, scores)
    gathered = xp.matmul(scores, value)  # (B, H, L, 32)
    gathered = gathered.swapaxes(1, 2).reshape(batch, tokens, dim)
    return linear(xp, gathered, w[part + "attention.weight"], w[part + "attention.bias"])


def feed_forward(xp: Any, w: Arrays, part: str, x: Array) -> Array:
    """Each token by itself: 384 → 1536 numbers, a bend, and back."""
    wide = linear(xp, x, w[part + "wide.weight"], w[part + "wide.bias"])
    gelu(xp, wide)
    return linear(xp, wide, w[part + "narrow.weight"], w[part + "narrow.bias"])


def linear(xp: Any, x: Array, weight: Array, bias: Array) -> Array:
    """``x @ weight + bias`` over the last axis, as one matrix product of all tokens."""
    y = xp.matmul(x.reshape(-1, x.shape[-1]), weight)
    y += bias
    return y.reshape(*x.shape[:-1], weight.shape[1])


def layer_norm(xp: Any, x: Array, scale: Array, shift: Array) -> None:
    """Each token's numbers to mean 0 and deviation 1, then scaled and shifted; in place."""
    x -= x.mean(axis=-1, keepdims=True)
    variance = xp.square(x).mean(axis=-1, keepdims=True)
    variance += _EPSILON
    x /= xp.sqrt(variance, out=variance)
    x *= scale
    x += shift


def softmax(xp: Any, x: Array) -> None:
    """Weights that are positive and sum to 1 over the last axis; in place."""
    x -= x.max(axis=-1, keepdims=True)
    xp.exp(x, out=x)
    x /= x.sum(axis=-1, keepdims=True)


def gelu(xp: Any, x: Array) -> None:
    """``x · Φ(x)``, Φ the normal distribution's: near 0 for low x, near x for high; in place.

    Φ needs the error function, which NumPy lacks, so it is formula 7.1.26 of Abramowitz and
    Stegun: for the tail, ``Φ(−|x|) = ½·poly(t)·exp(−x²/2)`` with ``t = 1 / (1 + p·|x|/√2)``.
    Its absolute error is at most 0.75e-7. By symmetry ``x·Φ(x) = max(x, 0) − |x|·Φ(−|x|)``.
    """
    size = xp.abs(x)
    t = size * (0.3275911 * 0.5**0.5)
    t += 1
    xp.reciprocal(t, out=t)
    tail = t * (0.5 * 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail += 0.5 * coefficient
        tail *= t
    bell = xp.square(size, out=t)
    bell *= -0.5
    tail *= xp.exp(bell, out=bell)
    tail *= size
    xp.maximum(x, 0, out=x)
    x -= tail


def forward_images(xp: Any, w: Arrays, images: Array) -> tuple[Array, Array]:
    """Images (B, 3, 224, 224), pixels 0 to 255 → hidden float32 (B, 196, 384), lengths (B,).

    The first step of a vision transformer: each 16 × 16 patch becomes one vector, by a linear
    projection. Its weights are random: the work is real, the vectors mean nothing.
    """
    batch, side = images.shape[0], IMAGE // PATCH
    pixels = images.reshape(batch, 3, side, PATCH, side, PATCH)
    pixels = pixels.transpose(0, 2, 4, 1, 3, 5).astype(np.float32, order="C")
    pixels = pixels.reshape(batch, PATCHES, PATCH_NUMBERS)
    pixels /= 127.5
    pixels -= 1
    hidden = linear(xp, pixels, w["patch.weight"], w["patch.bias"])
    return hidden, xp.full((batch,), PATCHES, dtype=np.int32)


# -- weights, arranged for it ---------------------------------------------------------------


def arrange(stored: Arrays) -> dict[str, NDArray[np.float32]]:
    """The checkpoint's arrays as the forward pass wants them.

    Matrices are transposed once, so that ``x @ weight`` reads them in order; query, key and
    value become one matrix; query takes the attention's 1/√32 with it; and as every token is
    in segment 0, that segment's embedding is added to the positions'.
    """
    segment = stored["embeddings.token_type_embeddings.weight"][0]
    w = {
        "word": stored["embeddings.word_embeddings.weight"],
        "position": stored["embeddings.position_embeddings.weight"] + segment,
    }
    norms = {"norm": "embeddings"}
    for layer in range(LAYERS):
        part, theirs = f"{layer}.", f"encoder.layer.{layer}."
        for kind in ("weight", "bias"):
            w[f"{part}qkv.{kind}"] = _columns(*_query_key_value(stored, theirs, kind))
            w[f"{part}attention.{kind}"] = _columns(stored[f"{theirs}attention.output.dense.{kind}"])
            w[f"{part}wide.{kind}"] = _columns(stored[f"{theirs}intermediate.dense.{kind}"])
            w[f"{part}narrow.{kind}"] = _columns(stored[f"{theirs}output.dense.{kind}"])
        norms[f"{part}norm1"] = f"{theirs}attention.output"
        norms[f"{part}norm2"] = f"{theirs}output"
    for mine, norm in norms.items():
        w[f"{mine}.scale"] = stored[f"{norm}.LayerNorm.weight"]
        w[f"{mine}.shift"] = stored[f"{norm}.LayerNorm.bias"]
    return w


def _query_key_value(stored: Arrays, theirs: str, kind: str) -> list[NDArray[np.float32]]:
    query, key, value = (stored[f"{theirs}attention.self.{n}.{kind}"] for n in ("query", "key", "value"))
    return [query * np.float32((DIM // HEADS) ** -0.5), key, value]


def _columns(*parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """The parts one under the other, transposed (a bias stays a row), in memory order."""
    return np.ascontiguousarray(np.concatenate(parts).T)


def image_arrays(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """The patch projection: seeded random weights that keep the numbers' size."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((PATCH_NUMBERS, DIM), np.float32) * np.float32(PATCH_NUMBERS**-0.5)
    return {"patch.weight": weight, "patch.bias": np.zeros(DIM, np.float32)}
