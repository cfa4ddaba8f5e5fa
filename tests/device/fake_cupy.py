"""As much of CuPy as CudaDevice uses, on NumPy: for what can be tested without a GPU.

It does each call at once and in order, so it cannot show a race; it shows that the right calls
are made with arguments that CuPy takes, and what becomes of their errors.
"""

from __future__ import annotations

import ctypes
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

NOT_READY = 600
MEMORY = 1 << 30


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class CUDADriverError(RuntimeError):
    pass


class CompileException(Exception):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Array:
    """A device array: NumPy behind it, and `data.ptr` as CuPy has it."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.data = SimpleNamespace(ptr=values.__array_interface__["data"][0])

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    size = property(lambda self: self.values.size)

    def __getitem__(self, rows: Any) -> Array:
        return Array(self.values[rows])

    def reshape(self, *shape: Any) -> Array:
        return Array(self.values.reshape(*shape))

    def fill(self, value: float) -> None:
        self.values.fill(value)


class Runtime(SimpleNamespace):
    """The runtime's calls, noted in `calls`. Events are done unless `busy`."""

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3
    hostAllocMapped, hostAllocPortable = 2, 1
    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        super().__init__(calls=[], busy=False, status=0, times={}, devices=1, free=MEMORY, current=0)

    def getDevice(self) -> int:
        return self.current

    def getDeviceCount(self) -> int:
        return self.devices

    def driverGetVersion(self) -> int:
        return 13000

    def runtimeGetVersion(self) -> int:
        return 13020

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        return {"name": b"Fake GPU", "totalGlobalMem": MEMORY}

    def memGetInfo(self) -> tuple[int, int]:
        return self.free, MEMORY

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self.calls.append(("memcpyAsync", kind, stream))
        ctypes.memmove(dst, src, size)

    def eventQuery(self, event: int) -> int:
        return NOT_READY if self.busy else self.status

    def eventRecord(self, event: int, stream: int) -> None:
        self.times[event] = time.perf_counter_ns()

    def streamWaitEvent(self, stream: int, event: int) -> None:
        self.calls.append(("streamWaitEvent", stream, event))

    def streamSynchronize(self, stream: int) -> None:
        self.calls.append(("streamSynchronize", stream))

    def deviceSynchronize(self) -> None:
        self.calls.append(("deviceSynchronize",))


def make() -> Any:
    """A fresh ``cupy`` module."""
    runtime, counter = Runtime(), iter(range(1, 10**9))

    class Scope:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            return None

    class Stream(Scope):
        def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
            self.ptr = next(counter) if ptr is None else ptr

        def synchronize(self) -> None:
            runtime.streamSynchronize(self.ptr)

    class Event:
        def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
            self.ptr = next(counter)

        def record(self, stream: Stream) -> None:
            runtime.eventRecord(self.ptr, stream.ptr)

        def synchronize(self) -> None:
            return None

    class Device(Scope):
        def __init__(self, number: int) -> None:
            self.id = number

        def use(self) -> None:
            runtime.current = self.id

    class PinnedMemory:
        def __init__(self, size: int, flags: int = 0) -> None:
            self.bytes = np.zeros(size, np.uint8)

    def elapsed(start: Event, end: Event) -> float:
        return float(np.float32((runtime.times[end.ptr] - runtime.times[start.ptr]) / 1e6))

    class RawKernel:
        def __init__(self, code: str, entry: str) -> None:
            self.code, self.entry = code, entry

        def __call__(
            self, grid: Any, block: Any, arguments: Any, *, shared_mem: int = 0, stream: Any = None
        ) -> None:
            if "error" in self.code:
                raise CompileException("line 1: error")
            runtime.calls.append((self.entry, grid, block, len(arguments), shared_mem))

    cuda = SimpleNamespace(
        runtime=runtime,
        driver=SimpleNamespace(CUDADriverError=CUDADriverError),
        compiler=SimpleNamespace(CompileException=CompileException),
        memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
        Stream=Stream,
        Event=Event,
        Device=Device,
        PinnedMemory=PinnedMemory,
        PinnedMemoryPointer=lambda memory, offset: memory.bytes,
        alloc_pinned_memory=lambda size: np.zeros(-(-size // 512) * 512, np.uint8),
        get_elapsed_time=elapsed,
        UnownedMemory=lambda ptr, size, owner, device: SimpleNamespace(ptr=ptr, owner=owner, device=device),
        MemoryPointer=lambda memory, offset: memory,
    )
    Stream.null = Stream(ptr=0)  # type: ignore[attr-defined]

    def on_device(function: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            bare = {k: v.values if isinstance(v, Array) else v for k, v in named.items()}
            return function(*(v.values if isinstance(v, Array) else v for v in given), **bare)

        return call

    cupy = ModuleType("cupy")
    cupy.__dict__.update(
        __version__="14.2.0",
        cuda=cuda,
        RawKernel=RawKernel,
        zeros=lambda shape, dtype: Array(np.zeros(shape, dtype)),
        asarray=lambda values: Array(np.array(values)),
        ndarray=lambda shape, dtype, memptr: Array(memptr.owner.view(dtype).reshape(shape)),
        get_default_memory_pool=lambda: SimpleNamespace(free_bytes=lambda: 0),
        multiply=on_device(np.multiply),
    )
    return cupy
