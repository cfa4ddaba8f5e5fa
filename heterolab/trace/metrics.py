"""Questions to a trace: who was busy, who overlapped, why was the GPU idle, what limits.

All of these are pure functions. Intervals are arrays of shape (n, 2) in ns: sorted, disjoint,
``[start, end)``. A *lane* is a span's own (``host``, ``worker 0``, ``h2d``, ``d2h``, ``gpu``)
or one of the course's three groups: ``cpu`` (host and workers), ``link`` (both directions),
``gpu``. A lane is *busy* while it works. A host that is held by the device (``sync``) or
asleep (``wait``) does no work, so it is idle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heterolab.errors import InputError
from heterolab.trace.trace import API, CPU, DEVICE_KINDS, Trace

GROUPS = ("cpu", "link", "gpu")
WORK_KINDS = (CPU, API, *DEVICE_KINDS)

#: Reasons for an idle GPU; CPU work is ``cpu:NAME`` with the span's name. See ``trace/idle.py``.
INPUT_COPY, OUTPUT_COPY, EVENT, HAND_OVER = "input_copy", "output_copy", "event", "hand_over"
HOST_SYNC, PAGEABLE, COPY_CALL, LAUNCH_CALL = "sync", "pageable", "copy_call", "launch_call"
ARRIVALS, BATCH_DELAY, WAKE, UNRECORDED = "arrivals", "batch_delay", "wake", "unrecorded"
CPU_WORK, END, UNKNOWN = "cpu:", "end", "unknown"

#: A percentile needs so many samples beyond it before it means something: p99 needs 1,000.
SAMPLES_BEYOND = 10

Intervals = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Served(Protocol):
    """What the questions about requests need of a :class:`~heterolab.pipeline.run.Run`."""

    @property
    def trace(self) -> Trace: ...
    @property
    def answers(self) -> Sequence[object]: ...
    @property
    def wall_ns(self) -> int: ...
    @property
    def waiting_ns(self) -> NDArray[np.int64]: ...
    @property
    def batch_sizes(self) -> NDArray[np.int64]: ...


# -- lanes -------------------------------------------------------------------------------


def group_of(lane: str) -> str:
    """Which of the three groups a span's lane belongs to."""
    return {"h2d": "link", "d2h": "link", "gpu": "gpu"}.get(lane, "cpu")


def lanes(trace: Trace) -> list[str]:
    """The lanes that occur, in the order in which they are drawn: host, workers, link, GPU."""
    order = {"host": (0, 0), "h2d": (2, 0), "d2h": (3, 0), "gpu": (4, 0)}

    def place(lane: str) -> tuple[int, int, str]:
        number = re.fullmatch(r"worker (\d+)", lane)
        first, second = order.get(lane, (1, int(number[1]) if number else 1 << 30))
        return first, second, lane

    return sorted(np.unique(trace["lane"]).tolist(), key=place)


def on_lane(trace: Trace, lane: str) -> Mask:
    """Which spans lie on `lane` (a lane or a group).

    Raises
    ------
    InputError
        The trace has no such lane.
    """
    known = lanes(trace)
    if lane in GROUPS:
        return np.isin(trace["lane"], [name for name in known if group_of(name) == lane])
    if lane not in known and lane not in ("host", "h2d", "d2h"):
        raise InputError(f"lane={lane!r} is not in this trace. It has: {', '.join([*GROUPS, *known])}.")
    mask: Mask = trace["lane"] == lane
    return mask


def busy_intervals(trace: Trace, lane: str) -> Intervals:
    """When `lane` (a lane or a group) was at work."""
    mask = on_lane(trace, lane) & np.isin(trace["kind"], WORK_KINDS)
    return union(trace["start_ns"][mask], trace["end_ns"][mask])


def union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Intervals:
    """The same moments as disjoint intervals, in order."""
    by_start = np.argsort(starts, kind="stable")
    starts = starts[by_start]
    reach = np.maximum.accumulate(ends[by_start])
    # An interval begins where nothing before it reaches.
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] > reach[:-1]
    last = np.roll(first, -1)
    return np.stack([starts[first], reach[last]], axis=1)


def length_ns(intervals: Intervals) -> int:
    """The total length of disjoint intervals."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


# -- busy, idle, overlap -----------------------------------------------------------------


def busy_ns(trace: Trace, lane: str) -> int:
    """How long was `lane` (a lane or a group) at work?"""
    return length_ns(busy_intervals(trace, lane))


def idle_ns(trace: Trace, lane: str) -> int:
    """How long was `lane` not at work, between the trace's first start and its last end?"""
    return trace.wall_ns - busy_ns(trace, lane)


def busy_by_lane(trace: Trace) -> dict[str, int]:
    """How long was each lane at work? Lanes in the order in which they are drawn."""
    return {lane: busy_ns(trace, lane) for lane in lanes(trace)}


def overlap_ns(trace: Trace, a: str, b: str) -> int:
    """How long were `a` and `b` (lanes or groups) at work at the same time?"""
    first, second = busy_intervals(trace, a), busy_intervals(trace, b)
    both = np.concatenate([first, second])
    return length_ns(first) + length_ns(second) - length_ns(union(both[:, 0], both[:, 1]))


def lanes_bound_ns(trace: Trace) -> int:
    """How fast could the same work be at best? As long as its busiest lane: however well the
    lanes overlap, each of them does one thing at a time."""
    return max(busy_by_lane(trace).values(), default=0)


# -- why was the GPU idle? ---------------------------------------------------------------


def gpu_idle_by_cause(trace: Trace) -> dict[str, int]:
    """Why was the GPU idle? Nanoseconds by cause, the largest first; they sum to its idle time.

    ``heterolab/trace/idle.py`` lists the causes and decides. All GPUs of a trace count as one here;
    :func:`heterolab.explain` tells them apart, and names the ops.
    """
    from heterolab.trace import idle  # it asks this module what lanes and intervals are
    from heterolab.trace.queue import Queue

    causes: dict[str, int] = {}
    for piece in idle.pieces(trace, queue=Queue.of(trace)):
        causes[piece.cause] = causes.get(piece.cause, 0) + piece.end_ns - piece.start_ns
    return dict(sorted(causes.items(), key=lambda item: (-item[1], item[0])))


# -- requests ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Percentiles:
    """Latency percentiles, with what they rest on.

    Attributes
    ----------
    samples
        How many latencies there were.
    values_ns
        By percentile, e.g. ``{50: …, 99: …}``; empty without samples.
    too_few
        The percentiles that mean little, since fewer than ten samples lie beyond them.
    """

    samples: int
    values_ns: dict[float, int]
    too_few: tuple[float, ...]


def latency_percentiles(latencies_ns: ArrayLike, qs: Sequence[float] = (50, 95, 99)) -> Percentiles:
    """Which latency did q % of the requests stay within? Each is one that a request really had.

    Raises
    ------
    InputError
        A percentile is not between 0 and 100.
    """
    if bad := [q for q in qs if not 0 <= q <= 100]:
        raise InputError(f"qs={list(qs)!r}: a percentile lies between 0 and 100, and {bad[0]!r} does not.")
    latencies = np.asarray(latencies_ns, dtype=np.int64)
    values: dict[float, int] = {}
    if len(latencies):
        exact = np.percentile(latencies, list(qs), method="inverted_cdf")
        values = {q: int(value) for q, value in zip(qs, exact, strict=True)}
    # 1e-9: 1,000 × (1 − 0.99) is a hair below ten in floating point.
    too_few = tuple(q for q in qs if len(latencies) * (100 - q) / 100 < SAMPLES_BEYOND - 1e-9)
    return Percentiles(len(latencies), values, too_few)


def throughput_per_s(run: Served) -> float:
    """How many requests were answered a second?"""
    return len(run.answers) / run.wall_ns * 1e9 if run.wall_ns else 0.0


def queue_delay_ns(run: Served) -> NDArray[np.int64]:
    """How long did each answered request wait before its batch was formed? Shape (answers,)."""
    return run.waiting_ns


def batch_sizes(batches: Served | Mapping[int, int]) -> NDArray[np.int64]:
    """How many requests were in each batch really?

    Parameters
    ----------
    batches
        A run, or a mapping from request id to batch number (-1: in no batch).
    """
    if not isinstance(batches, Mapping):
        return batches.batch_sizes
    numbers = [number for number in batches.values() if number >= 0]
    return np.bincount(numbers).astype(np.int64) if numbers else np.zeros(0, np.int64)


@dataclass(frozen=True)
class BalanceCard:
    """CPU, link and GPU milliseconds per request, and the lane that limits.

    Attributes
    ----------
    cpu_ms, link_ms, gpu_ms
        Work per request: all CPU lanes added up, both directions of the link added up, the time
        in which the GPU ran at least one kernel.
    requests
        How many answers the work was shared by; for a bare trace, 1.
    lane, lane_ms
        The busiest single lane, and its milliseconds per request: no schedule of the same work
        takes less.
    share
        The part of the run in which that lane was at work. Well below 1, no lane limits: the
        run waits for requests, or for one lane after the other.
    """

    cpu_ms: float
    link_ms: float
    gpu_ms: float
    requests: int
    lane: str
    lane_ms: float
    share: float

    @property
    def limits(self) -> str:
        """The group of the busiest lane: ``cpu``, ``link`` or ``gpu``."""
        return group_of(self.lane)

    def as_dict(self) -> dict[str, float]:
        """Milliseconds per request by group."""
        return {"cpu": self.cpu_ms, "link": self.link_ms, "gpu": self.gpu_ms}

    def __repr__(self) -> str:
        per = " · ".join(f"{name} {value:.3g} ms" for name, value in self.as_dict().items())
        return f"<per request: {per}; busiest lane: {self.lane}, {self.share:.0%} of the time>"


def balance_card(run: Served | Trace, requests: int | None = None) -> BalanceCard:
    """What does one request cost on each side of the link, and which lane limits?

    Parameters
    ----------
    run
        A run, or a bare trace.
    requests
        What to divide by. Default: the run's answers; for a bare trace, 1.
    """
    trace = run if isinstance(run, Trace) else run.trace
    if requests is None:
        requests = 1 if isinstance(run, Trace) else len(run.answers)
    busy = busy_by_lane(trace)
    ms = dict.fromkeys(GROUPS, 0.0)
    for name, ns in busy.items():
        ms[group_of(name)] += ns / 1e6 / max(requests, 1)
    lane = max(busy, key=lambda name: busy[name], default="host")
    lane_ns = busy.get(lane, 0)
    return BalanceCard(
        ms["cpu"],
        ms["link"],
        ms["gpu"],
        requests,
        lane,
        lane_ns / 1e6 / max(requests, 1),
        lane_ns / trace.wall_ns if trace.wall_ns else 0.0,
    )
