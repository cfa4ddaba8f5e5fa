"""Python's interpreter lock: which jobs hold it, and which ones wait for it.

CPython runs Python code of one thread at a time. A thread that waits for the lock gets it when
the holder lets go of it: at once if that calls something long in C (a tokeniser, a copy, the CUDA
driver), after 5 ms if it runs plain Python. So how much two threads slow each other down is no
property of one of them. Two numbers a job describe it well enough (see ``Processor`` in
``simhost.py``): the share of its time in which it *holds* the lock, and the share in which it
would *wait* for it.

The pipeline's workers tokenise. So tokenising is measured beside a thread that lets go of the
lock every few microseconds, and everything else of the host thread's beside tokenising.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from heterolab.device.base import Device
from heterolab.device.calibrate.figures import Json
from heterolab.pipeline.costs import Job, stage_costs

#: The chunk of texts that a worker tokenises meanwhile.
CHUNK = 32
#: Stages whose work is plain Python, as the batcher's.
LIKE_BATCH = ("admit", "enqueue", "respond")


def gil_share(job: Job, seconds: float = 0.1) -> float:
    """The share of its time in which `job` holds the interpreter lock, 0 to 1.

    Measured by a victim: a thread that lets go of the lock every few microseconds makes no
    progress while `job` holds it, and otherwise full progress.
    """
    alone = _victims_speed(None, seconds)
    beside = _victims_speed(job, seconds)
    return float(np.clip(1 - beside / alone, 0.0, 1.0))


def _victims_speed(job: Job | None, seconds: float) -> float:
    """Rounds a nanosecond of a thread that runs a little Python and lets go of the lock."""
    let_go = ctypes.CDLL(None).getpid if hasattr(ctypes.CDLL(None), "getpid") else lambda: time.sleep(0)

    def victim() -> float:
        start, rounds = time.perf_counter_ns(), 0
        end = start + round(seconds * 1e9)
        while time.perf_counter_ns() < end:
            for _ in range(20):
                pass
            let_go()
            rounds += 1
        return rounds / (time.perf_counter_ns() - start)

    return victim() if job is None else _beside(job, victim)[0]


def _beside(job: Job, work: Callable[[], float]) -> tuple[float, float]:
    """(`work`'s result, mean time of `job` in ns) with `job` repeated in another thread."""
    stop: list[bool] = []
    times: list[int] = []

    def repeat() -> None:
        while not stop:
            start = time.perf_counter_ns()
            job()
            times.append(time.perf_counter_ns() - start)

    with ThreadPoolExecutor(1) as other:
        running = other.submit(repeat)
        time.sleep(0.01)
        try:
            found = work()
        finally:
            stop.append(True)
            running.result()
    return found, float(np.mean(times))


def _mean_time(job: Job, seconds: float) -> float:
    """Mean time of `job`, repeated for about `seconds`."""
    start, count = time.perf_counter_ns(), 0
    end = start + round(seconds * 1e9)
    while (now := time.perf_counter_ns()) < end or not count:
        job()
        count += 1
    return (now - start) / count


def shares(device: Device, model: Any, seconds: float = 0.1) -> dict[str, Json]:
    """``{"gil", "waits"}`` of every stage, and of ``"call"``: of calls that launch kernels."""
    costs = stage_costs(model)
    tokenise = costs["preprocess"].make(CHUNK)
    tokenise()
    held = gil_share(tokenise, 2 * seconds)
    alone = _mean_time(tokenise, seconds)
    jobs: dict[str, Job] = {
        name: cost.make(cost.sizes[len(cost.sizes) // 2])
        for name, cost in costs.items()
        if name not in ("preprocess", "log_to_disk")
    }
    if device.source != "cpu-clock":
        jobs["call"] = _launches(device, model)
    found: dict[str, Json] = {"preprocess": {"gil": round(held, 2), "waits": round(held, 2)}}
    for name, job in jobs.items():
        job()
        mine = _mean_time(job, seconds)
        beside, tokenising = _beside(tokenise, lambda job=job: _mean_time(job, seconds))  # type: ignore[misc]
        # Each is slowed down by what the other holds: speed = 1 - waits × gil of the other.
        waits = (1 - mine / beside) / max(held, 0.05)
        holds = (1 - alone / tokenising) / max(held, 0.05)
        found[name] = {
            "gil": round(float(np.clip(holds, 0, 1)), 2),
            "waits": round(float(np.clip(waits, 0, 1)), 2),
        }
    return found | dict.fromkeys(LIKE_BATCH, found["batch"])


def _launches(device: Device, model: Any) -> Job:
    """A forward pass over one small batch, launched and waited for."""
    kernel, stream = model.on(device).from_ids, device.stream()
    ids, hidden = device.buffer((4, 16), "int32"), device.buffer((4, 16, model.dim))
    lengths = device.buffer(4, "int32")

    def job() -> None:
        stream.launch(kernel, [ids], [hidden, lengths])
        stream.synchronize()

    return job
