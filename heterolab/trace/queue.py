"""When requests arrived, waited and went: what a trace of a pipeline says of them, if it does.

A run keeps the times of every request, and its trace carries them in ``meta["requests"]``, so that
a recording can say whether the host slept for want of requests or for the batch delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from heterolab.trace.trace import API, D2H, H2D, KERNEL, Trace

if TYPE_CHECKING:
    from heterolab.pipeline.run import Timing

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: A moment that never came.
NEVER_NS = np.iinfo(np.int64).max
#: A call that copies pinned memory takes less: it only enqueues.
SHORT_CALL_NS = 20_000

COLUMNS = ("arrival_ns", "prepared_ns", "batched_ns", "done_ns", "batch")


def noted(timings: Mapping[int, Timing]) -> dict[str, list[int]]:
    """Requests' times as a trace's meta keeps them: a column each, by request id; -1: not yet."""
    rows = [timing for _, timing in sorted(timings.items())]
    return {name: [getattr(row, name) for row in rows] for name in COLUMNS}


@dataclass(frozen=True)
class Queue:
    """The requests of a run, by the moments at which something happened to them.

    Attributes
    ----------
    arrived_ns, prepared_ns, batched_ns, done_ns
        Shape (requests,); :data:`NEVER_NS` where it did not happen.
    batch
        Batch numbers, -1 for none.
    delay_ns, slots
        The batch delay, and how many batches can be in flight.
    closed
        Whether clients wait for their answers before they ask again.
    """

    arrived_ns: Ints
    prepared_ns: Ints
    batched_ns: Ints
    done_ns: Ints
    batch: Ints
    delay_ns: int
    slots: int
    closed: bool

    @classmethod
    def of(cls, trace: Trace) -> Queue | None:
        """What the trace says of its requests; None where it does not, or cannot be believed."""
        from heterolab.trace.compare import settings_of

        columns, settings = trace.meta.get("requests"), settings_of(trace)
        if not isinstance(columns, dict) or settings is None:
            return None
        try:
            times = [np.array(columns[name], np.int64).reshape(-1) for name in COLUMNS]
            delay_ns = round(float(settings["max_delay_ms"]) * 1e6)
            slots = int(settings["streams"]) * int(settings["ring"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if len({len(column) for column in times}) != 1:
            return None
        arrived, prepared, batched, done = (np.where(ns < 0, NEVER_NS, ns) for ns in times[:4])
        closed = str(trace.meta.get("load", "")).startswith("closed_loop(")
        return cls(arrived, prepared, batched, done, times[4], delay_ns, slots, closed)

    def moments(self) -> Ints:
        """All moments at which one of the answers below may change."""
        due = self._due_ns()
        every = np.concatenate([self.arrived_ns, self.prepared_ns, self.batched_ns, self.done_ns, due])
        return every[every < NEVER_NS]

    def waiting(self, moments: Ints) -> tuple[Mask, Mask]:
        """At each moment: is a request ready and in no batch yet? And have all such waited for less
        than the batch delay?"""
        ready = counted(moments, self.prepared_ns, self.batched_ns)
        young = counted(moments, self.prepared_ns, np.minimum(self.batched_ns, self._due_ns()))
        return ready > 0, ready == young

    def in_preparation(self, moments: Ints) -> Mask:
        """At each moment: has a request arrived that is neither ready for a batch nor refused?"""
        inside: Mask = counted(moments, self.arrived_ns, np.minimum(self.prepared_ns, self.done_ns)) > 0
        return inside

    def in_flight(self, moments: Ints) -> Ints:
        """At each moment: how many batches are under way, from their making to their answers?"""
        numbers = np.unique(self.batch[self.batch >= 0])
        first = np.searchsorted(numbers, self.batch[self.batch >= 0])
        starts, ends = np.full(len(numbers), NEVER_NS), np.zeros(len(numbers), np.int64)
        np.minimum.at(starts, first, self.batched_ns[self.batch >= 0])
        np.maximum.at(ends, first, self.done_ns[self.batch >= 0])
        return counted(moments, starts, ends)

    def nothing_to_do(self, moments: Ints, trace: Trace, device: int | None) -> Mask:
        """At each moment: is every request that arrived done with the GPU? Of an open load only: in a
        closed loop the next request waits for what the host does with this one."""
        if self.closed:
            return np.zeros(len(moments), bool)
        computed = np.minimum(self.done_ns, self._computed_ns(trace, device))
        nobody: Mask = counted(moments, self.arrived_ns, computed) == 0
        return nobody

    def _computed_ns(self, trace: Trace, device: int | None) -> Ints:
        """When the last kernel of each request's batch had ended."""
        mask = (trace["kind"] == KERNEL) & (trace["batch"] >= 0)
        if device is not None:
            mask &= trace["device"] == device
        known = int(max(self.batch.max(initial=-1), trace["batch"][mask].max(initial=-1)))
        ends = np.full(known + 2, -1, np.int64)
        np.maximum.at(ends, trace["batch"][mask], trace["end_ns"][mask])
        ended = ends[self.batch]  # the last entry is for those in no batch
        return np.where(ended < 0, NEVER_NS, ended)

    def _due_ns(self) -> Ints:
        """When each request has waited for as long as it may."""
        never = self.prepared_ns == NEVER_NS
        return np.where(never, NEVER_NS, np.where(never, 0, self.prepared_ns) + self.delay_ns)


def counted(moments: Ints, starts: Ints, ends: Ints) -> Ints:
    """At each moment, how many intervals [start, end) cover it?"""
    real = ends > starts
    began = np.searchsorted(np.sort(starts[real]), moments, "right")
    ended = np.searchsorted(np.sort(ends[real]), moments, "right")
    return (began - ended).astype(np.int64)


def held_calls(trace: Trace) -> tuple[Mask, Mask]:
    """Which spans are copy calls that hold the host, and which are other copy calls.

    Memory that is not pinned has to be staged, and the call goes on until that is done. A trace
    of a pipeline says which memory it used. Else a call counts as held that was no short one and
    did not return before half of its copy was over.
    """
    from heterolab.trace.compare import settings_of

    copies = (trace["kind"] == H2D) | (trace["kind"] == D2H)
    calls = (trace["kind"] == API) & np.isin(trace["op"], trace["op"][copies])
    memory = (settings_of(trace) or {}).get("memory")
    if memory is not None:
        held = calls if memory == "pageable" else np.zeros(len(trace), bool)
        return held, calls & ~held
    places = np.flatnonzero(copies)
    order = places[np.argsort(trace["op"][places], kind="stable")]
    numbers, first = np.unique(trace["op"][order], return_index=True)
    held = np.zeros(len(trace), bool)
    if len(numbers):
        starts = np.minimum.reduceat(trace["start_ns"][order], first)
        ends = np.maximum.reduceat(trace["end_ns"][order], first)
        mine = np.flatnonzero(calls)
        at = np.searchsorted(numbers, trace["op"][mine])
        call_start, call_end = trace["start_ns"][mine], trace["end_ns"][mine]
        both = np.minimum(call_end, ends[at]) - np.maximum(call_start, starts[at])
        long = call_end - call_start >= SHORT_CALL_NS
        held[mine] = long & (2 * both >= ends[at] - starts[at])
    return held, calls & ~held
