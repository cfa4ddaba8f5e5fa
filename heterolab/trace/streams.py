"""What an op waited for once the host had issued it: the op, event, copy or call before it.

A simulated op knows whose end let it start (a span's ``after``). That was an event if its stream was
told to wait for one, else an engine that did one thing at a time. For a measured op it is the last
to end of those that can have held it: the ops before it in its stream, what its stream waited for
through an event, and for a copy the copy that its engine did before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterolab.trace.metrics import (
    COPY_CALL,
    EVENT,
    HAND_OVER,
    INPUT_COPY,
    LAUNCH_CALL,
    OUTPUT_COPY,
    PAGEABLE,
    UNKNOWN,
)
from heterolab.trace.queue import held_calls
from heterolab.trace.trace import API, D2H, DEFAULT_STREAM, DEVICE_KINDS, H2D, KERNEL, Trace

#: From the call to the start of an op that nothing holds up a device needs less than this.
LONGEST_HAND_OVER_NS = 100_000
#: Of a stream's ops before an op so many are looked at: the last ones are what it waits for.
LOOK_BACK = 8

#: How an op was held up: by one of its stream, by its engine; or through an event.
SAME, ENGINE = "same", "engine"

#: The cause while an op of that kind is under way before the next kernel.
_AT_WORK = {H2D: INPUT_COPY, D2H: OUTPUT_COPY}

Ints = NDArray[np.int64]


class Label(NamedTuple):
    """From when to when an issued kernel waited for what; `span` is the place of that, or -1."""

    start_ns: int
    end_ns: int
    cause: str
    span: int


class Op(NamedTuple):
    """A device op: where its first span is, its stream, and its times."""

    place: int
    number: int
    kind: str
    stream: tuple[int, int]  # (device, stream)
    queued_ns: int
    start_ns: int
    end_ns: int
    after: int


class Streams:
    """All streams of a trace: what did an issued op wait for?"""

    def __init__(self, trace: Trace) -> None:
        columns = ("kind", "device", "stream", "op", "queued_ns", "start_ns", "end_ns", "after")
        self.rows = list(zip(*(trace[name].tolist() for name in columns), strict=True))
        # On a CPU that plays the device a stream is a thread: it goes on once it is given a core.
        self.on_gpu = trace.source not in ("simulated", "cpu-clock")
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
        self.by_stream: dict[tuple[int, int], list[Op]] = defaultdict(list)
        for number in sorted(self.ops):
            self.by_stream[self.ops[number].stream].append(self.ops[number])
        self.place_in_stream = {op.number: i for ops in self.by_stream.values() for i, op in enumerate(ops)}
        self.by_end = sorted(self.ops.values(), key=lambda op: (op.end_ns, op.number))
        self.ends = [op.end_ns for op in self.by_end]
        self.held = set(np.flatnonzero(held_calls(trace)[0]).tolist())

    def _op(self, number: int, places: list[int]) -> Op:
        kind, device, stream, _, queued, start, _, after = self.rows[places[0]]
        end = max(self.rows[place][6] for place in places)
        return Op(places[0], number, kind, (device, stream), queued, start, end, after)

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

        op, by_event, met = self.ops[number], -1, {number}
        while start > lowest:
            before, how = self.before(op)
            if before is None or before.number in met:  # a file may say that two ops wait for each other
                self._from_the_call(op, put, by_event)
                put(lowest, UNKNOWN, -1)
                break
            met.add(before.number)
            if how == EVENT and by_event < 0:
                by_event = before.place
            in_line = how == ENGINE and op.kind == H2D  # its own copy stands in line behind that one
            gap = INPUT_COPY if in_line else self._hand_over(op.start_ns - before.end_ns)
            put(before.end_ns, EVENT if how == EVENT else gap, before.place)
            cause = INPUT_COPY if in_line else _AT_WORK.get(before.kind, HAND_OVER)
            if by_event >= 0:
                put(before.start_ns, EVENT, by_event)
            else:
                put(before.start_ns, cause, before.place)
            op = before
        return labels

    def _from_the_call(self, op: Op, put: Callable[[int, str, int], None], by_event: int) -> None:
        """Nothing held up `op` but its own call, and the way from there to its start."""
        call = self.calls.get(op.number)
        issued = self.issued_ns(op)
        if by_event >= 0:
            put(op.queued_ns, EVENT, by_event)
            return
        put(issued, self._hand_over(op.start_ns - issued), op.place)
        if call:
            inside = LAUNCH_CALL if op.kind == KERNEL else PAGEABLE if call[0] in self.held else COPY_CALL
            put(op.queued_ns, inside, call[0])

    def _hand_over(self, took_ns: int) -> str:
        """The name of a pause in which nothing is known to have held up an op: a long one on a GPU has
        a reason that the trace does not tell."""
        return UNKNOWN if self.on_gpu and took_ns > LONGEST_HAND_OVER_NS else HAND_OVER

    def issued_ns(self, op: Op) -> int:
        """When the host had issued it: at the end of its call, or when it started if that was sooner."""
        call = self.calls.get(op.number)
        return min(call[2], op.start_ns) if call else op.queued_ns

    def before(self, op: Op) -> tuple[Op | None, str]:
        """The op whose end let `op` start, and how: ``same`` stream, ``event``, copy ``engine``.
        None where the host's call was the last thing that it waited for."""
        known = self.ops.get(op.after)
        if known is not None and known.number != op.number and known.end_ns <= op.start_ns:
            if known.stream == op.stream:
                return known, SAME
            barrier = DEFAULT_STREAM in (known.stream[1], op.stream[1])  # of the legacy default stream
            return known, EVENT if barrier or known.number < self._told_to_wait(op) else ENGINE
        found = [(one, SAME) for one in self._same_stream(op)]
        found += [(one, EVENT) for one in self._through_event(op)]
        found += [(one, ENGINE) for one in self._same_engine(op)]
        last = max(found, key=lambda pair: pair[0].end_ns, default=None)
        if last is None or last[0].end_ns < self.issued_ns(op):
            return None, ""
        return last

    def _same_stream(self, op: Op) -> list[Op]:
        """Of the ops before it in its stream, the one that ended last before its start."""
        i = self.place_in_stream[op.number]
        ended = [
            one for one in self.by_stream[op.stream][max(i - LOOK_BACK, 0) : i] if one.end_ns <= op.start_ns
        ]
        return [max(ended, key=lambda one: one.end_ns)] if ended else []

    def _through_event(self, op: Op) -> list[Op]:
        """The op of another stream that it can have waited for by an event: of those issued before
        its stream was told to wait, the one that ended last before its start."""
        wait = self._told_to_wait(op)
        if wait < 0:
            return []
        return self._ended_before(op, lambda one: one.stream != op.stream and one.number < wait)

    def _told_to_wait(self, op: Op) -> int:
        """The number of the call that last told `op`'s stream to wait for an event, if that was after
        the op before it in the stream; else -1."""
        i = self.place_in_stream[op.number]
        previous = self.by_stream[op.stream][i - 1].number if i else -1
        waits = self.event_waits.get(op.stream, [])
        last = bisect_left(waits, op.number) - 1
        return waits[last] if last >= 0 and waits[last] > previous else -1

    def _same_engine(self, op: Op) -> list[Op]:
        """The copy that its engine did last before it."""
        if op.kind == KERNEL:
            return []
        device = op.stream[0]
        return self._ended_before(
            op, lambda one: one.kind == op.kind and one.stream[0] == device and one.stream != op.stream
        )

    def _ended_before(self, op: Op, fits: Callable[[Op], bool]) -> list[Op]:
        last = bisect_right(self.ends, op.start_ns)
        for one in reversed(self.by_end[max(last - 4 * LOOK_BACK, 0) : last]):
            if one.number != op.number and fits(one):
                return [one]
        return []

    def last_place(self, op: Op) -> int:
        """The place of the span with which `op` ends."""
        return max(self.spans_of[op.number], key=lambda place: (self.rows[place][6], place))

    def piece_before(self, place: int) -> int:
        """The span before this one of the same op, or -1: a composite op has several."""
        places = self.spans_of[self.rows[place][3]]
        i = bisect_left(places, place)
        return places[i - 1] if i else -1

    def _call_of(self, number: int) -> int:
        call = self.calls.get(number)
        return call[0] if call else -1
