"""Measured inside real runs of the pipeline: what its host pays, where it pays it.

A stage that is timed alone, again and again on the same bytes, finds everything in the core's
caches; between a forward pass and a copy it does not. So a few runs are made with no workers
(one thread does all the work, nobody contends), every call of that thread is timed, and what
the calls leave of the run's wall is the loop itself.

A host's speed wanders (its clock, its neighbours): the same launches took 7 and 12 ms in different
quarters of a minute. So the runs are made in several passes, apart from each other, and the median
of the passes' means counts.
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
from heterolab.device.cores import FastCores
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

    def launch_times(self, kernel: str) -> list[float]:
        """Of that kernel, whatever its size."""
        return [ns for kept in self.launches[kernel].values() for ns in kept]


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


class InRuns:
    """Passes over every job at every batch size of `effort`; see the module.

    The first pass, on creation, is not watched: it compiles kernels and fills memory pools.
    With `cores`, each run keeps to the cores that are fast at that moment.
    """

    def __init__(self, device: Device, model: Any, effort: Effort, cores: FastCores | None = None) -> None:
        self.device, self.model, self.effort = device, model, effort
        self.cores = cores
        self.passes: list[Watch] = []
        self._pass(Watch())

    def watch(self) -> None:
        """Make one more pass."""
        self.passes.append(self._pass(Watch()))

    def _pass(self, watch: Watch) -> Watch:
        for job in JOBS:
            for batch in self.effort.batches:
                if self.cores is not None:
                    self.cores.choose()
                _watch_one(self.device, self.model, watch, job, batch, self.effort)
        return watch

    def costs(self) -> Json:
        """What the pipeline's host pays: stages by size, launches by kernel, calls, and the loop.

        Returns
        -------
        ``stages``: tables by name; ``launches``: by kernel the time in `launch`; ``calls``: of
        copies and `record`; ``loop_step``: of a step, all of these apart. Each with its ``mean``
        (the median of the passes' means), spread, and the means of the ``passes``.
        """
        stages = {name: stage_table([w.stages[name] for w in self.passes]) for name in self.passes[0].stages}
        steps = [step_costs(watch.loop_steps) for watch in self.passes]
        each_ns = median([each for _, each in steps])
        # Taking a request from its source lies outside of the call, and goes with it.
        admit = stages["admit"]
        for column in ("ns", "p10", "p90"):
            rows = zip(admit["sizes"], admit[column], strict=True)
            admit[column] = [round(ns + each_ns * size, 1) for size, ns in rows]
        return {
            "stages": stages,
            "launches": {
                name: summary([w.launch_times(name) for w in self.passes]) for name in self.passes[0].launches
            },
            "calls": {name: summary([w.calls[name] for w in self.passes]) for name in self.passes[0].calls},
            "loop_step": {
                "mean": round(median([fixed for fixed, _ in steps]), 1),
                "passes": [round(fixed, 1) for fixed, _ in steps],
                "each_request": round(each_ns, 1),
            }
            | spread([ns for w in self.passes for ns, _ in w.loop_steps]),
        }


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


def summary(passes: Sequence[Sequence[float]]) -> Json:
    """Means of the passes, their median, and the spread of all samples."""
    means = [round(mean(kept), 1) for kept in passes]
    return {"mean": median(means), "passes": means} | spread([ns for kept in passes for ns in kept])


#: Sizes that a stage's samples are gathered at.
SIZES = [2**k for k in range(14)]


def stage_table(passes: Sequence[dict[int, list[float]]]) -> Json:
    """A profile's table of a stage, from its samples by size in each pass.

    Sizes that the pipeline met in between two of :data:`SIZES` are joined to the nearer one.
    """
    nearest = {size: min(SIZES, key=lambda s: abs(np.log(s / max(size, 1)))) for by in passes for size in by}
    rows = []
    for gathered in sorted(set(nearest.values())):
        sizes = sorted(size for size, near in nearest.items() if near == gathered)
        found = [[ns for size in sizes for ns in by.get(size, ())] for by in passes]
        at = float(np.mean([size for by in passes for size in sizes for _ in by.get(size, ())]))
        rows.append((at, summary([kept for kept in found if kept])))
    return {
        "sizes": [round(at, 1) for at, _ in rows],
        "ns": [row["mean"] for _, row in rows],
        "p10": [row["p10"] for _, row in rows],
        "p90": [row["p90"] for _, row in rows],
        "passes": [row["passes"] for _, row in rows],
    }


def step_costs(steps: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """(ns of a loop step, ns more for each request that it takes from the source), by least
    squares over the steps without the slowest twentieth."""
    rows = np.array(sorted(steps)[: max(2, round(0.95 * len(steps)))], float)
    design = np.column_stack([np.ones(len(rows)), rows[:, 1]])
    fixed, each = np.linalg.lstsq(design, rows[:, 0], rcond=None)[0]
    return max(float(fixed), 0.0), max(float(each), 0.0)


SOURCE = "measured: in real runs without workers, median of the passes' means"


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


def refreshed(profile: Json, inside: Json) -> Json:
    """`profile` (a calibrated one) with the costs of the host's work from later runs in it."""
    stages = {name: entry | inside["stages"].get(name, {}) for name, entry in profile["cpu_costs"].items()}
    seam = profile["seam"]
    calls = seam["measured"]["warm"]
    return profile | {
        "cpu_costs": stages,
        "kernels": with_launches(profile["kernels"], inside, max(calls["between"]["median"], 0)),
        "waiting": profile["waiting"] | {"loop_step_ns": inside["loop_step"]["mean"]},
        "seam": seam_section(seam, calls, inside, {"call": {"gil": seam["call_gil"]}}),
    }
