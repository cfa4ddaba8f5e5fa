"""Measured inside real runs of the pipeline: what its host pays, where it pays it.

A stage that is timed alone, again and again on the same bytes, finds everything in the core's
caches; between a forward pass and a copy it does not. So a few runs are made with no workers
(one thread does all the work, nobody contends), every call of that thread is timed, and what
the calls leave of the run's wall is the loop itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from heterolab.device.base import Buffer, Device, Event, Kernel, Memory, Stream
from heterolab.device.calibrate.figures import Effort, Json, median, spread
from heterolab.pipeline.loop import Loop
from heterolab.pipeline.pipeline import Pipeline
from heterolab.workload import closed_loop

#: What goes in and what comes back: together they use every stage and every kernel.
JOBS: tuple[dict[str, Any], ...] = (
    {"payload": "ids", "returns": "topk"},
    {"payload": "embeddings", "returns": "vectors"},
    {"payload": "images_uint8", "returns": "topk"},
    {"payload": "images_float32", "returns": "logits"},
)

Samples = dict[str, dict[int, list[float]]]


@dataclass
class Watch:
    """Times of the host thread's calls, in ns, by name and size."""

    stages: Samples = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    launches: Samples = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    #: (ns outside of all calls, requests admitted) of every step of the loop.
    loop_steps: list[tuple[float, int]] = field(default_factory=list)
    #: What the current step has spent in calls and asleep, and how many requests it admitted.
    accounted_ns: int = 0
    admitted: int = 0

    def call(
        self, device: Device, kept: list[float], fn: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        """`fn`, its time kept."""
        start = device.host.now()
        try:
            return fn(*args, **named)
        finally:
            taken = device.host.now() - start
            self.accounted_ns += taken
            kept.append(taken)


@contextmanager
def watched(device: Device, watch: Watch, streams: Sequence[Stream]) -> Iterator[None]:
    """Every call of the host to a stage, a stream or a sleep is timed into `watch`."""
    host = device.host
    call, wait_any = host.call, host.wait_any

    def timed_call(name: str, fn: Callable[..., Any], *args: Any, size: int = 1, **named: Any) -> Any:
        if name == "admit":
            watch.admitted += size
        return watch.call(device, watch.stages[name][size], call, name, fn, *args, size=size, **named)

    def timed_wait(waits: Sequence[Any], until: int | None = None) -> Any:
        return watch.call(device, [], wait_any, waits, until)

    host.call, host.wait_any = timed_call, timed_wait  # type: ignore[method-assign]
    for stream in streams:
        _watch_stream(device, watch, stream)
    try:
        yield
    finally:
        for stream in streams:
            for name in ("launch", "copy", "record"):
                delattr(stream, name)  # the class's own shows again
        host.call, host.wait_any = call, wait_any  # type: ignore[method-assign]


def _watch_stream(device: Device, watch: Watch, stream: Stream) -> None:
    launch, copy, record = stream.launch, stream.copy, stream.record

    def timed_launch(
        kernel: Kernel, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = (), **named: Any
    ) -> int:
        kept = watch.launches[kernel.name][kernel.work(reads, writes).size]
        op: int = watch.call(device, kept, launch, kernel, reads, writes, **named)
        return op

    def timed_copy(dst: Buffer, src: Buffer, **named: Any) -> int:
        name = "copy in" if dst.memory is Memory.DEVICE else "copy back"
        op: int = watch.call(device, watch.calls[name], copy, dst, src, **named)
        return op

    def timed_record() -> Event:
        event: Event = watch.call(device, watch.calls["record"], record)
        return event

    stream.launch, stream.copy, stream.record = timed_launch, timed_copy, timed_record  # type: ignore[method-assign]


def watch_pipelines(device: Device, model: Any, effort: Effort) -> Watch:
    """Run every job at every batch size of `effort`; gives all times."""
    watch = Watch()
    for job in JOBS:
        for batch in effort.batches:
            _watch_one(device, model, watch, job, batch, effort)
    return watch


def _watch_one(
    device: Device, model: Any, watch: Watch, job: dict[str, Any], batch: int, effort: Effort
) -> None:
    # A device with processors of its own works while the host goes on: several batches in
    # flight, each in buffers that the caches have lost. On one that shares the host's cores they
    # would slow the host down, so there is one batch at a time.
    own = device.source != "cpu-clock"
    streams, ring = (2, 2) if own else (1, 1)
    pipeline = Pipeline(
        model, batch=batch, chunk=batch, streams=streams, ring=ring, workers=0, memory="pinned", **job
    )
    count = max(effort.batches_each, -(-effort.calls_each // batch)) if own else effort.batches_each
    load = closed_loop(n=batch * count, in_flight=batch * streams * ring, seed=batch)
    loop = Loop(pipeline, load, device)
    try:
        with watched(device, watch, device.streams(streams)):
            while True:
                start, watch.accounted_ns, watch.admitted = device.host.now(), 0, 0
                more = loop.step()
                left_ns = device.host.now() - start - watch.accounted_ns
                watch.loop_steps.append((left_ns, watch.admitted))
                if not more:
                    break
    finally:
        loop.close()
    loop.finish()


def mean(samples: Sequence[float]) -> float:
    """The mean, without the slowest twentieth (another process's doing)."""
    kept = np.sort(samples)[: max(1, round(0.95 * len(samples)))]
    return float(np.mean(kept))


def stage_table(samples: dict[int, list[float]], sizes: Sequence[int]) -> Json:
    """A profile's table of a stage. Sizes that the pipeline met in between are joined to the
    nearest of `sizes`, scaled: a cost grows about in proportion to its size there."""
    binned: dict[int, list[float]] = defaultdict(list)
    at: dict[int, list[int]] = defaultdict(list)
    for size, kept in samples.items():
        nearest = min(sizes, key=lambda s: abs(np.log(s / max(size, 1))))
        binned[nearest] += kept
        at[nearest] += [size] * len(kept)
    rows = []
    for nearest in sorted(binned):
        middle = float(np.mean(at[nearest]))
        rows.append((middle, mean(binned[nearest]), spread(binned[nearest])))
    rows = [row for i, row in enumerate(rows) if not i or row[0] > rows[i - 1][0]]
    return {
        "sizes": [round(row[0], 1) for row in rows],
        "ns": [round(row[1], 1) for row in rows],
        "p10": [row[2]["p10"] for row in rows],
        "p90": [row[2]["p90"] for row in rows],
    }


def step_costs(steps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """(ns of a loop step, ns more for each request that it takes from the source), by least
    squares over the steps without the slowest twentieth."""
    rows = np.array(sorted(steps)[: max(2, round(0.95 * len(steps)))], float)
    design = np.column_stack([np.ones(len(rows)), rows[:, 1]])
    fixed, each = np.linalg.lstsq(design, rows[:, 0], rcond=None)[0]
    return max(float(fixed), 0.0), max(float(each), 0.0)


def pipeline_costs(device: Device, model: Any, effort: Effort) -> Json:
    """What the pipeline's host pays: stages by size, launches by kernel, calls, and the loop.

    Returns
    -------
    ``stages``: tables by name; ``launches``: by kernel the mean and spread of the time in
    `launch`; ``calls``: of copies and `record`; ``loop_step``: of a step, all of these apart.
    """
    watch = watch_pipelines(device, model, effort)
    powers = [2**k for k in range(14)]
    stages = {name: stage_table(samples, powers) for name, samples in watch.stages.items()}
    step_ns, each_ns = step_costs(watch.loop_steps)
    # Taking a request from its source lies outside of the call, and goes with it.
    admit = stages["admit"]
    admit["ns"] = [
        round(ns + each_ns * size, 1) for size, ns in zip(admit["sizes"], admit["ns"], strict=True)
    ]
    return {
        "stages": stages,
        "launches": {
            name: {"mean": round(mean(every := [ns for kept in by_size.values() for ns in kept]), 1)}
            | spread(every)
            for name, by_size in watch.launches.items()
        },
        "calls": {name: {"mean": round(mean(kept), 1)} | spread(kept) for name, kept in watch.calls.items()},
        "loop_step": {"mean": round(step_ns, 1), "each_request": round(each_ns, 1)}
        | spread([ns for ns, _ in watch.loop_steps]),
    }


SOURCE = "measured: in real runs without workers, means"


def stage_sections(inside: Json, alone: Json, locks: dict[str, Json]) -> Json:
    """The profile's ``cpu_costs``: stages as the runs had them, others as measured `alone`."""
    measured = alone | {name: costs | {"source": SOURCE} for name, costs in inside["stages"].items()}
    return {name: costs | locks.get(name, {}) for name, costs in measured.items()}


def with_launches(kernels: Json, inside: Json, between_ns: float) -> Json:
    """`kernels` with the host's time for their launches as the runs had it."""
    out = dict(kernels)
    for name, found in inside["launches"].items():
        if name in out:
            held = max(found["mean"] - between_ns, 0.0)
            out[name] = out[name] | {
                "host_ns": round(held, 1),
                "cold_host_ns": 0,
                "measured": {"launch": found},
            }
    return out


def seam_section(bare: Json, calls: Json, inside: Json, locks: dict[str, Json]) -> Json:
    """The profile's ``seam``: `bare` with the calls as this package makes them.

    Parameters
    ----------
    bare
        The profile's ``host``; how much a cold call costs more depends on it.
    calls
        Warm calls, one after the other (see `hostside.host_calls`). In a real run a call comes
        after other work and is dearer: the difference is what a cold call costs more.
    """
    warm = {name: max(found["median"], 0.0) for name, found in calls.items()}
    copies = median([inside["calls"][name]["mean"] for name in ("copy in", "copy back")])

    def dearer(in_run_ns: float, name: str) -> float:
        more: float = max(in_run_ns - warm[name] - warm["between"], 0.0)
        return round(more, 1)

    return bare | {
        "launch_ns": warm["launch"],
        "copy_ns": warm["copy"],
        "record_ns": warm["record"],
        "wait_ns": warm["wait"],
        "between_ns": warm["between"],
        "sync_ns": warm["sync"],
        "sync_idle_ns": warm["sync_idle"],
        "start_ns": warm["start"],
        "cold_copy_ns": dearer(copies, "copy"),
        "cold_event_ns": dearer(inside["calls"]["record"]["mean"], "record"),
        "call_gil": locks.get("call", {"gil": 1.0})["gil"],
        "measured": {"warm": calls, "in runs": inside["calls"]},
        "source": "measured: warm calls among the others, and in real runs (cold)",
    }
