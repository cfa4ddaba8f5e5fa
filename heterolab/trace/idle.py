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

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterolab.trace.metrics import (
    ARRIVALS,
    BATCH_DELAY,
    COPY_CALL,
    CPU_WORK,
    END,
    EVENT,
    HAND_OVER,
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
from heterolab.trace.trace import API, CPU, D2H, DEVICE_KINDS, H2D, HOST_KINDS, KERNEL, SYNC, WAIT, Trace

#: From the call to the start of an op that nothing holds up a device needs less than this.
LONGEST_HAND_OVER_NS = 100_000
#: Of a stream's ops before an op so many are looked at: the last ones are what it waits for.
LOOK_BACK = 8

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


class Label(NamedTuple):
    """From when to when an issued kernel waited for what; `span` is the place of that, or -1."""

    start_ns: int
    end_ns: int
    cause: str
    span: int


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
    labels = _Streams(trace).labels(gaps, next_of_gap)
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


# -- the next kernel is issued: the device's side ----------------------------------------------


class _Op(NamedTuple):
    """A device op: where its first span is, its stream, and its times."""

    place: int
    number: int
    kind: str
    stream: tuple[int, int]  # (device, stream)
    queued_ns: int
    start_ns: int
    end_ns: int
    after: int


class _Streams:
    """All streams of a trace: what did an issued op wait for?"""

    def __init__(self, trace: Trace) -> None:
        columns = ("kind", "device", "stream", "op", "queued_ns", "start_ns", "end_ns", "after")
        self.rows = list(zip(*(trace[name].tolist() for name in columns), strict=True))
        self.measured = trace.source != "simulated"
        self.spans_of: dict[int, list[int]] = defaultdict(list)  # op → places of its device spans
        self.calls: dict[int, tuple[int, int, int]] = {}  # op → (place, start, end) of its call
        self.event_waits: dict[tuple[int, int], list[int]] = defaultdict(list)  # stream → op numbers
        names = trace["name"].tolist()
        for place, row in enumerate(self.rows):
            if row[0] in DEVICE_KINDS:
                self.spans_of[row[3]].append(place)
            elif row[0] == API:
                self.calls[row[3]] = (place, row[5], row[6])
                if names[place] == "wait":
                    self.event_waits[row[1], row[2]].append(row[3])
        self.ops = {number: self._op(number, places) for number, places in self.spans_of.items()}
        self.by_stream: dict[tuple[int, int], list[_Op]] = defaultdict(list)
        for number in sorted(self.ops):
            self.by_stream[self.ops[number].stream].append(self.ops[number])
        self.place_in_stream = {op.number: i for ops in self.by_stream.values() for i, op in enumerate(ops)}
        self.by_end = sorted(self.ops.values(), key=lambda op: (op.end_ns, op.number))
        self.ends = [op.end_ns for op in self.by_end]
        self.held = set(np.flatnonzero(held_calls(trace)[0]).tolist())

    def _op(self, number: int, places: list[int]) -> _Op:
        kind, device, stream, _, queued, start, _, after = self.rows[places[0]]
        end = max(self.rows[place][6] for place in places)
        return _Op(places[0], number, kind, (device, stream), queued, start, end, after)

    def labels(self, gaps: Ints, next_of_gap: Ints) -> list[Label]:
        """For every gap's part in which its kernel was issued already, what it waited for."""
        found: list[Label] = []
        for (start, _), place in zip(gaps.tolist(), next_of_gap.tolist(), strict=True):
            if place >= 0:
                found += reversed(self._of_kernel(place, start))
        return found

    def _of_kernel(self, place: int, gap_start: int) -> list[Label]:
        """Labels from the kernel's start back to when it was issued, or to the gap's start."""
        _, _, _, number, queued, start, _, _ = self.rows[place]
        lowest = max(gap_start, queued)
        if start <= lowest:
            return []
        if place != self.ops[number].place:  # a later kernel of a composite op
            late = queued > gap_start  # it was launched after the one before it had ended
            return [Label(lowest, start, LAUNCH_CALL if late else HAND_OVER, self._call_of(number))]
        labels: list[Label] = []

        def put(begin: int, cause: str, span: int) -> None:
            nonlocal start
            begin = max(begin, lowest)
            if begin < start:
                labels.append(Label(begin, start, cause, span))
                start = begin

        op, by_event = self.ops[number], -1
        while start > lowest:
            before, how = self.before(op)
            if before is None:
                self._from_the_call(op, put, by_event)
                put(lowest, UNKNOWN, -1)
                break
            if how == EVENT and by_event < 0:
                by_event = before.place
            gap = EVENT if how == EVENT else INPUT_COPY if how == "engine" and op.kind == H2D else HAND_OVER
            put(before.end_ns, gap, before.place)
            cause = {H2D: INPUT_COPY, D2H: OUTPUT_COPY}.get(before.kind, HAND_OVER)
            if how == "engine" and op.kind == H2D:
                cause = INPUT_COPY  # its own copy stands in line behind this one
            span = before.place
            if by_event >= 0:
                cause, span = EVENT, by_event
            put(before.start_ns, cause, span)
            op = before
        return labels

    def _from_the_call(self, op: _Op, put: Callable[[int, str, int], None], by_event: int) -> None:
        """Nothing held up `op` but its own call, and the way from there to its start."""
        call = self.calls.get(op.number)
        call_end = min(call[2], op.start_ns) if call else op.queued_ns
        latency = op.start_ns - call_end
        odd = self.measured and latency > LONGEST_HAND_OVER_NS
        cause, span = (EVENT, by_event) if by_event >= 0 else (UNKNOWN if odd else HAND_OVER, op.place)
        put(call_end, cause, span)
        if call:
            inside = LAUNCH_CALL if op.kind == KERNEL else PAGEABLE if call[0] in self.held else COPY_CALL
            put(op.queued_ns, EVENT if by_event >= 0 else inside, by_event if by_event >= 0 else call[0])

    def before(self, op: _Op) -> tuple[_Op | None, str]:
        """The op whose end let `op` start, and how: ``same`` stream, ``event``, copy ``engine``.
        None where the host's call was the last thing that it waited for."""
        known = self.ops.get(op.after)
        if known is not None and known.number != op.number and known.end_ns <= op.start_ns:
            if known.stream == op.stream:
                return known, "same"
            same_engine = op.kind != KERNEL and known.kind == op.kind and known.stream[0] == op.stream[0]
            return known, "engine" if same_engine else EVENT
        found = [(one, "same") for one in self._same_stream(op)]
        found += [(one, EVENT) for one in self._through_event(op)]
        found += [(one, "engine") for one in self._same_engine(op)]
        call = self.calls.get(op.number)
        issued = min(call[2], op.start_ns) if call else op.queued_ns
        last = max(found, key=lambda pair: pair[0].end_ns, default=None)
        if last is None or last[0].end_ns < issued:
            return None, ""
        return last

    def _same_stream(self, op: _Op) -> list[_Op]:
        """Of the ops before it in its stream, the one that ended last before its start."""
        i = self.place_in_stream[op.number]
        ended = [
            one for one in self.by_stream[op.stream][max(i - LOOK_BACK, 0) : i] if one.end_ns <= op.start_ns
        ]
        return [max(ended, key=lambda one: one.end_ns)] if ended else []

    def _through_event(self, op: _Op) -> list[_Op]:
        """The op of another stream that it can have waited for by an event, or by the legacy
        default stream's barrier: the one that ended last before its start."""
        i = self.place_in_stream[op.number]
        previous = self.by_stream[op.stream][i - 1].number if i else -1
        waits = [n for n in self.event_waits.get(op.stream, ()) if previous < n < op.number]
        if not waits:
            return []
        return self._ended_before(op, lambda one: one.stream != op.stream and one.number < waits[-1])

    def _same_engine(self, op: _Op) -> list[_Op]:
        """The copy that its engine did last before it."""
        if op.kind == KERNEL:
            return []
        device = op.stream[0]
        return self._ended_before(
            op, lambda one: one.kind == op.kind and one.stream[0] == device and one.stream != op.stream
        )

    def _ended_before(self, op: _Op, fits: Callable[[_Op], bool]) -> list[_Op]:
        last = int(np.searchsorted(self.ends, op.start_ns, "right"))
        for one in reversed(self.by_end[max(last - 4 * LOOK_BACK, 0) : last]):
            if one.number != op.number and fits(one):
                return [one]
        return []

    def _call_of(self, number: int) -> int:
        call = self.calls.get(number)
        return call[0] if call else -1
