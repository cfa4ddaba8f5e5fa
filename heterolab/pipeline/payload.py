"""What crosses the link: in with a batch, and back with its result.

The same five stages carry token ids, embeddings or images in, and the best answers, vectors
or logits back. How many bytes that is decides whether the memory kind matters at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device.base import Kernel
from heterolab.errors import InputError
from heterolab.pipeline.batch import Batch

if TYPE_CHECKING:
    from heterolab.models.encoder import Encoder, EncoderKernels

IMAGE = (3, 224, 224)
PATCHES = 196  # of 16 × 16 pixels
VOCABULARY = 49_152  # columns of a logits-sized result: a small language model's vocabulary
ANSWERS = 3  # best answers a request

#: Generated pictures; request i gets number i modulo this. Made once, so that making them
#: does not drown what is to be seen: moving them.
PICTURES = 16


@dataclass(frozen=True)
class Payload:
    """One kind of input.

    Attributes
    ----------
    dtype, row
        Type, and shape of one request's row at a padded `length`.
    positions
        Rows of hidden states the model makes of one request, at a padded `length`.
    fill
        ``fill(out, batch)`` writes the batch into the host buffer's view `out`.
    kernel
        Picks the forward pass that reads it.
    items
        ``items(requests, length)``: what the cost of filling scales with.
    trained
        False where the forward pass that reads it has random weights, whatever the model has.
    """

    name: str
    dtype: str
    row: Callable[[int], tuple[int, ...]]
    positions: Callable[[int], int]
    fill: Callable[[NDArray[Any], Batch], None]
    kernel: Callable[[EncoderKernels], Kernel]
    items: Callable[[int, int], int] = lambda requests, length: requests
    trained: bool = True


@dataclass(frozen=True)
class Returns:
    """One kind of result: shape of one request's row, and the kernel that makes it from the
    vectors (None: the vectors themselves go back)."""

    name: str
    row: tuple[int, ...]
    kernel: Callable[[EncoderKernels], Kernel] | None


def fill_ids(out: NDArray[np.int32], batch: Batch) -> None:
    """Token ids, padded with 0."""
    out[...] = 0
    for row, item in zip(out, batch.items, strict=True):
        row[: len(item.ids)] = item.ids


def payload(name: str, model: Encoder) -> Payload:
    """The payload called `name`.

    Raises
    ------
    InputError
        There is none of that name.
    """

    def fill_embeddings(out: NDArray[np.float32], batch: Batch) -> None:
        out[...] = 0
        for row, item in zip(out, batch.items, strict=True):
            row[: len(item.ids)] = model.word_embeddings[item.ids]

    def fill_images(pictures: NDArray[Any]) -> Callable[[NDArray[Any], Batch], None]:
        def fill(out: NDArray[Any], batch: Batch) -> None:
            for row, item in zip(out, batch.items, strict=True):
                row[...] = pictures[item.request.id % PICTURES]

        return fill

    match name:
        case "ids":
            return Payload("ids", "int32", lambda n: (n,), lambda n: n, fill_ids, lambda k: k.from_ids)
        case "embeddings":
            return Payload(
                "embeddings",
                "float32",
                lambda n: (n, model.dim),
                lambda n: n,
                fill_embeddings,
                lambda k: k.from_embeddings,
                lambda requests, length: requests * length,
            )
        case "images_uint8" | "images_float32":
            pictures = generated_pictures(name.removeprefix("images_"))
            return Payload(
                name,
                str(pictures.dtype),
                lambda _: IMAGE,
                lambda _: PATCHES,
                fill_images(pictures),
                lambda k: k.from_images,
                trained=False,
            )
    raise InputError(
        f"payload={name!r} is not known. Choose from: ids, embeddings, images_uint8, images_float32."
    )


def returns(name: str, model: Encoder) -> Returns:
    """The result called `name`; an unknown one is an InputError."""
    match name:
        case "topk":
            return Returns("topk", (2, ANSWERS), lambda k: k.top_k(ANSWERS))
        case "vectors":
            return Returns("vectors", (model.dim,), None)
        case "logits":
            return Returns("logits", (VOCABULARY,), lambda k: k.logits)
    raise InputError(f"returns={name!r} is not known. Choose from: topk, vectors, logits.")


def generated_pictures(dtype: str, seed: int = 0) -> NDArray[Any]:
    """Pictures of smooth noise, shape (PICTURES, 3, 224, 224): 0…255, as uint8 or float32."""
    coarse = np.random.default_rng(seed).integers(0, 256, (PICTURES, 3, 14, 14), dtype=np.uint8)
    pictures = coarse.repeat(16, axis=2).repeat(16, axis=3)
    return pictures.astype(dtype)
