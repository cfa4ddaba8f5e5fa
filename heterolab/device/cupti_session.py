"""This process's one CUPTI client: what it traces, its buffers, and its clock.

CUPTI asks for an empty buffer when it needs one and hands it back when it is full, from any
thread and in the middle of a launch. So the two callbacks only move pointers. The records are
read later, when somebody asks (`Session.take`): a callback that read them in Python would cost
50 µs a record.

There is one client a process, however many devices are open. Each device's spans are a
subscriber, and get all records; the last one that leaves switches the tracing off.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections import deque
from contextlib import suppress
from ctypes import c_size_t, c_uint8, c_uint32
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from heterolab.device.base import Host
from heterolab.device.cupti_library import COMPLETED, REQUESTED, Library, find, words
from heterolab.device.cupti_records import (
    DRIVER_CALLS,
    FIELDS,
    RUNTIME_CALLS,
    CuptiUnavailable,
    Parser,
    Records,
)

#: A buffer's size: some 16,000 kernels with their calls.
BUFFER_BYTES = 4 << 20
#: Buffers touched beforehand, so that the first launches do not pay for them.
READY = 4
#: Buffers at most (512 MiB): beyond, records are lost, and counted.
MOST_BUFFERS = 128

#: What is traced from the start, and what can be added.
ALWAYS = ("kernel", "memcpy", "memset", "overhead")
EXTRA = ("synchronization", "unified_memory", "graph", "driver", "runtime")
#: The time of day was set, if its offset moves by so much between two readings.
JUMP_NS = 1_000_000
ZEROED_BUFFERS = 5  # CUPTI_ACTIVITY_ATTR_ZEROED_OUT_ACTIVITY_BUFFER
FORCED = 1  # CUPTI_ACTIVITY_FLAG_FLUSH_FORCED


class Subscriber(Protocol):
    def deliver(self, records: Records, lost: int, problems: list[str]) -> None:
        """Records since the last time, how many were lost, and what could not be read."""


class Session:
    """See the module. Get it with :func:`session`."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.words = words(library)
        self.exact_calls = library.has("cuptiActivityEnableDriverApi") and library.has(
            "cuptiActivityEnableRuntimeApi"
        )
        self._parser = Parser(library.version, library.following)
        self.ended = False
        self._told = 0  # the parser's problems that subscribers have been told
        self._subscribers: WeakSet[Any] = WeakSet()
        self._enabled: list[str] = []
        self._lock = threading.RLock()
        self._blocks: dict[int, NDArray[np.uint8]] = {}  # by address; keeps them alive
        self._free: list[int] = []
        self._full: deque[tuple[int, int]] = deque()  # (address, valid bytes)
        # ctypes keeps no reference to a callback: without these two CUPTI would call freed memory.
        self._on_request, self._on_complete = REQUESTED(self._requested), COMPLETED(self._completed)
        atexit.register(self._end)

    # -- who listens ---------------------------------------------------------------------

    def join(self, subscriber: Subscriber) -> None:
        """Trace for one more subscriber.

        Raises
        ------
        CuptiUnavailable
            CUPTI refuses; nothing is left switched on.
        """
        with self._lock:
            if not self._subscribers:
                self._stop()  # what a subscriber that just vanished may have left on
                try:
                    self._start()
                except CuptiUnavailable:
                    self._stop()
                    raise
            self._subscribers.add(subscriber)

    def leave(self, subscriber: Subscriber) -> None:
        """The last one that leaves switches the tracing off."""
        with self._lock:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._stop()

    def _start(self) -> None:
        if len(self._blocks) < READY:
            for _ in range(READY):
                self._free.append(self._new_block(touched=True))
        one, size = c_uint8(1), c_size_t(1)
        with suppress(CuptiUnavailable):  # else CUPTI zeroes each buffer once more, in a launch
            self.library(
                "cuptiActivitySetAttribute", ZEROED_BUFFERS, ctypes.byref(size), ctypes.addressof(one)
            )
        # Again at every start: a profiler that ran in between has put its own in their place.
        self.library("cuptiActivityRegisterCallbacks", self._on_request, self._on_complete)
        for kind in ALWAYS:
            self.enable(kind)
        self._trace_launches(True)

    def enable(self, kind: str) -> None:
        """Trace a kind of record (see ``cupti_records.FIELDS``) until the session's end."""
        with self._lock:
            if kind in self._enabled:
                return
            if kind == "unified_memory":
                self._configure_unified_memory()
            self.library("cuptiActivityEnable", FIELDS[kind][0])
            self._enabled.append(kind)
            if kind == "synchronization" and self.library.has("cuptiActivityEnableAllSyncRecords"):
                # The host asks for its events all the time; "not yet" is not worth a record.
                self.library("cuptiActivityEnableAllSyncRecords", 0)

    def _trace_launches(self, on: bool) -> None:
        """Trace the calls that put work on a GPU, and where CUPTI can, no others."""
        traced = 0
        if self.exact_calls:
            for function, calls in (
                ("cuptiActivityEnableDriverApi", DRIVER_CALLS),
                ("cuptiActivityEnableRuntimeApi", RUNTIME_CALLS),
            ):
                for number in (number for pair in calls.values() for number in pair):
                    with suppress(CuptiUnavailable):  # a call that this version does not have
                        self.library(function, number, int(on))
                        traced += 1
        if on and not traced:
            self.trace_all_calls()

    def trace_all_calls(self) -> None:
        """Trace every call of the driver and the runtime. Dearer; for a CUPTI that can, but does
        not trace the chosen ones: on 13.0 that is so once all calls were traced and stopped again."""
        self.enable("driver")
        self.enable("runtime")

    def _configure_unified_memory(self) -> None:
        """Ask for all counters: (scope: whole process, kind, device, on) each."""
        kinds = (1, 2, 3, 4, 5, 6, 7, 8)
        config = (c_uint32 * (4 * len(kinds)))(*(n for kind in kinds for n in (1, kind, 0, 1)))
        self.library("cuptiActivityConfigureUnifiedMemoryCounter", ctypes.addressof(config), len(kinds))

    def _stop(self) -> None:
        """Switch off what is on, and take the buffers back."""
        if not self._enabled:
            return
        with suppress(CuptiUnavailable):
            self._trace_launches(False)
        for kind in self._enabled:
            with suppress(CuptiUnavailable):
                self.library("cuptiActivityDisable", FIELDS[kind][0])
        self._enabled.clear()
        with suppress(CuptiUnavailable):
            self.library("cuptiActivityFlushAll", FORCED)
        self.take()

    def _end(self) -> None:
        """At the interpreter's end, while callbacks can still run."""
        with self._lock:
            self.ended = True
            self._subscribers.clear()
            self._stop()

    # -- records -------------------------------------------------------------------------

    def flush(self, forced: bool) -> None:
        """Have CUPTI hand over buffers: those whose records are all finished, or all (`forced`;
        right only when nothing is under way, or unfinished records are lost)."""
        self.library("cuptiActivityFlushAll", FORCED if forced else 0)

    def take(self) -> None:
        """Read the buffers handed over by now, and deliver what is in them."""
        with self._lock:
            parts: dict[str, list[NDArray[Any]]] = {}
            while self._full:
                address, valid = self._full.popleft()
                block = self._blocks.get(address)
                if block is None:
                    continue  # another profiler's
                self._parser.parse(block, min(valid, len(block)), parts)
                block.fill(0)
                self._free.append(address)
            lost = 0
            with suppress(CuptiUnavailable):
                lost = self.library.dropped()
            records = {name: np.concatenate(arrays) for name, arrays in parts.items()}
            problems = self._parser.problems[self._told :]
            self._told = len(self._parser.problems)
            if records or lost or problems:
                for subscriber in tuple(self._subscribers):
                    subscriber.deliver(records, lost, problems)

    # -- called by CUPTI, on any thread, in the middle of a launch -------------------------

    def _requested(self, buffer: Any, size: Any, most_records: Any) -> None:
        most_records[0] = 0  # as many as there is room for
        try:
            address = self._free.pop()
        except IndexError:
            if len(self._blocks) >= MOST_BUFFERS:
                buffer[0], size[0] = None, 0  # CUPTI drops records, and counts them
                return
            address = self._new_block(touched=False)
        buffer[0], size[0] = address, BUFFER_BYTES

    def _completed(self, context: Any, stream: int, address: int, size: int, valid: int) -> None:
        self._full.append((address, valid))

    def _new_block(self, touched: bool) -> int:
        block = np.zeros(BUFFER_BYTES, np.uint8)
        if touched:
            block.fill(0)  # else the system gives the pages one by one, as CUPTI writes
        address = int(block.ctypes.data)
        self._blocks[address] = block
        return address


class CuptiClock:
    """CUPTI's times as host times.

    CUPTI counts by the time of day, which can be set; the host by a clock that cannot. Their
    offset is read now and then, each time as the tightest of some tries (CUPTI's reading lies
    between two of the host's), and what lies between two readings is interpolated.
    """

    TRIES = 16
    MOST_READINGS = 4096

    def __init__(self, library: Library, host: Host) -> None:
        self._library, self._host = library, host
        self._readings: list[tuple[int, int]] = []  # (CUPTI's time, host's − CUPTI's)
        self.width_ns = 0  # how far apart the host's two readings were: twice the error at most
        self.read()

    def read(self) -> int:
        """Read the offset; returns by how much it has moved since the last reading, ns."""
        tries = []
        for _ in range(self.TRIES):
            before, stamp, after = self._host.now(), self._library.timestamp(), self._host.now()
            tries.append((after - before, stamp, (before + after) // 2 - stamp))
        self.width_ns, stamp, offset = min(tries)
        moved = 0
        if self._readings:
            last, before = self._readings[-1]
            moved = offset - before
            if stamp <= last:
                self._readings.clear()  # set back: what came before cannot be told apart
            elif abs(moved) > JUMP_NS:
                self._readings.append((stamp - 1, before))  # set, not drifted: a step
        self._readings.append((stamp, offset))
        if len(self._readings) > self.MOST_READINGS:
            del self._readings[1::2]
        return moved

    def host_ns(self, stamps: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The host's times of CUPTI's `stamps`."""
        # Relative to the first reading, since a time of day in ns is more than a float holds.
        first, base = self._readings[0]
        known = np.array(self._readings, np.int64) - (first, base)
        since = stamps.astype(np.int64) - first
        moved = np.interp(since, known[:, 0], known[:, 1]).round().astype(np.int64)
        host: NDArray[np.int64] = since + first + base + moved
        return host


_session: Session | None = None


def session(driver: int) -> Session:
    """The process's one session; made when first asked for.

    Raises
    ------
    CuptiUnavailable
        There is no CUPTI here.
    """
    global _session
    if _session is None:
        _session = Session(find(driver))
    return _session
