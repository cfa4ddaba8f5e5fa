"""The pipeline's CPU stages as jobs of a stated size: what a calibration measures.

Each name here is one that the pipeline passes to ``host.call`` or ``pool.submit``; the job
runs the very function that the pipeline runs, so a profile's cost is the cost of this code.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from heterolab.pipeline.batch import Batch, Batcher
from heterolab.pipeline.payload import VOCABULARY, payload
from heterolab.pipeline.postprocess import Answer, Sessions, postprocess
from heterolab.pipeline.preprocess import Prepared, preprocess
from heterolab.workload import COURSE_KEY, closed_loop

if TYPE_CHECKING:
    from heterolab.models.encoder import Encoder

Job = Callable[[], Any]


@dataclass(frozen=True)
class StageCost:
    """How to measure one stage: ``make(size)`` gives a job to be timed; `sizes` suffice."""

    sizes: tuple[int, ...]
    make: Callable[[int], Job]


def stage_costs(model: Encoder) -> dict[str, StageCost]:
    """Every CPU stage of the pipeline, by the name it has on the timeline."""
    texts = (1, 4, 16, 64)
    return {
        "preprocess": StageCost(texts, lambda n: _preprocess(model, n)),
        "batch": StageCost(texts, lambda n: _form(model, n)),
        "pad_ids": StageCost(texts, lambda n: _pad(model, "ids", n)),
        "pad_embeddings": StageCost((8, 64, 512, 2_048), lambda n: _pad(model, "embeddings", n // 8, 8)),
        "pad_images_uint8": StageCost(texts, lambda n: _pad(model, "images_uint8", n)),
        "pad_images_float32": StageCost(texts, lambda n: _pad(model, "images_float32", n)),
        "postprocess": StageCost(texts, lambda n: _postprocess(model, n, "topk")),
        "postprocess_vectors": StageCost(texts, lambda n: _postprocess(model, n, "vectors")),
        "postprocess_logits": StageCost(texts, lambda n: _postprocess(model, n, "logits")),
        "session_write": StageCost(texts, lambda n: _session_write(model, n)),
        "log_to_disk": StageCost((1, 16), _log_to_disk),
    }


def _prepared(model: Encoder, n: int) -> list[Prepared]:
    requests = closed_loop(n=n, in_flight=n, seed=1).requests
    outcomes = preprocess(requests, (COURSE_KEY,), model.tokenize)
    return [outcome for outcome in outcomes if isinstance(outcome, Prepared)]


def _preprocess(model: Encoder, n: int) -> Job:
    requests = closed_loop(n=n, in_flight=n, seed=1).requests
    return lambda: preprocess(requests, (COURSE_KEY,), model.tokenize)


def _form(model: Encoder, n: int) -> Job:
    items = _prepared(model, n)

    def job() -> Batch:
        batcher = Batcher(n, 0)
        for item in items:
            batcher.add(item, 0)
        return batcher.take(0)

    return job


def _batch(model: Encoder, n: int) -> Batch:
    result: Batch = _form(model, n)()
    return result


def _pad(model: Encoder, name: str, n: int, length: int = 128) -> Job:
    """Fill a host buffer with `n` requests (their rows cut to `length` tokens)."""
    what = payload(name, model)
    items = tuple(replace(item, ids=item.ids[:length]) for item in _prepared(model, n))
    batch = Batch(0, items, length, 0)
    out = np.zeros((n, *what.row(length)), what.dtype)
    return lambda: what.fill(out, batch)


def _answers(model: Encoder, n: int) -> list[Answer]:
    answers: list[Answer] = _postprocess(model, n, "topk")()
    return answers


def _postprocess(model: Encoder, n: int, returned: str) -> Job:
    batch = _batch(model, n)
    shapes = {"topk": (n, 2, 3), "vectors": (n, model.dim), "logits": (n, VOCABULARY)}
    result = np.zeros(shapes[returned], np.float32)
    return lambda: postprocess(batch, result, returned, model.knowledge, model.trained)


def _session_write(model: Encoder, n: int) -> Job:
    answers, sessions = _answers(model, n), Sessions()
    return lambda: sessions.write(answers)


def _log_to_disk(lines: int) -> Job:
    """What a careless hook does: append lines and force them to the disk."""
    descriptor, name = tempfile.mkstemp(prefix="heterolab-", suffix=".log")
    os.close(descriptor)
    path = Path(name)
    return lambda: log_to_disk(path, lines)


def log_to_disk(path: Path, lines: int = 1) -> None:
    """Append `lines` lines to `path` and wait until the disk has them."""
    with path.open("a", encoding="utf-8") as file:
        file.write("a request went by here, and somebody wanted to know at once\n" * lines)
        file.flush()
        os.fsync(file.fileno())
