"""A device's calls as bare as they can be had, with the host's clock beside each.

A pipeline's calls go through :class:`~heterolab.device.base.Stream`, which numbers ops, checks
them and follows them to their end. A machine's profile holds what *CUDA's own* calls cost, and what
the GPU does when nothing else is enqueued between two ops. So on a GPU these measurements call
CuPy themselves. On any other device (the simulator, which has no other calls) they go through the
seam. Both look the same to a measurement.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from heterolab.device.base import Buffer, Device, Kernel
from heterolab.trace.trace import API, D2H, H2D, KERNEL, SYNC

#: A host that computes touches memory: this much, spread over the work.
WORK_BYTES = 1 << 20


class Call(NamedTuple):
    """One call of the host to the device: its name, and when the host entered and left it."""

    name: str
    entered_ns: int
    left_ns: int

    @property
    def ns(self) -> int:
        return self.left_ns - self.entered_ns


class Lane(Protocol):
    """What is measured of a stream; see :class:`~heterolab.device.base.Stream`."""

    def copy(self, dst: Buffer, src: Buffer) -> Any: ...

    def launch(self, kernel: Kernel, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> Any: ...

    def record(self) -> Any: ...

    def wait(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def prefetch(self, buffer: Buffer, to: str) -> Any: ...


class Bench(ABC):
    """Streams to measure with, and the host's times of the calls made on them."""

    device: Device
    default: Lane

    @abstractmethod
    def stream(self, non_blocking: bool = True) -> Lane:
        """A new stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Hold the host until the device is idle."""

    @abstractmethod
    def calls(self) -> list[Call]:
        """The calls since the last time this was asked, oldest first."""

    @abstractmethod
    def work(self, ns: int) -> None:
        """The host computes something of its own for `ns`."""

    @abstractmethod
    def rest(self) -> Bench:
        """The program pauses, as between two runs; gives what to go on with."""

    def forget(self) -> None:  # noqa: B027 - a bench that keeps nothing has nothing to forget
        """Let go of buffers that calls were prepared for."""

    def now(self) -> int:
        return self.device.host.now()

    @contextmanager
    def logged(self) -> Iterator[list[Call]]:
        """The calls made inside, in the list once it is left."""
        self.calls()
        kept: list[Call] = []
        yield kept
        kept += self.calls()

    def buffer(self, shape: Any, dtype: str = "uint8", memory: str = "device") -> Buffer:
        """A buffer whose pages are there: host memory is touched once."""
        made = self.device.buffer(shape, dtype, memory)
        if made.memory.on_host and self.device.values:
            made.write()[...] = 1
        return made


class SeamBench(Bench):
    """Any device, through the seam; for the simulator, whose calls have no other form.

    The device should check no order (``races="off"``) and, if it is simulated, move no values.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.default = device.default_stream
        self._seen = 0

    def stream(self, non_blocking: bool = True) -> Lane:
        return self.device.stream(non_blocking)

    def synchronize(self) -> None:
        self.device.synchronize()

    def calls(self) -> list[Call]:
        spans = self.device.host.recorder.since(self._seen)
        self._seen += len(spans)
        return [Call(s.name, s.start_ns, s.end_ns) for s in spans if s.kind in (API, SYNC)]

    def work(self, ns: int) -> None:
        self.device.host.work(ns)  # type: ignore[attr-defined]  # a virtual clock's

    def rest(self) -> Bench:
        device: Any = self.device
        return SeamBench(type(device).open(device.profile, races="off", values=False))


class CudaBench(Bench):
    """A GPU, by CuPy's own calls. The device records no spans (``spans="off"``)."""

    device: Any

    def __init__(self, device: Any) -> None:
        self.device = device
        self.log: list[Call] = []
        self.lanes: list[CudaLane] = []
        self.default = CudaLane(self, device.default_stream.native)
        self._memory = np.ones(WORK_BYTES // 8)
        self._names = {f"key {i}": i for i in range(4096)}
        self._functions: dict[tuple[str, str], Any] = {}

    def stream(self, non_blocking: bool = True) -> Lane:
        return CudaLane(self, self.device.stream(non_blocking).native)

    def synchronize(self) -> None:
        start = self.now()
        self.device.runtime.deviceSynchronize()
        self.log.append(Call("synchronize", start, self.now()))

    def calls(self) -> list[Call]:
        calls, self.log = self.log, []
        return calls

    def work(self, ns: int) -> None:
        # As a pipeline's host works: Python's own objects, and arrays.
        end = time.perf_counter_ns() + ns
        size = len(self._memory)
        at = 0
        while time.perf_counter_ns() < end:
            self._memory[at : at + 512].sum()
            at = (at + 512) % size
            for i in range(16):
                self._names[f"key {(at + i * 37) % 4096}"] += 1

    def function(self, code: str, entry: str) -> Any:
        """A kernel's CUDA C++, compiled once."""
        if (code, entry) not in self._functions:
            self._functions[code, entry] = self.device.cupy.RawKernel(code, entry)
        return self._functions[code, entry]

    def rest(self) -> Bench:
        time.sleep(5e-3)
        return self

    def forget(self) -> None:
        for lane in self.lanes:
            lane.ready.clear()


class CudaLane:
    """A CUDA stream by CuPy's calls, each timed."""

    def __init__(self, bench: CudaBench, native: Any) -> None:
        self.bench, self.native = bench, native
        device = bench.device
        self._cuda = device.cupy.cuda
        self._memcpy = device.runtime.memcpyAsync
        self._kinds = device.copy_kinds
        self.ready: dict[tuple[Any, ...], Any] = {}
        bench.lanes.append(self)

    def copy(self, dst: Buffer, src: Buffer) -> None:
        kind = self._kinds[D2H if dst.memory.on_host else H2D if src.memory.on_host else KERNEL]
        to, of, nbytes, ptr, now = dst.address, src.address, dst.nbytes, self.native.ptr, self.bench.now
        start = now()
        self._memcpy(to, of, nbytes, kind, ptr)
        self.bench.log.append(Call("copy", start, now()))

    def launch(self, kernel: Kernel, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        key = (id(kernel), *map(id, reads), *map(id, writes))
        ready = self.ready.get(key)
        if ready is None:
            # The buffers are kept with it: an id means nothing once its object is gone.
            ready = self.ready[key] = (self._made(kernel, reads, writes), kernel, reads, writes)
        call, now = ready[0], self.bench.now
        start = now()
        call()
        self.bench.log.append(Call("launch", start, now()))

    def _made(self, kernel: Kernel, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Any:
        device = self.bench.device
        inputs, outputs = [device.array(b) for b in reads], [device.array(b) for b in writes]
        native = self.native
        if kernel.cuda is None:

            def run() -> None:
                with native:
                    kernel.run(device.cupy, inputs, outputs)

            return run
        source = kernel.cuda
        function = self.bench.function(source.code, source.entry)
        arguments = source.arguments(inputs, outputs)
        blocks, threads = source.grid(inputs, outputs)
        return lambda: function((blocks,), (threads,), arguments, stream=native)

    def record(self) -> Any:
        event, now = self._cuda.Event(disable_timing=True), self.bench.now
        start = now()
        event.record(self.native)
        self.bench.log.append(Call("record", start, now()))
        return event

    def wait(self, event: Any) -> None:
        native, now = self.native, self.bench.now
        start = now()
        native.wait_event(event)
        self.bench.log.append(Call("wait", start, now()))

    def synchronize(self) -> None:
        native, now = self.native, self.bench.now
        start = now()
        native.synchronize()
        self.bench.log.append(Call("synchronize", start, now()))

    def prefetch(self, buffer: Buffer, to: str) -> None:
        device = self.bench.device
        where = device.native.id if to == "device" else -1  # CUDA's number of the host
        device.runtime.memPrefetchAsync(buffer.address, buffer.nbytes, where, self.native.ptr)
