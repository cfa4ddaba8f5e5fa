"""The encoder as a service needs it: a tokenizer, a knowledge base, and kernels on a device."""

from __future__ import annotations

import hashlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device.base import Array, Buffer, Device, Kernel, Work
from heterolab.errors import InputError
from heterolab.models import minilm, weights
from heterolab.models.knowledge import KnowledgeBase
from heterolab.models.minilm import PATCH_NUMBERS, PATCHES
from heterolab.models.weights import DIM, FFN, HEADS, LAYERS, POSITIONS, Tokenizer, UntrainedWarning
from heterolab.pipeline import kernels

#: Numbers a text gets back when the service returns logits: a large vocabulary's.
LOGITS = 49152

#: Array operations of one eager forward pass on a GPU, each of them a kernel launch. A test
#: counts them; a matrix product of strided operands copies each of them first.
FORWARD_LAUNCHES = 379
EMBEDDINGS_LAUNCHES = 379
IMAGES_LAUNCHES = 8

#: Forward results remembered for simulated runs, in bytes.
MEMORY_BYTES = 128 << 20


class Encoder:
    """MiniLM: texts to vectors of 384 numbers, near each other where the meanings are.

    Attributes
    ----------
    tokenize
        ``tokenize(texts)``: one int32 array a text, [CLS] tokens [SEP], at most `max_tokens`,
        not padded. It is small by itself, without the weights, so a worker process gets it cheaply.
    trained
        False where the weights are random: timing holds, answers mean nothing.
    untrained_because
        Why; empty for trained weights.
    dim, max_tokens
        384; and the number of tokens at which texts are cut.
    """

    dim = DIM

    def __init__(self, loaded: weights.Loaded, max_tokens: int = 128) -> None:
        self.tokenize = Tokenizer(loaded.tokenizer, max_tokens)
        self.max_tokens = max_tokens
        self.untrained_because = loaded.untrained_because
        self.arrays = minilm.arrange(loaded.arrays)
        self._remembered = _Memory(MEMORY_BYTES)

    @property
    def trained(self) -> bool:
        return not self.untrained_because

    @property
    def word_embeddings(self) -> NDArray[np.float32]:
        """float32 (30522, 384): what a CPU sends to the device when it looks up embeddings itself."""
        return self.arrays["word"]

    @cached_property
    def knowledge(self) -> KnowledgeBase:
        """The questions and answers that requests are matched against."""
        return KnowledgeBase.load()

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors float32 (n, 384) of length 1, computed here with NumPy, one text at a time.

        One at a time, a vector does not depend on the other texts, not even in its last bit.
        """
        vectors = np.empty((len(texts), DIM), np.float32)
        for row, ids in enumerate(self.tokenize(texts)):
            hidden, lengths = minilm.forward(np, self.arrays, ids[None])
            kernels.pool_reference(np, [hidden, lengths], [vectors[row : row + 1]])
        return vectors

    def on(self, device: Device) -> EncoderKernels:
        """The kernels on `device`; the weights are uploaded once a device."""
        if self not in device.kept:
            device.kept[self] = EncoderKernels(self, device.upload, self._remembered)
        kernels: EncoderKernels = device.kept[self]
        return kernels

    def __repr__(self) -> str:
        state = "" if self.trained else f", untrained: {self.untrained_because}"
        return f"<encoder MiniLM, 22.7 M parameters, at most {self.max_tokens} tokens{state}>"


def encoder(max_tokens: int = 128) -> Encoder:
    """MiniLM, fetched at first use (84 MB, once).

    Without network the weights are random, and everything still runs: ``.trained`` is False, a
    warning says so once, and answers are labelled *untrained*.

    Parameters
    ----------
    max_tokens
        Longer texts are cut to it; 3 to 512.

    Raises
    ------
    InputError
        `max_tokens` is outside 3 to 512, or ``HETEROLAB_WEIGHTS`` names a folder without weights.
    """
    whole = isinstance(max_tokens, int) and not isinstance(max_tokens, bool)
    if not whole or not 3 <= max_tokens <= POSITIONS:
        raise InputError(f"max_tokens={max_tokens!r}: MiniLM takes texts of 3 to {POSITIONS} tokens.")
    return _encoder(max_tokens)


@lru_cache(maxsize=2)
def _encoder(max_tokens: int) -> Encoder:
    return Encoder(_loaded(), max_tokens)


@lru_cache(maxsize=1)
def _loaded() -> weights.Loaded:
    loaded = weights.load()
    if loaded.untrained_because not in ("", weights.ASKED_FOR):
        warnings.warn(
            "The encoder runs with random weights, so its answers mean nothing, its timing is about right: "
            f"{loaded.untrained_because} With a network, `python -m heterolab.models fetch` gets the "
            "trained ones; then restart.",
            UntrainedWarning,
            stacklevel=4,
        )
    return loaded


# -- kernels on a device --------------------------------------------------------------------

_Upload = Callable[[dict[str, NDArray[Any]]], Any]


class EncoderKernels:
    """The encoder's kernels on one device, with its weights in that device's memory.

    Attributes
    ----------
    from_ids
        ``encoder.forward``: ids int32 (B, L), 0 where padded → hidden float32 (B, L, 384),
        lengths int32 (B,).
    from_embeddings
        ``encoder.forward_embeddings``: word embeddings float32 (B, L, 384), rows of 0 where
        padded → the same.
    from_images
        ``image_encoder.forward``: pixels 0 to 255, uint8 or float32 (B, 3, 224, 224) → hidden
        (B, 196, 384), lengths. Untrained.
    pool
        ``encoder.pool``: hidden, lengths → vectors float32 (B, 384) of length 1.
    """

    def __init__(self, encoder: Encoder, upload: _Upload, memory: _Memory) -> None:
        self._knowledge = encoder.knowledge
        self._upload = upload
        self._top_k: dict[int, Kernel] = {}
        stored = {**encoder.arrays, **minilm.image_arrays()}
        w = upload(stored)
        self.from_ids = _forward_kernel("encoder.forward", _from_ids, _ids_work, stored, w, memory)
        self.from_embeddings = _forward_kernel(
            "encoder.forward_embeddings", _from_embeddings, _embeddings_work, stored, w, memory
        )
        self.from_images = _forward_kernel(
            "image_encoder.forward", minilm.forward_images, _images_work, stored, w, memory
        )
        self.pool = kernels.pool()

    def top_k(self, k: int = 3) -> Kernel:
        """``encoder.top_k``: vectors → result float32 (B, 2, k).

        ``result[:, 0]`` are the k most similar rows of the knowledge base, best first, and
        ``result[:, 1]`` their cosines.
        """
        if k not in self._top_k:
            self._top_k[k] = kernels.top_k(self._known, k)
        return self._top_k[k]

    @cached_property
    def _known(self) -> Array:
        transposed = np.ascontiguousarray(self._knowledge.vectors.T)
        return self._upload({"known": transposed})["known"]

    @cached_property
    def logits(self) -> Kernel:
        """``encoder.logits``: vectors → float32 (B, 49152).

        Column r is the cosine with row r of the knowledge base; columns beyond it are 0, there
        for their size alone, that of a language model's vocabulary.
        """
        vectors = self._knowledge.vectors
        table = np.zeros((DIM, LOGITS), np.float32)
        table[:, : len(vectors)] = vectors.T
        return kernels.logits(self._upload({"table": table})["table"], vectors)


_Forward = Callable[[Any, minilm.Arrays, Array], tuple[Array, Array]]


def _from_ids(xp: Any, w: minilm.Arrays, ids: Array) -> tuple[Array, Array]:
    return minilm.forward(xp, w, ids)


def _from_embeddings(xp: Any, w: minilm.Arrays, embeddings: Array) -> tuple[Array, Array]:
    return minilm.forward_embeddings(xp, w, embeddings.copy(), embeddings.any(axis=2))


def _forward_kernel(
    name: str,
    forward: _Forward,
    work: Callable[[Sequence[Buffer], Sequence[Buffer]], Work],
    stored: minilm.Arrays,
    uploaded: minilm.Arrays,
    memory: _Memory,
) -> Kernel:
    """One input to (hidden, lengths), by `forward` with the uploaded weights."""

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        writes[0][...], writes[1][...] = forward(xp, uploaded, reads[0])

    def recall(reads: Sequence[Array], writes: Sequence[Array]) -> None:
        for row, given in enumerate(reads[0]):
            hidden, length = memory.get(name, _trimmed(given), lambda x: forward(np, stored, x[None]))
            writes[0][row, : len(hidden)] = hidden
            writes[0][row, len(hidden) :] = 0
            writes[1][row] = length

    return Kernel(name, run, work, recall=recall)


def _trimmed(row: NDArray[Any]) -> NDArray[Any]:
    """A text's row without the padding behind it; an image as it is."""
    if row.ndim == 3:
        return row
    real = np.flatnonzero(row if row.ndim == 1 else row.any(axis=1))
    return row[: int(real[-1]) + 1] if len(real) else row[:0]


class _Memory:
    """Forward results by their input, least recently used out first.

    A simulated run needs a text's values, not the time it takes to compute them, and the same
    texts come again and again. Each is computed alone, so that its values do not depend on the
    batch it happens to be in.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._bytes = limit_bytes, 0
        self._known: OrderedDict[bytes, tuple[NDArray[np.float32], int]] = OrderedDict()

    def get(
        self, name: str, given: NDArray[Any], compute: Callable[[NDArray[Any]], tuple[Any, Any]]
    ) -> tuple[NDArray[np.float32], int]:
        """Hidden vectors (L, 384) and length of one row."""
        key = hashlib.blake2b(given.tobytes(), digest_size=16, person=name[:16].encode()).digest()
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key]
        if not len(given):
            return np.zeros((0, DIM), np.float32), 0
        hidden, lengths = compute(given)
        self._known[key] = hidden[0], int(lengths[0])
        self._bytes += hidden.nbytes
        while self._bytes > self._limit and len(self._known) > 1:
            _, (oldest, _) = self._known.popitem(last=False)
            self._bytes -= oldest.nbytes
        return self._known[key]


# -- what one pass costs --------------------------------------------------------------------


def _forward_work(batch: int, tokens: int, read_bytes: int, launches: int) -> Work:
    n = batch * tokens
    weights_a_layer = 4 * DIM * DIM + 2 * DIM * FFN
    flops = LAYERS * n * (2 * weights_a_layer + 4 * tokens * DIM)
    # Eager array code reads and writes its array once an operation: about 30 times the tokens'
    # vectors, 20 times the feed-forward's wide ones, 6 times the attention scores.
    numbers = LAYERS * n * (30 * DIM + 20 * FFN + 6 * HEADS * tokens)
    moved = read_bytes + 4 * LAYERS * weights_a_layer + 8 * numbers
    return Work(flops=flops, bytes=moved, launches=launches, size=n)


def _ids_work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
    batch, tokens = reads[0].shape
    return _forward_work(batch, tokens, 4 * batch * tokens * (1 + DIM), FORWARD_LAUNCHES)


def _embeddings_work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
    batch, tokens, dim = reads[0].shape
    return _forward_work(batch, tokens, 4 * batch * tokens * dim, EMBEDDINGS_LAUNCHES)


def _images_work(reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Work:
    n = reads[0].shape[0] * PATCHES
    moved = reads[0].nbytes + 4 * (DIM * PATCH_NUMBERS + n * (6 * PATCH_NUMBERS + 3 * DIM))
    return Work(flops=2 * n * PATCH_NUMBERS * DIM, bytes=moved, launches=IMAGES_LAUNCHES, size=n)
