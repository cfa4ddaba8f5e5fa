"""The critical path: the chain of work and waits that made a run as long as it was.

It is found from the end backwards. The last answer came at the end of some work of the host. What
did that wait for? The host's work before it, or, where the host slept, what woke it: a job of a
worker, or the last op of a batch. That op waited for the op, event, copy or call before it. So every
moment of the run lies on one step, and to make any other work quicker would not have helped.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from heterolab.trace.metrics import (
    ARRIVALS,
    BATCH_DELAY,
    EVENT,
    HAND_OVER,
    HOST_SYNC,
    INPUT_COPY,
    UNKNOWN,
    UNRECORDED,
    WAKE,
)
from heterolab.trace.queue import Queue
from heterolab.trace.streams import ENGINE, Streams
from heterolab.trace.trace import API, CPU, D2H, DEVICE_KINDS, H2D, NO_STREAM, NONE, SYNC, WAIT, Span, Trace


@dataclass(frozen=True)
class Step:
    """A part of the critical path.

    Attributes
    ----------
    start_ns, end_ns
        When.
    lane
        On which lane; a wait lies on the lane that waited.
    name
        The work; empty for a wait.
    cause
        Of a wait its cause, as in :mod:`heterolab.trace.idle`; empty for work.
    kind, op, batch
        Those of the span, where there is one.
    """

    start_ns: int
    end_ns: int
    lane: str
    name: str = ""
    cause: str = ""
    kind: str = ""
    op: int = NONE
    batch: int = NONE

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(trace: Trace, queue: Queue | None = None) -> tuple[Step, ...]:
    """The steps from the trace's first start to its last end, in order, without holes."""
    return tuple(_Walk(trace, queue).back()) if trace.wall_ns else ()


def totals(path: tuple[Step, ...]) -> dict[tuple[str, str, str], int]:
    """Nanoseconds on the path by (lane, name of the work, cause of the wait), the largest first: of
    the two last one is empty."""
    sums: dict[tuple[str, str, str], int] = defaultdict(int)
    for step in path:
        sums[step.lane, step.name, step.cause] += step.took_ns
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


class _Ends:
    """Spans by their ends."""

    def __init__(self, spans: list[Span], places: Iterable[int]) -> None:
        self.places = sorted(places, key=lambda i: (spans[i].end_ns, i))
        self.ends = [spans[i].end_ns for i in self.places]

    def last(self, after_ns: int, until_ns: int) -> int:
        """The place of the last span to end in (after, until], or -1."""
        i = bisect_right(self.ends, until_ns) - 1
        return self.places[i] if i >= 0 and self.ends[i] > after_ns else -1


class _Walk:
    """Goes back through a trace; `now_ns` is how far it has come."""

    def __init__(self, trace: Trace, queue: Queue | None) -> None:
        self.spans = spans = list(trace)
        self.first_ns, self.now_ns = trace.start_ns, trace.end_ns
        self.queue, self.streams = queue, Streams(trace)
        self.steps: list[Step] = []
        self.seen: set[int] = set()  # spans met since it last came further back
        self.on_host = [i for i, span in enumerate(spans) if span.lane == "host"]
        self.host_starts = [spans[i].start_ns for i in self.on_host]
        self.starts = [span.start_ns for span in spans]
        self.on_worker: dict[str, list[int]] = defaultdict(list)
        ops: dict[int, list[int]] = defaultdict(list)
        for i, span in enumerate(spans):
            if span.kind in DEVICE_KINDS:
                ops[span.batch].append(i)
            elif span.kind == CPU and span.lane != "host":
                self.on_worker[span.lane].append(i)
        #: Older recordings do not show that requests join the queue, after a job and before a batch.
        self.tells_enqueue = any(span.name == "enqueue" for span in spans)
        self.jobs = _Ends(spans, (i for places in self.on_worker.values() for i in places))
        self.ops = _Ends(spans, (i for places in ops.values() for i in places))
        self.ops_of = {batch: _Ends(spans, places) for batch, places in ops.items() if batch != NONE}
        self.ops_on = {
            stream: _Ends(spans, (i for op in mine for i in self.streams.spans_of[op.number]))
            for stream, mine in self.streams.by_stream.items()
        }

    def back(self) -> list[Step]:
        place = self.last_of_all()
        while self.now_ns > self.first_ns:
            if place < 0 or place in self.seen or self.spans[place].start_ns > self.now_ns:
                self.step_back()  # nothing tells what came before
                place = -1
                continue
            self.seen.add(place)
            span = self.spans[place]
            if span.end_ns < self.now_ns:
                self.wait(span.end_ns, "host", UNRECORDED)
            if span.kind in DEVICE_KINDS:
                place = self.before_op(place, span)
            elif span.kind == SYNC:
                place = self.before_sync(span)
            elif span.kind == WAIT:
                place = self.before_sleep(span)
            elif span.lane == "host":
                place = self.before_host_work(span)
            else:
                place = self.before_job(place, span)
        return self.steps[::-1]

    def step_back(self) -> None:
        """Go on with the last span that began before now, whatever it is: this always comes further."""
        span = self.spans[bisect_left(self.starts, self.now_ns) - 1]
        self.wait(min(span.end_ns, self.now_ns), "host", UNRECORDED)
        if span.kind in (WAIT, SYNC):
            self.wait(span.start_ns, span.lane, UNKNOWN if span.kind == WAIT else HOST_SYNC)
        else:
            self.work(span)

    # -- steps -----------------------------------------------------------------------------

    def work(self, span: Span) -> None:
        """`span` was at work up to now."""
        self.step(span.start_ns, span.lane, name=span.name, kind=span.kind, op=span.op, batch=span.batch)

    def wait(self, since_ns: int, lane: str, cause: str) -> None:
        self.step(since_ns, lane, cause=cause)

    def step(self, start_ns: int, lane: str, **what: Any) -> None:
        start_ns = max(start_ns, self.first_ns)
        if start_ns < self.now_ns:
            self.steps.append(Step(start_ns, self.now_ns, lane, **what))
            self.now_ns = start_ns
            self.seen.clear()

    # -- what came before --------------------------------------------------------------------

    def last_of_all(self) -> int:
        """The host's last work, or what held it last; where the trace has none, the last op."""
        worked = [i for i in self.on_host if self.spans[i].kind != WAIT]
        candidates = worked or self.ops.places or range(len(self.spans))
        place = max(candidates, key=lambda i: (self.spans[i].end_ns, i))
        if self.spans[place].end_ns < max(self.ops.ends, default=0):
            return self.ops.places[-1]  # a program that does not wait for its last op
        return place

    def host_before(self) -> int:
        """What the host was at now, or the last thing before."""
        i = bisect_left(self.host_starts, self.now_ns) - 1
        if i < 0:
            self.wait(self.first_ns, "host", UNRECORDED)
            return -1
        return self.on_host[i]

    def before_host_work(self, span: Span) -> int:
        if span.kind == API and span.op in self.streams.ops:
            op = self.streams.ops[span.op]
            if op.kind == D2H and span.start_ns < op.end_ns <= self.now_ns:  # held until its copy is done
                self.step(op.end_ns, "host", name=span.name, kind=API, op=span.op, batch=span.batch)
                return op.place
        self.work(span)
        return self.host_before()

    def before_sync(self, span: Span) -> int:
        """The host was held until its stream, or the device, was idle."""
        ops = self.ops if span.stream == NO_STREAM else self.ops_on.get((span.device, span.stream))
        place = -1 if ops is None else ops.last(span.start_ns, self.now_ns)
        self.wait(span.start_ns if place < 0 else self.spans[place].end_ns, "host", HOST_SYNC)
        return self.host_before() if place < 0 else place

    def before_sleep(self, span: Span) -> int:
        """The host slept. What woke it? What it does next tells."""
        place, cause = self.woken_by(span)
        if place >= 0:
            self.wait(self.spans[place].end_ns, "host", WAKE)
            return place
        self.wait(span.start_ns, "host", cause)
        return self.host_before()

    def woken_by(self, span: Span) -> tuple[int, str]:
        """The span whose end ended a sleep; or -1, and why the host slept."""
        i = bisect_right(self.host_starts, span.start_ns)
        then = self.spans[self.on_host[i]] if i < len(self.on_host) else None
        job = self.jobs.last(span.start_ns, self.now_ns)
        if then is None or then.kind != CPU:
            return max(job, self.ops.last(span.start_ns, self.now_ns), key=self._end), UNKNOWN
        if then.name == "admit":
            return -1, ARRIVALS
        if then.name == "batch" and (job < 0 or self.tells_enqueue):
            return -1, BATCH_DELAY
        if then.batch in self.ops_of:
            return self.ops_of[then.batch].last(span.start_ns, self.now_ns), UNKNOWN
        return job if job >= 0 else self.ops.last(span.start_ns, self.now_ns), UNKNOWN

    def _end(self, place: int) -> int:
        return self.spans[place].end_ns if place >= 0 else -1

    def before_job(self, place: int, span: Span) -> int:
        """A worker's job: before it the worker was busy, or the job was not there yet."""
        self.work(span)
        same = self.on_worker[span.lane]
        i = bisect_left(same, place)
        if i and self.spans[same[i - 1]].end_ns > span.queued_ns:
            self.wait(self.spans[same[i - 1]].end_ns, span.lane, HAND_OVER)
            return same[i - 1]
        self.wait(span.queued_ns, span.lane, HAND_OVER)
        return self.host_before()

    def before_op(self, place: int, span: Span) -> int:
        """A device op: before it another op ended, or the host issued it."""
        self.work(span)
        op = self.streams.ops[span.op]
        call = self.streams.calls.get(span.op)
        before = self.streams.piece_before(place)
        if before >= 0 and (call is None or self.spans[before].end_ns >= span.queued_ns):
            self.wait(self.spans[before].end_ns, span.lane, HAND_OVER)
            return before
        if before < 0:
            last, how = self.streams.before(op)
            if last is not None:
                in_line = how == ENGINE and op.kind == H2D
                cause = EVENT if how == EVENT else INPUT_COPY if in_line else HAND_OVER
                self.wait(last.end_ns, span.lane, cause)
                return self.streams.last_place(last)
        if call is None:
            self.wait(span.queued_ns, span.lane, HAND_OVER)
            return self.host_before()
        self.wait(min(call[2], span.start_ns), span.lane, HAND_OVER)
        return call[0]
