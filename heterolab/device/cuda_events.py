"""Device spans from CUDA events: one before and one behind each op, in the op's own stream.

What they can tell: when the stream came to the op, and when the op had ended, to about 1 µs.
What they cannot: an op that its stream has begun may still stand in line for a busy engine.
For copies we know better, since an engine does one copy at a time: a copy is said to start no
earlier than the one before it on its engine ended. Kernels may truly overlap, so theirs stay.

A source of exact spans takes this one's place where CUPTI works (``cupti.py``): it has the same
five methods.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from heterolab.device.host import RealHost
from heterolab.trace.trace import D2H, H2D, KERNEL, Span

#: `cudaErrorNotReady`: what a query says of an event that is not done.
NOT_READY = 600
#: Ops whose events are kept unread at most; then they are read, asked or not.
MOST_PENDING = 4096
#: How old the anchor of the GPU's clock may get. Elapsed times are float32 milliseconds: over
#: two seconds they still resolve 0.12 µs.
ANCHOR_NS = 2_000_000_000

LANES = {H2D: "h2d", D2H: "d2h", KERNEL: "gpu"}


class GpuClock:
    """Event times as host times, by way of an *anchor*: an event whose host time is known.

    A new anchor is timed by the old one, within the bounds that the host saw for it (it came
    after the call that recorded it and before the wait for it ended). So readings stay as fine
    as events are, and the two clocks cannot drift apart.
    """

    def __init__(self, cupy: Any, host: RealHost) -> None:
        self._cupy, self._host = cupy, host
        self._stream = cupy.cuda.Stream(non_blocking=True)
        tries = [self._record() for _ in range(8)]
        event, before, after = min(tries, key=lambda t: t[2] - t[1])
        self._anchor, self._anchor_ns = event, (before + after) // 2

    def ns(self, event: Any) -> int:
        """The host time at which `event` was reached."""
        elapsed_ms: float = self._cupy.cuda.get_elapsed_time(self._anchor, event)
        return self._anchor_ns + round(elapsed_ms * 1e6)

    def renew(self) -> None:
        """Take a new anchor when the old one has aged."""
        if self._host.now() - self._anchor_ns < ANCHOR_NS:
            return
        event, before, after = self._record()
        self._anchor_ns = min(max(self.ns(event), before), after)
        self._anchor = event

    def not_before(self, event: Any, host_ns: int) -> None:
        """`event` was enqueued at `host_ns`: if it seems to have been reached before, the anchor
        is thought too early by that much at least."""
        self._anchor_ns += max(host_ns - self.ns(event), 0)

    def _record(self) -> tuple[Any, int, int]:
        event = self._cupy.cuda.Event()
        before = self._host.now()
        event.record(self._stream)
        event.synchronize()
        return event, before, self._host.now()


@dataclass(slots=True)
class Pending:
    """An op on its way, its two events, and the arrays that must live until it has ended.

    The last three are for exact spans: when the host left the op and on which thread, and how
    many things the GPU is known to have done for it.
    """

    op: int
    kind: str
    name: str
    stream: int
    queued_ns: int
    nbytes: int
    batch: int
    keep: Any
    began: Any
    ended: Any = None
    issued_ns: int = 0
    thread: int = 0
    rows: int = 0


class OpsInFlight:
    """Ops on their way, each with an event behind it: until that is reached, the op's arrays must
    live, whoever else has dropped them."""

    def __init__(self, cupy: Any, timed: bool) -> None:
        self._cupy, self._timed = cupy, timed
        self._query, self._record = cupy.cuda.runtime.eventQuery, cupy.cuda.runtime.eventRecord
        self._free: list[Any] = []  # events to be used again
        self._pending: deque[Pending] = deque()

    def cancel(self, began: Any) -> None:
        """The op could not be enqueued."""
        if began is not None:
            self._free.append(began)

    def _mark(self, stream_ptr: int) -> Any:
        try:
            event = self._free.pop()
        except IndexError:
            event = self._cupy.cuda.Event(disable_timing=not self._timed)
        self._record(event.ptr, stream_ptr)
        return event

    def _take_ended(self) -> list[Pending]:
        ended: list[Pending] = []
        rest: list[Pending] = []
        while self._pending:
            op = self._pending.popleft()
            (ended if self._query(op.ended.ptr) == 0 else rest).append(op)
        self._pending.extendleft(reversed(rest))
        return ended


class EventSpans(OpsInFlight):
    """See the module.

    Parameters
    ----------
    timed
        False records no spans; ops are then followed only to keep their arrays alive.
    """

    source = "cuda-events"
    words = "CUDA events"

    def __init__(self, cupy: Any, host: RealHost, device_index: int, timed: bool) -> None:
        super().__init__(cupy, timed)
        self._host, self._device_index = host, device_index
        self._clock = GpuClock(cupy, host) if timed else None
        self._lane_busy_until = {H2D: 0, D2H: 0}
        self._lock = threading.Lock()

    def begin(self, stream_ptr: int) -> Any:
        """Mark the start of the op that is about to be enqueued."""
        return self._mark(stream_ptr) if self._timed else None

    def end(self, stream_ptr: int, op: Pending) -> None:
        """Mark the end of the op that was just enqueued."""
        op.ended = self._mark(stream_ptr)
        self._pending.append(op)
        if len(self._pending) > MOST_PENDING:
            self.collect()

    def collect(self) -> None:
        """Move the spans of ops that have ended into the host's recorder."""
        with self._lock:
            # Twice: what ended before an op of the first round is done by the second, so that
            # every engine's copies come out in the order in which it did them.
            ended = [*self._take_ended(), *self._take_ended()]
            if self._clock is not None:
                self._add(self._clock, ended)
                self._clock.renew()
            for op in ended:
                self._free += [event for event in (op.began, op.ended) if event is not None]

    def close(self) -> None:
        self._pending.clear()
        self._free.clear()

    def _add(self, clock: GpuClock, ended: list[Pending]) -> None:
        for op in ended:
            clock.not_before(op.began, op.queued_ns)
        timed = sorted(((clock.ns(op.ended), op) for op in ended), key=lambda pair: (pair[0], pair[1].op))
        for ended_ns, op in timed:
            start, end = min(clock.ns(op.began), ended_ns), ended_ns
            if op.kind in self._lane_busy_until:
                start = min(max(start, self._lane_busy_until[op.kind]), end)
                self._lane_busy_until[op.kind] = end
            self._host.recorder.add(
                Span(
                    op.op,
                    op.kind,
                    op.name,
                    LANES[op.kind],
                    op.stream,
                    self._device_index,
                    op.queued_ns,
                    start,
                    end,
                    op.nbytes,
                    op.batch,
                )
            )
