"""Exact device spans from CUPTI: when each kernel and copy really started and ended on the GPU.

CUPTI numbers every call that puts work on a GPU, and the kernel or copy that comes of it carries
the same number (its *correlation id*). The record of the call says when, and on which thread, the
host made it. An op's calls are those made between the moment the host entered the op and the
moment it left. So:  activity --correlation id--> call --time and thread--> op.

An op that is many launches (an eager forward pass) gets one span a kernel, all with the op's
number and name, so that a lane is busy where the GPU is, and nowhere else. A later kernel of an
op is *queued* when its own launch was called, not when the op began. Nothing is merged.

It has the five methods of :class:`~heterolab.device.cuda_events.EventSpans`, and takes its place
wherever libcupti works.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterolab.device.cuda_events import LANES, MOST_PENDING, OpsInFlight, Pending
from heterolab.device.cupti_records import COPY_KINDS, CuptiUnavailable, Records
from heterolab.device.cupti_session import EXTRA, JUMP_NS, CuptiClock, Session
from heterolab.device.host import RealHost
from heterolab.errors import InputError
from heterolab.trace.trace import D2H, H2D, KERNEL, Span

#: Finished buffers are asked for this often while a run goes on.
FLUSH_NS = 150_000_000
#: An op that ended so long ago has got all records it will get, even if the GPU is never idle.
SETTLE_NS = 5_000_000_000
#: How far apart the two clocks' readings of one moment may lie.
CLOCKS_NS = 1_000
#: Raw records kept of each kind, for whoever asks for them; older ones go first.
MOST_KEPT = 200_000

CALLS = ("driver", "runtime")
ACTIVITIES = ("kernel", "memcpy", "memset", "graph")
#: Threads are told apart by the low half of their pthread id, as CUPTI does.
THREAD_BITS = 0xFFFF_FFFF


class Activity(NamedTuple):
    """Something the GPU did."""

    kind: str
    start_ns: int
    end_ns: int
    nbytes: int  # -1: the op's own
    correlation: int
    runtime_correlation: int  # a copy has one of each; else the same


class CuptiSpans(OpsInFlight):
    """See the module.

    Attributes
    ----------
    joined, unjoined
        Activities that belong to an op, and others (what ran outside of ops, such as an upload).
    slips, worst_slip_ns
        Activities that seemed to start before the host had issued them, and the most by which:
        how far the two clocks disagree. Such a span is moved to where it can have been.

    Raises
    ------
    CuptiUnavailable
        CUPTI refuses, or gives no record of an operation made to try it.
    """

    source = "cupti"

    def __init__(self, cupy: Any, host: RealHost, device_index: int, session: Session) -> None:
        super().__init__(cupy, timed=False)
        self._host, self._device_index, self._session = host, device_index, session
        self.words = session.words
        self.joined = self.unjoined = self.slips = self.worst_slip_ns = 0
        self._lock = threading.RLock()
        self._open: deque[Pending] = deque()  # ops whose records may still come, oldest first
        self._calls: list[tuple[NDArray[Any], ...]] = []  # (host's start, thread, correlation)
        self._launched: dict[int, tuple[Pending, int]] = {}  # correlation → (op, call's start)
        self._activities: list[Activity] = []
        self._kept: dict[str, deque[NDArray[Any]]] = {}
        self._flushed_ns = host.now()
        self._lost, self._untimed, self._problems = 0, 0, list[str]()
        self._closed = False
        session.join(self)
        try:
            self._clock = CuptiClock(session.library, host)
            self._try_out()
        except BaseException:
            session.leave(self)
            raise

    # -- the five methods ----------------------------------------------------------------

    def begin(self, stream_ptr: int) -> Any:
        """Nothing to mark: CUPTI sees the op itself."""
        return None

    def end(self, stream_ptr: int, op: Pending) -> None:
        """The op was just enqueued; its arrays live until the event behind it is reached."""
        op.issued_ns, op.thread = self._host.now(), threading.get_ident() & THREAD_BITS
        op.ended = self._mark(stream_ptr)
        self._open.append(op)
        self._pending.append(op)
        if len(self._pending) > MOST_PENDING:
            self._let_go()

    def collect(self) -> None:
        """Move the spans of what the GPU has done into the host's recorder.

        All of them, once everything enqueued has ended; while work is under way, what CUPTI has
        finished with, asked for at most every 150 ms.
        """
        with self._lock:
            self._let_go()
            if not self._open or self._closed or self._session.ended:
                return
            idle = not self._pending
            if not idle and self._host.now() - self._flushed_ns < FLUSH_NS:
                return
            self._fetch(forced=idle)
            self._join()
            self._settle(idle)
            self._tell()

    def close(self) -> None:
        """Trace no more. Spans not collected are given up."""
        if not self._closed:
            self._closed = True
            self._session.leave(self)
        for held in (self._pending, self._open, self._free, self._calls, self._launched, self._activities):
            held.clear()

    # -- for lessons that look closer ------------------------------------------------------

    def also(self, *kinds: str) -> None:
        """Trace more kinds of record, for :meth:`records`: ``"synchronization"`` (the host or a
        stream waits), ``"unified_memory"`` (page faults and migrations of managed memory),
        ``"driver"`` and ``"runtime"`` (every call, not only launches), ``"graph"`` (a launched
        graph as one span in place of one a kernel). Each costs time; they stay on until the last
        device is closed."""
        for kind in kinds:
            if kind not in EXTRA:
                raise InputError(f"also({kind!r}): there is no such kind. Choose from: {', '.join(EXTRA)}.")
            self._session.enable(kind)

    def records(self) -> Records:
        """CUPTI's own records by kind, as structured arrays: the latest 200,000 of each.

        Fields have CUPTI's names (``cupti_records`` says what their numbers mean). Times are
        CUPTI's: :meth:`host_ns` gives the host's. :meth:`kernel_names` reads kernels' names.
        Wait for the device first: what is under way has no finished record yet.
        """
        with self._lock:
            self.collect()
            if not (self._closed or self._session.ended or self._pending):
                self._fetch(forced=True)
                self._join()
                self._settle(idle=True)
                self._tell()
            return {kind: np.concatenate(list(arrays)) for kind, arrays in self._kept.items()}

    def host_ns(self, stamps: NDArray[np.uint64]) -> NDArray[np.int64]:
        """CUPTI's times as this run's host times, ns."""
        return self._clock.host_ns(stamps)

    def kernel_names(self, kernels: NDArray[Any]) -> list[str]:
        """The (mangled) names of the kernels in ``records()["kernel"]``."""
        names = {
            address: (ctypes.string_at(address).decode(errors="replace") if address else "")
            for address in np.unique(kernels["name"]).tolist()
        }
        return [names[address] for address in kernels["name"].tolist()]

    # -- CUPTI's side ----------------------------------------------------------------------

    def deliver(self, records: Records, lost: int, problems: list[str]) -> None:
        """From the session: records since the last time."""
        self._lost += lost
        self._problems += problems
        for kind, rows in records.items():
            kept = self._kept.setdefault(kind, deque())
            kept.append(rows)
            while len(kept) > 1 and sum(map(len, kept)) - len(kept[0]) >= MOST_KEPT:
                kept.popleft()
            if kind in CALLS:
                self._calls.append((self.host_ns(rows["start"]), rows["threadId"], rows["correlationId"]))
            elif kind in ACTIVITIES:
                self._activities += self._read(kind, rows)

    def _read(self, kind: str, rows: NDArray[Any]) -> list[Activity]:
        timed = (rows["start"] > 0) & (rows["end"] >= rows["start"])
        self._untimed += len(rows) - int(timed.sum())
        rows = rows[timed]
        kinds, nbytes = [KERNEL] * len(rows), [-1] * len(rows)
        correlations = runtime = rows["correlationId"].tolist()
        if kind == "memcpy":
            lanes = {"h2d": H2D, "d2h": D2H}
            kinds = [lanes.get(COPY_KINDS.get(code, ""), KERNEL) for code in rows["copyKind"].tolist()]
            nbytes, runtime = rows["bytes"].tolist(), rows["runtimeCorrelationId"].tolist()
        starts, ends = self.host_ns(rows["start"]).tolist(), self.host_ns(rows["end"]).tolist()
        fields = (kinds, starts, ends, nbytes, correlations, runtime)
        return [Activity(*row) for row in zip(*fields, strict=True)]

    def _fetch(self, forced: bool) -> None:
        """Have CUPTI hand over what it has, and read it."""
        moved = self._clock.read()
        if abs(moved) > JUMP_NS:
            self._problems.append(f"the time of day, by which CUPTI counts, was set by {moved / 1e6:.1f} ms")
        self._session.flush(forced)
        self._session.take()
        self._flushed_ns = self._host.now()

    def _try_out(self) -> None:
        """Have the GPU do something small, and see that CUPTI tells of it. The first record also
        costs milliseconds, which no run should pay for."""
        self._try_one()
        if self._activities and not self._calls:  # nothing could be joined to its op
            self._session.trace_all_calls()
            self._try_one()
        if not (self._activities and self._calls):
            reasons = "; ".join(self._problems) or "profiling may be held or blocked by something else here"
            raise CuptiUnavailable(
                f"{self.words} started, but gave no record of an operation made to try it ({reasons})."
            )
        self._calls.clear()
        self._activities.clear()
        self._kept.clear()

    def _try_one(self) -> None:
        self._cupy.zeros(1, "uint8")
        self._cupy.cuda.Stream.null.synchronize()
        self._fetch(forced=True)

    # -- activity → call → op ----------------------------------------------------------------

    def _let_go(self) -> None:
        """Ops that have ended no longer need their arrays."""
        for op in self._take_ended():
            self._free.append(op.ended)
            op.ended = op.keep = None

    def _join(self) -> None:
        """Make spans of the activities whose op is known."""
        self._find_calls()
        found: list[tuple[Activity, Pending, int]] = []
        rest: list[Activity] = []
        for activity in self._activities:
            launch = self._launched.get(activity.correlation) or self._launched.get(
                activity.runtime_correlation
            )
            if launch is None:
                rest.append(activity)
            else:
                found.append((activity, *launch))
        self._activities = rest
        found.sort(key=lambda row: (row[0].start_ns, row[0].end_ns))
        for activity, op, called_ns in found:
            self._add(activity, op, called_ns)

    def _find_calls(self) -> None:
        """Give each call the op in which it was made; a call in none is dropped."""
        ops_of: dict[int, list[Pending]] = {}
        for op in self._open:
            ops_of.setdefault(op.thread, []).append(op)
        for starts, threads, correlations in self._calls:
            for thread, ops in ops_of.items():
                mine = np.flatnonzero(threads == thread)
                queued = np.array([op.queued_ns for op in ops])
                issued = np.array([op.issued_ns for op in ops])
                own = starts[mine]
                # The last op that had begun by then, if it had not been left yet. From entering an
                # op to its first call, and from an op's last call to the next op, the host takes
                # longer than the clocks disagree.
                place = np.searchsorted(queued, own + CLOCKS_NS, "right") - 1
                inside = (place >= 0) & (own <= issued[place] + CLOCKS_NS)
                for row, index in zip(mine[inside].tolist(), place[inside].tolist(), strict=True):
                    self._launched[int(correlations[row])] = ops[index], int(starts[row])
        self._calls.clear()

    def _add(self, activity: Activity, op: Pending, called_ns: int) -> None:
        queued = op.queued_ns if op.rows == 0 else max(called_ns, op.queued_ns)
        start, end = activity.start_ns, activity.end_ns
        if start < queued:
            self.slips += 1
            self.worst_slip_ns = max(self.worst_slip_ns, queued - start)
            start, end = queued, max(end, queued)
        nbytes = activity.nbytes if activity.nbytes >= 0 else op.nbytes if op.rows == 0 else 0
        self._host.recorder.add(
            Span(
                op.op,
                activity.kind,
                op.name,
                LANES[activity.kind],
                op.stream,
                self._device_index,
                queued,
                start,
                end,
                nbytes,
                op.batch,
            )
        )
        op.rows += 1
        self.joined += 1

    def _settle(self, idle: bool) -> None:
        """Close the books on ops that have got all their records, and see who got none."""
        old = self._host.now() - SETTLE_NS
        settled: list[Pending] = []
        while self._open and (idle or (self._open[0].ended is None and self._open[0].issued_ns < old)):
            settled.append(self._open.popleft())
        if idle:  # what is left belongs to no op
            self.unjoined += len(self._activities)
            self._activities.clear()
            self._launched.clear()
        elif settled:
            gone = {id(op) for op in settled}
            self._launched = {c: row for c, row in self._launched.items() if id(row[0]) not in gone}
        work = [op for op in settled if op.nbytes or op.kind == KERNEL]
        if without := [op for op in work if op.rows == 0]:
            names = ", ".join(dict.fromkeys(op.name for op in without[:8]))
            self._problems.append(
                f"none of {len(work)} device ops has a record of the GPU"
                if len(without) == len(work)
                else f"{len(without)} of {len(work)} device ops have no record of the GPU ({names})"
            )

    def _tell(self) -> None:
        """Say loudly, and on the run's stamp, what the spans lack."""
        if self._lost:
            self._problems.append(f"CUPTI lost {self._lost} records for lack of buffers")
        if self._untimed:
            self._problems.append(f"CUPTI could not time {self._untimed} operations of the GPU")
        self._lost = self._untimed = 0
        problems, self._problems = self._problems, []
        for problem in problems:
            self._host.recorder.notes.append(problem)
            warnings.warn(
                f"Device spans are incomplete: {problem}. Is another profiler in this process? "
                "open_device('cuda', spans='events') does without CUPTI.",
                stacklevel=3,
            )
