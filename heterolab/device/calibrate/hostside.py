"""Measured on the host: the CPU's stages, device calls, waiting, and workers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise
from typing import Any

from heterolab.device.base import Device, Pool
from heterolab.device.calibrate.figures import (
    Effort,
    Json,
    Recorded,
    event_lateness,
    median,
    spread,
    table,
    wait_for,
)
from heterolab.pipeline.costs import Job, stage_costs
from heterolab.pipeline.kernels import empty
from heterolab.trace.trace import API, SYNC


def stages(model: Any, effort: Effort, leave_out: Collection[str] = ()) -> Json:
    """Time of CPU stages by size, each alone, but for those in `leave_out`.

    Rounds over all stages and sizes, so that each finds the caches as another one left them.
    """
    costs = {name: cost for name, cost in stage_costs(model).items() if name not in leave_out}
    # All stages at their smallest size, then all at the next: never a stage twice in a row.
    order = sorted(
        (cost.sizes.index(size), name, size) for name, cost in costs.items() for size in cost.sizes
    )
    made = {(name, size): costs[name].make(size) for _, name, size in order}
    samples: dict[tuple[str, int], list[float]] = defaultdict(list)
    for key, job in made.items():
        _timed(job)  # first use pays for imports and first touch of memory
        samples[key] = []
    for _ in range(effort.repeats * 3):
        for key, job in made.items():
            if sum(samples[key]) < effort.stage_seconds * 1e9:
                samples[key].append(_timed(job))
    return {
        name: table({size: samples[name, size] for size in cost.sizes})
        | {"source": "measured: the stage's own function, among the other stages"}
        for name, cost in costs.items()
    }


def _timed(job: Job) -> float:
    start = time.perf_counter_ns()
    job()
    return time.perf_counter_ns() - start


def host_calls(device: Device, effort: Effort) -> Json:
    """How long the host is inside each kind of call, and between two of them."""
    one, other, nothing = device.stream(), device.stream(), empty()
    here, there = device.buffer(4096, "uint8", "pinned"), device.buffer(4096, "uint8")
    one.launch(nothing)
    started: list[int] = []
    ended: list[int] = []
    with Recorded(device) as recorded:
        for _ in range(effort.repeats * 10):
            started.append(one.copy(there, here))
            one.launch(nothing)
            other.wait(one.record())
            ended.append(other.copy(here, there))
            other.synchronize()
            one.synchronize()  # nothing to wait for
    spans, syncs = recorded.on_device(), recorded.calls("synchronize")
    calls = [s for s in recorded.spans if s.kind in (API, SYNC)]
    by_op = {s.op: s for s in calls}
    pauses = [b.start_ns - a.end_ns for a, b in pairwise(calls)]
    latency = [spans[op].start_ns - by_op[op].end_ns for op in started]
    returns = [s.end_ns - spans[op].end_ns for s, op in zip(syncs[0::2], ended, strict=False)]

    def inside(name: str) -> list[float]:
        return [s.end_ns - s.start_ns for s in recorded.calls(name)]

    return {
        "launch": spread(inside("launch")),
        "copy": spread(inside("copy")),
        "record": spread(inside("record")),
        "wait": spread(inside("wait")),
        "between": spread(pauses),
        "sync": spread(returns),
        "sync_idle": spread([s.end_ns - s.start_ns for s in syncs[1::2]]),
        "start": spread(latency),
    }


def waiting(device: Device, effort: Effort) -> Json:
    """How late the host goes on after an event, after a CPU job, and after a set time."""
    host = device.host
    late: dict[str, list[float]] = defaultdict(list)
    stream, pool = device.stream(), device.host.pool(1)
    for _ in range(effort.repeats * 4):
        until = host.now() + 500_000
        host.wait_any([], until=until)
        late["timer"].append(host.now() - until)
        late["event"].append(event_lateness(device, stream))
        job = pool.submit("sleep", time.sleep, 0.5e-3)
        wait_for(device, job)
        woken = host.now()
        (span,) = [s for s in host.recorder.since(len(host.recorder.spans) - 8) if s.name == "sleep"][-1:]
        late["job"].append(woken - span.end_ns)
    pool.close()
    return {name: spread(samples) for name, samples in late.items()}


def workers(device: Device, effort: Effort) -> Json:
    """Handing a job to a pool of threads, and what a pool of processes adds for pickling."""
    host = device.host
    threads = host.pool(1)
    submit, start = [], []
    for _ in range(effort.repeats * 10):
        before = host.now()
        job = threads.submit("noop", int)
        submitted = host.now()
        wait_for(device, job)
        (span,) = [s for s in host.recorder.since(len(host.recorder.spans) - 4) if s.name == "noop"][-1:]
        submit.append(submitted - before)
        start.append(max(span.start_ns - submitted, 0))
    direct = median(_round_trips(device, threads, b"", effort.repeats * 4))
    threads.close()
    processes = host.pool(1, "process")
    small = median(_round_trips(device, processes, b"", effort.repeats * 4))
    large = median(_round_trips(device, processes, bytes(1 << 20), effort.repeats))
    processes.close()
    return {
        "submit": spread(submit),
        "start": spread(start),
        "process_job_ns": max(round(small - direct), 0),
        "pickle_ns_per_byte": round(max(large - small, 0) / (1 << 20), 4),
    }


def _round_trips(device: Device, pool: Pool, argument: bytes, repeats: int) -> list[float]:
    times: list[float] = []
    for _ in range(repeats):
        start = device.host.now()
        wait_for(device, pool.submit("len", len, argument))
        times.append(device.host.now() - start)
    return times[1:]
