"""This machine's CPU plays the device, in real time.

A stream is a thread with a queue, a copy is a memcpy, a kernel is its NumPy reference. The
rules are a GPU's: one copy at a time in each direction, one kernel at a time, pageable copies
hold the host, pinned ones return at once, and streams run beside each other and beside the
host. What differs is the speed, and that device and host share the cores.

NumPy's matrix products may use all cores by themselves (BLAS threads). Then a "device" op
takes the cores from under the host's stages and no two runs look alike, so a CpuDevice holds
BLAS to one thread while it is open. `threadpoolctl` can do that in a running process; where
it is not installed, set ``OPENBLAS_NUM_THREADS=1`` (``MKL_NUM_THREADS=1``) before Python
starts. ``meta()["blas_threads"]`` says which it was.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterolab.device import checks
from heterolab.device.base import Array, Buffer, Device, Event, Kernel, Limits, Memory, Stream
from heterolab.device.failures import Failure, tell, untold
from heterolab.device.host import LONGEST_SLEEP_S, Completion, RealHost, machine_memory, usable_cores
from heterolab.device.order import Clock, Order
from heterolab.errors import InputError
from heterolab.trace.trace import API, D2H, DEFAULT_STREAM, H2D, KERNEL, NO_STREAM, NONE, SYNC, Span

#: The share of this machine's memory that device buffers, and that host buffers, may take.
MEMORY_SHARE = 1 / 4

_LANES = {H2D: "h2d", D2H: "d2h", KERNEL: "gpu"}


@dataclass
class Engine:
    """What runs one thing at a time: a copy direction, or the compute units."""

    lane: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: tuple[int, int] = (-1, NONE)  # when its last op ended, and which


@dataclass
class Task:
    """One op on its way through a stream's queue."""

    op: int
    kind: str
    name: str
    queued_ns: int
    nbytes: int
    batch: int
    work: Callable[[], None]


class CpuEvent(Completion, Event):
    """A mark in a CPU device's stream; it calls the host when it is reached."""

    def __init__(self, device: CpuDevice, op: int, past: Clock | None) -> None:
        super().__init__(device.host)
        self.device, self.op = device, op
        self._order, self._past = device.order, past
        #: The stream's failures that nobody was told of when the mark was reached.
        self.failures: list[Failure] = []
        self._passed = threading.Event()
        #: When the last op before the mark ended, and which: why a stream that waits goes on.
        self.last: tuple[int, int] = (-1, NONE)

    @property
    def done(self) -> bool:
        if self._done and self._order is not None and self._past is not None:
            self._order.host_saw(self._past)
            self._past = None
        return self._done

    def result(self) -> None:
        super().result()
        tell(self.failures, self.op)

    def reach(self, last: tuple[int, int], failures: list[Failure]) -> None:
        """The stream has come to the mark."""
        self.last, self.failures = last, failures
        self._passed.set()
        self.finish()

    def block(self) -> None:
        """Hold the calling thread until the mark is reached (in slices, so that Ctrl-C works)."""
        while not self._passed.wait(LONGEST_SLEEP_S):
            pass

    def __repr__(self) -> str:
        return f"<event {self.op}, {'done' if self._done else 'not done'}>"


class CpuStream(Stream):
    """A thread that takes ops off a queue, one after the other."""

    device: CpuDevice

    def __init__(self, device: CpuDevice, index: int, non_blocking: bool) -> None:
        self.device, self.index, self.non_blocking = device, index, non_blocking
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failures: list[Failure] = []
        self._last = (-1, NONE)
        self._issued = self._finished = 0

    # -- what the host calls -----------------------------------------------------------

    def copy(self, dst: Buffer, src: Buffer, *, batch: int = NONE) -> int:
        kind = checks.copy_kind(self.device, dst, src)
        self.device.check("copy", self, [src], [dst])
        target, source = _bytes_of(dst), _bytes_of(src)
        held = Memory.PAGEABLE in (dst.memory, src.memory)
        op = self._issue(kind, "copy", dst.nbytes, batch, lambda: np.copyto(target, source), held)
        if held and self.device.order:
            self.device.order.host_synchronized([self.index])
        return op

    def launch(
        self,
        kernel: Kernel,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        *,
        batch: int = NONE,
    ) -> int:
        checks.operands(self.device, kernel, reads, writes)
        self.device.check(kernel.name, self, reads, writes)
        inputs, outputs = [b.array for b in reads], [b.array for b in writes]
        nbytes = sum(b.nbytes for b in (*reads, *writes))
        return self._issue(
            KERNEL, kernel.name, nbytes, batch, lambda: kernel.run(np, inputs, outputs), held=False
        )

    def prefetch(self, buffer: Buffer, to: str = "device", *, batch: int = NONE) -> int:
        kind = checks.prefetch(self.device, buffer, to)  # its pages are the host's, and stay
        return self._issue(kind, "prefetch", 0, batch, lambda: None, held=False)

    def record(self) -> CpuEvent:
        with self.device.api("record", self) as (op, _):
            order = self.device.order
            event = CpuEvent(self.device, op, order.record(self.index) if order else None)
            self.device.legacy_barrier(self)
            self._mark(event)
        return event

    def wait(self, event: Event) -> None:
        checks.event(self.device, event)
        assert isinstance(event, CpuEvent)
        with self.device.api("wait", self):
            if self.device.order and event._past is not None:
                self.device.order.wait(self.index, event._past)
            self.follow(event)

    def synchronize(self) -> None:
        self.device.hold([self])

    # -- the queue ---------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self._issued == self._finished

    def mark(self) -> CpuEvent:
        """An event behind all that was enqueued, of no concern to traces and order checks."""
        event = CpuEvent(self.device, NONE, None)
        self._mark(event)
        return event

    def follow(self, event: CpuEvent) -> None:
        """Go on only after `event`."""

        def go_on_after() -> None:
            event.block()
            self._last = max(self._last, event.last)

        self._enqueue(go_on_after)

    def _mark(self, event: CpuEvent) -> None:
        def reach() -> None:
            self._failures = untold(self._failures)
            event.reach(self._last, self._failures)

        self._enqueue(reach)

    def _issue(
        self, kind: str, name: str, nbytes: int, batch: int, work: Callable[[], None], held: bool
    ) -> int:
        call = name if name in ("copy", "prefetch") else "launch"
        with self.device.api(call, self, batch) as (op, queued_ns):
            self.device.legacy_barrier(self)
            task = Task(op, kind, name, queued_ns, nbytes, batch, work)
            self._enqueue(lambda: self._execute(task))
            if held:
                self.mark().block()
        return op

    def _enqueue(self, item: Callable[[], None]) -> None:
        self.device.check_open()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name=f"heterolab-stream-{self.index}", daemon=True
            )
            self._thread.start()
        self._issued += 1
        self._queue.put(item)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            item()
            self._finished += 1

    def _execute(self, task: Task) -> None:
        host, engine = self.device.host, self.device.engines[task.kind]
        with engine.lock:
            before = max(engine.last, self._last)
            start = host.now()
            try:
                task.work()
            except BaseException as error:
                error.add_note(f"In the kernel {task.name!r} on stream {self.index} of {self.device.name}.")
                self._failures = [*untold(self._failures), Failure(error)]
            end = host.now()
            engine.last = self._last = (end, task.op)
        after = before[1] if before[0] > task.queued_ns else NONE
        host.recorder.add(
            Span(
                task.op,
                task.kind,
                task.name,
                engine.lane,
                self.index,
                self.device.index,
                task.queued_ns,
                start,
                end,
                task.nbytes,
                task.batch,
                after,
            )
        )

    def end(self) -> None:
        """Finish what is enqueued, then end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def __repr__(self) -> str:
        return f"<stream {self.index} of {self.device.name}>"


class CpuDevice(Device):
    """See the module. Open it by name: ``open_device("cpu")``; close it when done."""

    host: RealHost
    source = "cpu-clock"
    default_stream: CpuStream

    def __init__(self, why: str, races: Literal["raise", "show", "off"], host: RealHost) -> None:
        self.host, self._why = host, why
        self.index = host.next_device_index()
        self.name = f"CPU ({usable_cores()} cores)"
        self.order = None if races == "off" else Order(races)
        share = int(machine_memory() * MEMORY_SHARE)
        self.limits = Limits(memory_bytes=share, pinned_bytes=share)
        self.engines = {kind: Engine(lane) for kind, lane in _LANES.items()}
        self._taken = {True: 0, False: 0}  # bytes, by Memory.on_host
        self._taking = threading.Lock()
        self._streams: list[CpuStream] = []
        self._closed = False
        self._blas = _one_blas_thread()
        self.default_stream = CpuStream(self, DEFAULT_STREAM, non_blocking=False)

    @classmethod
    def open(
        cls, why: str = "", races: Literal["raise", "show", "off"] = "off", host: RealHost | None = None
    ) -> CpuDevice:
        """This machine's CPU as a device.

        Parameters
        ----------
        why
            Why this device was chosen; its repr says it.
        races
            ``"raise"`` or ``"show"`` checks the order of all accesses; ``"off"`` does not.
        host
            The host to run under, to put several devices on one clock; by default its own.
        """
        return cls(why, races, host or RealHost())

    # -- streams -----------------------------------------------------------------------

    def stream(self, non_blocking: bool = True) -> CpuStream:
        self.check_open()
        if len(self._streams) >= self.limits.streams:
            raise InputError(f"{self.name} runs at most {self.limits.streams} streams; reuse those you have.")
        stream = CpuStream(self, len(self._streams), non_blocking)
        self._streams.append(stream)
        if self.order:
            self.order.add_stream(stream.index, blocking=not non_blocking)
        return stream

    def synchronize(self) -> None:
        self.hold([self.default_stream, *self._streams])

    def hold(self, streams: Sequence[CpuStream]) -> None:
        """Hold the host until `streams` are idle, then raise the first failure not yet told."""
        self.check_open()
        op, start = self.host.recorder.next_op(), self.host.now()
        marks = [stream.mark() for stream in streams]
        try:
            for mark in marks:
                mark.block()
        finally:
            end, index = self.host.now(), streams[0].index if len(streams) == 1 else NO_STREAM
            self.host.recorder.add(
                Span(op, SYNC, "synchronize", "host", index, self.index, start, start, end)
            )
        if self.order:
            self.order.host_synchronized([stream.index for stream in streams])
        tell((failure for mark in marks for failure in mark.failures), op)

    def legacy_barrier(self, stream: CpuStream) -> None:
        """The legacy default stream waits for all blocking streams, and they for it."""
        if stream is self.default_stream:
            others = [s for s in self._streams if not s.non_blocking]
        else:
            others = [] if stream.non_blocking else [self.default_stream]
        for other in others:
            if not other.idle:
                stream.follow(other.mark())

    @contextlib.contextmanager
    def api(self, call: str, stream: Stream, batch: int = NONE) -> Iterator[tuple[int, int]]:
        """The host inside a device call: gives (op number, now), and records the span."""
        self.check_open()
        op, start = self.host.recorder.next_op(), self.host.now()
        try:
            yield op, start
        finally:
            end = self.host.now()
            self.host.recorder.add(
                Span(op, API, call, "host", stream.index, self.index, start, start, end, 0, batch)
            )

    def collect(self) -> None:
        """Nothing to do: an op's span is recorded before its event is done."""

    # -- memory ------------------------------------------------------------------------

    def buffer(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike = "float32",
        memory: Memory | str = Memory.DEVICE,
        name: str = "",
    ) -> Buffer:
        self.check_open()
        memory = Memory.of(memory)
        sizes, kind, nbytes = checks.allocation(shape, dtype)
        self._take(nbytes, memory, name)
        array = np.zeros(sizes, kind)
        if memory is not Memory.PAGEABLE:
            array.fill(0)  # brings its pages in now, as pinning or allocating on a GPU does
        buffer = Buffer(self, array, memory, name)
        gone = weakref.finalize(array, self._give_back, nbytes, memory.on_host, buffer.storage)
        gone.atexit = False
        return buffer

    def _take(self, nbytes: int, memory: Memory, name: str) -> None:
        total = self.limits.pinned_bytes if memory.on_host else self.limits.memory_bytes
        with self._taking:
            free = total - self._taken[memory.on_host]
            what = f"buffer {name!r}" if name else "a buffer"
            checks.must_fit(self.name, f"{what} in {memory.value} memory", nbytes, free, total)
            self._taken[memory.on_host] += nbytes

    def _give_back(self, nbytes: int, on_host: bool, storage: int) -> None:
        self._taken[on_host] -= nbytes
        if self.order:
            self.order.forget(storage)

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Array]:
        return dict(arrays)  # the device's memory is the host's

    def host_access(self, buffer: Buffer, writes: bool) -> None:
        self.check_open()
        if self.order:
            if writes:
                self.order.host_op("a write", writes=[buffer])
            else:
                self.order.host_op("a read", reads=[buffer])

    def check(self, what: str, stream: Stream, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Refuse a closed device, and an access that nothing orders."""
        self.check_open()
        if self.order:
            self.order.device_op(stream.index, what, reads, writes)

    # -- the end -----------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.name} is closed. Open it again: open_device('cpu').")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in (self.default_stream, *self._streams):
            stream.end()
        if self._blas is not None:
            self._blas.restore_original_limits()

    def meta(self) -> dict[str, Any]:
        return self.host.meta() | {"blas_threads": blas_threads(limited=self._blas is not None)}

    def __repr__(self) -> str:
        return f"<{self.name}: real work, in wall time{'; ' + self._why if self._why else ''}>"


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    array: NDArray[Any] = buffer.array
    return array.reshape(-1).view(np.uint8)


def _one_blas_thread() -> Any:
    """Hold BLAS to one thread, where threadpoolctl is installed; else None."""
    try:
        return importlib.import_module("threadpoolctl").threadpool_limits(1, user_api="blas")
    except ImportError:
        return None


def blas_threads(limited: bool) -> str:
    """In words, for a trace: how many threads a matrix product may use."""
    if limited:
        return "1"
    told = {os.environ.get(v) for v in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")}
    return "1 (environment)" if "1" in told else "not limited"
