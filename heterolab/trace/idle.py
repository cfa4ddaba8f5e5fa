"""Why was the GPU idle? The one place that decides it, moment by moment.

A kernel ends each gap. Before the host has issued it, the question is what the host was doing;
afterwards, what the kernel's stream waited for. Each idle moment gets the first cause that holds:

1. No kernel follows any more: ``output_copy`` or ``input_copy`` while one is under way, then as in 4
   what the host does with this GPU's results; else ``end``: nothing is left to do.
2. The next kernel is issued. What let it start at last (the trace's ``after``; else the op of its
   stream, the event or the copy before it that ended last) is followed back: ``input_copy`` (a copy
   to the device is under way, or in line behind another), ``output_copy`` (a copy to the host is
   before it in its stream), ``event`` (it waits for another stream), ``hand_over`` (the gap between
   two ops, or the way from the call to the start), ``launch_call`` (the host is still inside the
   call that launches it).
3. ``arrivals``: of an open load nothing is there that the GPU could do.
4. ``pageable``: the host is held by a copy from or to pageable memory. ``input_copy``: the kernel's
   own input is on its way. ``sync``: held until the device is done. ``copy_call``, ``launch_call``:
   inside another call. ``cpu:NAME``: at that CPU work, on the host thread, else on a worker.
5. The host sleeps: ``batch_delay`` (requests are there, a slot is free, and the batcher waits for
   more), ``output_copy`` (and no slot is free, or the clients wait for that answer), ``wake`` (what it
   waits for has happened, and it is not awake yet), ``arrivals``. A trace that does not say when its
   requests came: ``unknown``.
6. ``unrecorded``: the host is between two recorded spans, in the pipeline's own loop as a rule. A
   trace without any span of the host: ``unknown``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterolab.trace.metrics import (
    ARRIVALS,
    BATCH_DELAY,
    COPY_CALL,
    CPU_WORK,
    END,
    HOST_SYNC,
    INPUT_COPY,
    LAUNCH_CALL,
    OUTPUT_COPY,
    PAGEABLE,
    UNKNOWN,
    UNRECORDED,
    WAKE,
    union,
)
from heterolab.trace.queue import Queue, held_calls
from heterolab.trace.streams import Label, Streams
from heterolab.trace.trace import API, CPU, D2H, H2D, HOST_KINDS, KERNEL, SYNC, WAIT, Trace

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Piece(NamedTuple):
    """A part of an idle gap with one cause.

    Attributes
    ----------
    start_ns, end_ns, cause
        See the module for the causes.
    blamed
        The spans (their places in the trace) that are the cause, with how long each of them was
        in this piece; the longest first.
    following
        The place of the kernel that ends the gap, -1 at the end.
    gap_start_ns, gap_end_ns
        The whole gap.
    """

    start_ns: int
    end_ns: int
    cause: str
    blamed: tuple[tuple[int, int], ...]
    following: int
    gap_start_ns: int
    gap_end_ns: int


def pieces(trace: Trace, device: int | None = None, queue: Queue | None = None) -> list[Piece]:
    """The idle gaps of a GPU, in order, cut where the cause changes.

    Together they are as long as the GPU is idle between the trace's first start and its last end.

    Parameters
    ----------
    device
        The device's index; None takes all of a trace as one.
    queue
        When requests arrived and were put into batches, where that is known.
    """
    if not len(trace) or trace.wall_ns == 0:
        return []
    kernels = np.flatnonzero((trace["kind"] == KERNEL) & _on(trace, device))
    gaps = _gaps(trace, kernels)
    if not len(gaps):
        return []
    following = np.searchsorted(trace["start_ns"][kernels], gaps[:, 0])
    next_of_gap = np.append(kernels, -1)[following]
    labels = Streams(trace).labels(gaps, next_of_gap)
    moments, ends, gap = _moments(trace, gaps, next_of_gap, labels, queue)
    causes, blamed = _Judge(trace, device, queue, moments, next_of_gap[gap], labels).causes()
    return list(_merged(moments, ends, gap, causes, blamed, gaps.tolist(), next_of_gap.tolist()))


def _on(trace: Trace, device: int | None) -> Mask:
    mask: Mask = np.ones(len(trace), bool) if device is None else trace["device"] == device
    return mask


def _gaps(trace: Trace, kernels: Ints) -> Ints:
    """Where no kernel runs, shape (gaps, 2)."""
    busy = union(trace["start_ns"][kernels], trace["end_ns"][kernels])
    starts = np.append(trace.start_ns, busy[:, 1])
    ends = np.append(busy[:, 0], trace.end_ns)
    some = ends > starts
    return np.stack([starts[some], ends[some]], axis=1)


def _moments(
    trace: Trace, gaps: Ints, next_of_gap: Ints, labels: list[Label], queue: Queue | None
) -> tuple[Ints, Ints, Ints]:
    """The idle time in parts in which nothing changes: starts, ends, and the gap of each."""
    follows = next_of_gap[next_of_gap >= 0]
    changes = [trace["start_ns"], trace["end_ns"], trace["queued_ns"][follows], gaps.ravel()]
    changes.append(np.array([ns for one in labels for ns in one[:2]], np.int64))
    if queue is not None:
        changes.append(queue.moments())
    edges = np.unique(np.concatenate(changes))
    gap = np.searchsorted(gaps[:, 0], edges[:-1], "right") - 1
    idle = (gap >= 0) & (edges[:-1] < gaps[gap, 1])
    return edges[:-1][idle], edges[1:][idle], gap[idle]


def _merged(
    moments: Ints,
    ends: Ints,
    gap: Ints,
    causes: list[str],
    blamed: Ints,
    gaps: list[list[int]],
    next_of_gap: list[int],
) -> Iterable[Piece]:
    """Neighbouring parts of a gap that have the same cause are one piece."""
    rows = zip(moments.tolist(), ends.tolist(), gap.tolist(), causes, blamed.tolist(), strict=True)
    now: tuple[int, str] | None = None
    start = end = 0
    spent: dict[int, int] = {}

    def piece() -> Piece:
        assert now is not None
        longest = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
        return Piece(start, end, now[1], tuple(longest), next_of_gap[now[0]], *gaps[now[0]])

    for moment, until, number, cause, span in rows:
        if (number, cause) != now:
            if now is not None:
                yield piece()
            now, start, spent = (number, cause), moment, {}
        end = until
        if span >= 0:
            spent[span] = spent.get(span, 0) + until - moment
    if now is not None:
        yield piece()


# -- the next kernel is not issued yet: the host's side --------------------------------------


class _Judge:
    """Gives each moment the first cause that holds."""

    def __init__(
        self,
        trace: Trace,
        device: int | None,
        queue: Queue | None,
        moments: Ints,
        following: Ints,
        labels: list[Label],
    ) -> None:
        self.trace, self.device, self.queue, self.moments = trace, device, queue, moments
        self.following, self.labels = following, labels
        self.open = np.ones(len(moments), bool)  # has no cause yet
        self.concerns = self._concerns()
        self.names: list[str] = []
        self.codes = np.zeros(len(moments), np.int64)
        self.blamed = np.full(len(moments), -1, np.int64)

    def causes(self) -> tuple[list[str], Ints]:
        """The cause of each moment, and the span that is to blame (its place, or -1)."""
        trace, kind, lane = self.trace, self.trace["kind"], self.trace["lane"]
        on_device, on_host, tail = _on(trace, self.device), lane == "host", self.following < 0
        copying_in = self.during((kind == H2D) & on_device)
        copying_out = self.during((kind == D2H) & on_device)
        self.put(OUTPUT_COPY, tail & (copying_out >= 0), copying_out)
        self.put(INPUT_COPY, tail & (copying_in >= 0), copying_in)
        self.put_labels()
        if self.queue is not None:
            self.put(ARRIVALS, ~tail & self.queue.nothing_to_do(self.moments, trace, self.device))
        held, copy_call = held_calls(trace)
        self.put_host(PAGEABLE, held)
        own = (copying_in >= 0) & (trace["stream"][copying_in] == trace["stream"][self.following])
        own &= trace["op"][copying_in] < trace["op"][self.following]
        self.put(INPUT_COPY, own, copying_in)
        self.put(HOST_SYNC, at := np.where(tail, -1, self.during(kind == SYNC)), at)
        self.put_host(COPY_CALL, copy_call)
        self.put_host(LAUNCH_CALL, (kind == API) & ~copy_call)
        for work in (on_host & (kind == CPU), ~on_host & (kind == CPU)):
            for name in np.unique(trace["name"][work]).tolist():
                self.put_host(CPU_WORK + name, work & (trace["name"] == name))
        self.put(END, tail)
        asleep = self.during(kind == WAIT)
        self.put_asleep(asleep, copying_out)
        blind = not np.isin(kind, HOST_KINDS).any()
        self.put(UNKNOWN if blind else UNRECORDED, np.ones(len(self.moments), bool))
        return [self.names[code] for code in self.codes.tolist()], self.blamed

    def put(self, cause: str, holds: Mask | Ints, span: Ints | None = None) -> None:
        """`holds`: where the cause holds (a place of -1: it does not); `span`: what is to blame."""
        here = self.open & (holds if holds.dtype == bool else holds >= 0)
        if not here.any():
            return
        if cause not in self.names:
            self.names.append(cause)
        self.codes[here] = self.names.index(cause)
        if span is not None:
            self.blamed[here] = span[here]
        self.open &= ~here

    def put_host(self, cause: str, spans: Mask) -> None:
        """The host is in one of `spans`. After a GPU's last kernel only what concerns it counts."""
        at = self.during(spans)
        self.put(cause, (at >= 0) & ((self.following >= 0) | self.concerns[at]), at)

    def put_labels(self) -> None:
        """What the streams say of kernels that were issued."""
        if not self.labels:
            return
        starts, ends, spans = (np.array([one[i] for one in self.labels], np.int64) for i in (0, 1, 3))
        at = np.searchsorted(starts, self.moments, "right") - 1
        inside = (at >= 0) & (self.moments < ends[at])
        causes = np.array([one.cause for one in self.labels])[at]
        for cause in np.unique(causes[inside]).tolist():
            self.put(cause, inside & (causes == cause), spans[at])

    def put_asleep(self, asleep: Ints, copying_out: Ints) -> None:
        """The host sleeps. What for?"""
        sleeps, queue = asleep >= 0, self.queue
        if queue is None:
            self.put(OUTPUT_COPY, sleeps & (copying_out >= 0), copying_out)
            self.put(UNKNOWN, sleeps, asleep)
            return
        waiting, within_delay = queue.waiting(self.moments)
        flying = queue.in_flight(self.moments)
        slot = flying < queue.slots
        self.put(BATCH_DELAY, sleeps & waiting & slot & within_delay, asleep)
        full = waiting & ~slot
        clients_wait = ~waiting & (flying > 0) & queue.closed
        self.put(OUTPUT_COPY, sleeps & (full | clients_wait) & (copying_out >= 0), copying_out)
        late = waiting | clients_wait | queue.in_preparation(self.moments)
        self.put(WAKE, sleeps & late, asleep)
        self.put(ARRIVALS, sleeps, asleep)

    def during(self, mask: Mask) -> Ints:
        """For each moment the place of a span of `mask` that covers it, or -1."""
        places = np.flatnonzero(mask)
        if not len(places):
            return np.full(len(self.moments), -1, np.int64)
        ends = self.trace["end_ns"][places]  # by start, as the trace is
        reach = np.maximum.accumulate(ends)
        furthest = np.maximum.accumulate(np.where(ends == reach, np.arange(len(ends)), 0))
        at = np.searchsorted(self.trace["start_ns"][places], self.moments, "right") - 1
        covered = (at >= 0) & (reach[at] > self.moments)
        return np.where(covered, places[furthest[at]], -1)

    def _concerns(self) -> Mask:
        """Which of the host's spans are work for this GPU: calls to it, and work on its batches."""
        trace = self.trace
        kernels = trace["kind"] == KERNEL
        others = kernels & ~_on(trace, self.device)
        if not others.any():  # it is the only one
            return np.ones(len(trace), bool)
        batches = np.unique(trace["batch"][kernels & ~others])
        work = np.isin(trace["batch"], batches[batches >= 0])
        mask: Mask = np.where(trace["kind"] == CPU, work, _on(trace, self.device))
        return mask
