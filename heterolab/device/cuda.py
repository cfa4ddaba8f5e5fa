"""A real NVIDIA GPU, through CuPy.

Copies, launches, events and waits are CUDA's own calls; nothing is held back or reordered.
CuPy is imported only here, and only once a CUDA device is asked for.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterolab.device import checks
from heterolab.device.base import Array, Buffer, Device, Event, Kernel, Limits, Memory, Stream
from heterolab.device.cuda_events import NOT_READY, Pending
from heterolab.device.cuda_kernels import CompiledKernels
from heterolab.device.cuda_managed import managed_array, prefetch
from heterolab.device.cuda_spans import Source, open_spans, source
from heterolab.device.host import RealHost, machine_memory
from heterolab.device.order import Clock, Order
from heterolab.errors import DeviceUnavailable, HeteroLabError, InputError, OutOfDeviceMemory
from heterolab.trace.trace import API, D2H, DEFAULT_STREAM, H2D, KERNEL, NO_STREAM, NONE, SYNC, Span

#: The share of this machine's memory that may be pinned or mapped: the rest must stay pageable.
PINNED_SHARE = 1 / 2
#: The oldest driver that CuPy's packages for CUDA 12 run on, as CUDA numbers versions.
OLDEST_DRIVER = 12_000


# -- is there one? -------------------------------------------------------------------------


def why_not() -> str:
    """Why no CUDA device can be had here, with the remedy; empty when one can."""
    driver = driver_version()
    if driver == 0:
        return "there is no NVIDIA driver on this machine."
    if driver < OLDEST_DRIVER:
        return (
            f"the NVIDIA driver is for CUDA {_version(driver)}; CuPy needs 12.0 or newer. Update the driver."
        )
    extra = "cuda13" if driver >= 13_000 else "cuda12"
    if importlib.util.find_spec("cupy") is None:
        return f"CuPy is not installed. This driver takes: pip install 'heterolab[{extra}]'."
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        built_for = runtime.runtimeGetVersion()
    except ImportError as error:
        reason = str(error).strip().splitlines() or ["no reason given"]
        return f"CuPy is installed but does not import: {reason[0]} Try: pip install 'heterolab[{extra}]'."
    if built_for // 1000 > driver // 1000:
        return (
            f"this CuPy is for CUDA {_version(built_for)}, the NVIDIA driver only for {_version(driver)}. "
            f"Exchange CuPy for: pip install 'heterolab[{extra}]', or update the driver."
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return f"CUDA does not start: {error}."
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        note = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        return f"CUDA sees no device{note}."
    return ""


def driver_version() -> int:
    """The CUDA version of the NVIDIA driver (13.0 is 13000), 0 where there is no driver."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        with contextlib.suppress(OSError, AttributeError):
            version = ctypes.c_int()
            if ctypes.CDLL(name).cuDriverGetVersion(ctypes.byref(version)) == 0:
                return version.value
    return 0


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# -- events and streams --------------------------------------------------------------------


class CudaEvent(Event):
    """A mark in a CUDA stream. It cannot call the host, so it is asked."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, op: int, past: Clock | None) -> None:
        self.op = op
        self.past = past
        self.device = device
        self._done = False
        self._error: Exception | None = None
        # `block`: a thread that synchronises on it sleeps instead of spinning.
        self.native = device.cupy.cuda.Event(block=True, disable_timing=True)

    @property
    def done(self) -> bool:
        if not self._done:
            status = self.device.runtime.eventQuery(self.native.ptr)
            if status == NOT_READY:
                return False
            self._done = True
            if status != 0:
                self._error = self.device.runtime.CUDARuntimeError(status)
            elif self.device.order and self.past is not None:
                self.device.order.host_saw(self.past)
        return True

    def result(self) -> None:
        if not self.done:
            raise InputError(f"{self!r} is not done yet. Wait for it first: host.wait_any([it]).")
        if self._error is not None:
            raise self._error

    def block(self) -> None:
        """Hold the calling thread until the mark is reached, without the interpreter lock."""
        self.native.synchronize()

    def __repr__(self) -> str:
        return f"<event {self.op}, {'done' if self._done else 'not done'}>"


class CudaStream(Stream):
    """A CUDA stream."""

    device: CudaDevice

    def __init__(self, device: CudaDevice, index: int, non_blocking: bool, native: Any) -> None:
        self.device, self.index, self.non_blocking = device, index, non_blocking
        self.native = native
        self.ptr: int = native.ptr

    def copy(self, dst: Buffer, src: Buffer, *, batch: int = NONE) -> int:
        device = self.device
        kind = checks.copy_kind(device, dst, src)
        # From pageable memory this same call stages the bytes first (the host reads them, now),
        # and to pageable memory it returns when they have arrived: CUDA holds the host.
        staged = src.memory is Memory.PAGEABLE
        if staged:
            device.host_access(src, writes=False)
        device.check("copy", self, [] if staged else [src], [dst])
        op, queued = device.begin_call()
        began = device.spans.begin(self.ptr)
        try:
            device.runtime.memcpyAsync(
                dst.address, src.address, dst.nbytes, device.copy_kinds[kind], self.ptr
            )
        except Exception:
            device.spans.cancel(began)
            raise
        keep = (dst.array, src.array)
        device.spans.end(
            self.ptr, Pending(op, kind, "copy", self.index, queued, dst.nbytes, batch, keep, began)
        )
        device.end_call("copy", self, op, queued, batch)
        if device.order and dst.memory is Memory.PAGEABLE:
            device.order.host_synchronized([self.index])
        return op

    def launch(
        self,
        kernel: Kernel,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        *,
        batch: int = NONE,
    ) -> int:
        device = self.device
        checks.operands(device, kernel, reads, writes)
        device.check(kernel.name, self, reads, writes)
        op, queued = device.begin_call()
        inputs, outputs = [device.array(b) for b in reads], [device.array(b) for b in writes]
        began = device.spans.begin(self.ptr)
        try:
            if kernel.cuda is not None:
                device.kernels.launch(kernel, kernel.cuda, inputs, outputs, self.native)
            else:
                # CuPy's current stream is set and set back inside this call: temporaries that
                # the kernel makes then belong to this stream's own pool.
                with self.native:
                    kernel.run(device.cupy, inputs, outputs)
        except Exception as error:
            device.spans.cancel(began)
            raise device.explain(error, kernel, self) from error
        nbytes = sum(b.nbytes for b in (*reads, *writes))
        keep = (inputs, outputs)
        device.spans.end(
            self.ptr, Pending(op, KERNEL, kernel.name, self.index, queued, nbytes, batch, keep, began)
        )
        device.end_call("launch", self, op, queued, batch)
        return op

    def prefetch(self, buffer: Buffer, to: str = "device", *, batch: int = NONE) -> int:
        return prefetch(self, buffer, to, batch)

    def record(self) -> CudaEvent:
        device = self.device
        device.check_open()
        op, queued = device.begin_call()
        event = CudaEvent(device, op, device.order.record(self.index) if device.order else None)
        device.runtime.eventRecord(event.native.ptr, self.ptr)
        device.end_call("record", self, op, queued)
        return event

    def wait(self, event: Event) -> None:
        device = self.device
        device.check_open()
        checks.event(device, event)
        assert isinstance(event, CudaEvent)
        op, queued = device.begin_call()
        if device.order and event.past is not None:
            device.order.wait(self.index, event.past)
        device.runtime.streamWaitEvent(self.ptr, event.native.ptr)
        device.end_call("wait", self, op, queued)

    def synchronize(self) -> None:
        device = self.device
        device.check_open()
        op, queued = device.begin_call()
        try:
            device.runtime.streamSynchronize(self.ptr)
        finally:
            device.end_call("synchronize", self, op, queued, kind=SYNC)
        if device.order:
            device.order.host_synchronized([self.index])

    def __repr__(self) -> str:
        return f"<stream {self.index} of {self.device.name}>"


# -- the device ----------------------------------------------------------------------------


class CudaDevice(Device):
    """See the module. Open it with ``open_device("cuda")``."""

    host: RealHost
    default_stream: CudaStream

    def __init__(
        self, number: int, why: str, races: Literal["raise", "show", "off"], spans: Source, host: RealHost
    ) -> None:
        self.cupy = importlib.import_module("cupy")
        self.runtime = self.cupy.cuda.runtime
        count = self.runtime.getDeviceCount()
        if not 0 <= number < count:
            raise DeviceUnavailable(
                f"cuda:{number} does not exist; this machine has {count} CUDA device(s), from cuda:0 on."
            )
        self.host, self._why, self._closed = host, why, False
        self.index = host.next_device_index()
        self.native = self.cupy.cuda.Device(number)
        properties = self.runtime.getDeviceProperties(number)
        self.name = properties["name"].decode()
        self.order = None if races == "off" else Order(races)
        self.limits = Limits(int(properties["totalGlobalMem"]), int(machine_memory() * PINNED_SHARE))
        self._pinned = 0
        self.copy_kinds = {
            H2D: self.runtime.memcpyHostToDevice,
            D2H: self.runtime.memcpyDeviceToHost,
            KERNEL: self.runtime.memcpyDeviceToDevice,
        }
        self.kernels = CompiledKernels(self.cupy)
        self._streams: list[CudaStream] = []
        self.default_stream = CudaStream(self, DEFAULT_STREAM, False, self.cupy.cuda.Stream.null)
        with self.native:
            self.spans, self.spans_from = open_spans(spans, self.cupy, host, self.index)
        self.source = self.spans.source

    @classmethod
    def open(
        cls,
        index: int = 0,
        why: str = "",
        races: Literal["raise", "show", "off"] = "off",
        spans: Source | bool = "auto",
        host: RealHost | None = None,
    ) -> CudaDevice:
        """The machine's CUDA device number `index`.

        Parameters
        ----------
        why
            Why this device was chosen; its repr says it.
        races
            ``"raise"`` or ``"show"`` checks the order of all accesses; ``"off"`` does not.
        spans
            Where the times of device ops come from: ``"cupti"`` (exact, a span a kernel),
            ``"events"`` (two event records an op), ``"auto"`` (CUPTI where it works, else
            events; the device's repr says which and why), ``"off"`` (ops are not timed).
        host
            The host to run under, to put several devices on one clock; by default its own.

        Raises
        ------
        DeviceUnavailable
            There is no such device, or none can be used, or CUPTI was asked for by name and
            cannot be; says why.
        """
        timed_by = source(spans)
        if missing := why_not():
            raise DeviceUnavailable(f"cuda:{index} cannot be opened here: {missing}")
        return cls(index, why, races, timed_by, host or RealHost())

    # -- streams -----------------------------------------------------------------------

    def stream(self, non_blocking: bool = True) -> CudaStream:
        self.check_open()
        if len(self._streams) >= self.limits.streams:
            raise InputError(
                f"{self.name}: at most {self.limits.streams} streams here; reuse those you have."
            )
        with self.native:
            native = self.cupy.cuda.Stream(non_blocking=non_blocking)
        stream = CudaStream(self, len(self._streams), non_blocking, native)
        self._streams.append(stream)
        if self.order:
            self.order.add_stream(stream.index, blocking=not non_blocking)
        return stream

    def synchronize(self) -> None:
        self.check_open()
        op, start = self.begin_call()
        try:
            self.runtime.deviceSynchronize()
        finally:
            self.end_call("synchronize", None, op, start, kind=SYNC)
        if self.order:
            self.order.host_synchronized([DEFAULT_STREAM, *(stream.index for stream in self._streams)])

    def collect(self) -> None:
        self.spans.collect()

    def begin_call(self) -> tuple[int, int]:
        """(op number, now): the host enters a device call."""
        if self.runtime.getDevice() != self.native.id:
            self.native.use()  # the calls that follow are for this device
        return self.host.recorder.next_op(), self.host.now()

    def end_call(
        self, call: str, stream: CudaStream | None, op: int, start: int, batch: int = NONE, kind: str = API
    ) -> None:
        """The host leaves a device call: record the span."""
        index = NO_STREAM if stream is None else stream.index
        end = self.host.now()
        self.host.recorder.add(Span(op, kind, call, "host", index, self.index, start, start, end, 0, batch))

    def check(self, what: str, stream: Stream, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Refuse a closed device, and an access that nothing orders."""
        self.check_open()
        if self.order:
            self.order.device_op(stream.index, what, reads, writes)

    def explain(self, error: Exception, kernel: Kernel, stream: CudaStream) -> Exception:
        """A launch's error, with the kernel's name where CUDA left it out."""
        cuda = self.cupy.cuda
        if isinstance(error, cuda.memory.OutOfMemoryError):
            free, _ = self._free_memory()
            return OutOfDeviceMemory(
                f"kernel {kernel.name!r} needs memory of its own that {self.name} does not have: {error} "
                f"{checks.human_bytes(free)} are free. Use a smaller batch."
            )
        if isinstance(
            error,
            self.runtime.CUDARuntimeError | cuda.driver.CUDADriverError | cuda.compiler.CompileException,
        ):
            return HeteroLabError(f"kernel {kernel.name!r} cannot be launched on {stream!r}: {error}")
        error.add_note(f"In the launch of kernel {kernel.name!r} on {stream!r}.")
        return error

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
        what = f"buffer {name!r}" if name else f"a buffer of {'×'.join(map(str, sizes))} {kind}"
        if memory is Memory.DEVICE:
            return Buffer(self, self._device_array(sizes, kind, nbytes, what), memory, name)
        if memory is Memory.PAGEABLE:
            return Buffer(self, np.zeros(sizes, kind), memory, name)
        if memory is Memory.MANAGED:
            return Buffer(self, managed_array(self, sizes, kind, nbytes, what), memory, name)
        return Buffer(self, self._pinned_array(sizes, kind, nbytes, what, memory), memory, name)

    def _device_array(self, sizes: tuple[int, ...], kind: np.dtype[Any], nbytes: int, what: str) -> Array:
        free, total = self._free_memory()
        checks.must_fit(self.name, what, nbytes, free, total)
        with self.native, self.default_stream.native:
            try:
                array = self.cupy.zeros(sizes, kind)
            except self.cupy.cuda.memory.OutOfMemoryError as error:
                raise OutOfDeviceMemory(
                    f"{what} needs {checks.human_bytes(nbytes)}; {self.name} has {checks.human_bytes(free)} "
                    "free, but not in one piece. Drop buffers that are no longer needed."
                ) from error
            # The zeros are written on the default stream, for which other streams do not wait.
            self.default_stream.native.synchronize()
        return array

    def _pinned_array(
        self, sizes: tuple[int, ...], kind: np.dtype[Any], nbytes: int, what: str, memory: Memory
    ) -> NDArray[Any]:
        free, total = self.limits.pinned_bytes - self._pinned, self.limits.pinned_bytes
        checks.must_fit("this machine's page-locked memory", what, nbytes, free, total)
        cuda = self.cupy.cuda
        with self.native:
            try:
                if memory is Memory.MAPPED:
                    flags = self.runtime.hostAllocMapped | self.runtime.hostAllocPortable
                    block = cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes, flags), 0)
                else:
                    block = cuda.alloc_pinned_memory(nbytes)
            except self.runtime.CUDARuntimeError as error:
                raise OutOfDeviceMemory(
                    f"{what} needs {checks.human_bytes(nbytes)} of page-locked memory, which this system "
                    f"does not give ({error}). Use less of it, or memory='pageable'."
                ) from error
        # All views of it keep `root` alive, and root keeps the block.
        root = np.frombuffer(block, np.uint8, nbytes)
        root.fill(0)
        self._pinned += nbytes
        gone = weakref.finalize(root, self._unpin, nbytes)
        gone.atexit = False
        return root.view(kind).reshape(sizes)

    def _unpin(self, nbytes: int) -> None:
        self._pinned -= nbytes

    def _free_memory(self) -> tuple[int, int]:
        """Free and total bytes; what CuPy's pool holds but does not use counts as free."""
        with self.native:
            free, total = self.runtime.memGetInfo()
            return free + self.cupy.get_default_memory_pool().free_bytes(), total

    def array(self, buffer: Buffer) -> Array:
        """The array a kernel gets: for mapped memory, the device's view of the host's bytes."""
        if buffer.memory is Memory.DEVICE:
            return buffer.array
        cuda = self.cupy.cuda
        # Host and device share one address space (UVA), so a mapped pointer means the same to both.
        memory = cuda.UnownedMemory(buffer.address, buffer.nbytes, buffer.array, self.native.id)
        return self.cupy.ndarray(buffer.shape, buffer.dtype, cuda.MemoryPointer(memory, 0))

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Array]:
        free, total = self._free_memory()
        asked = sum(array.nbytes for array in arrays.values())
        checks.must_fit(self.name, f"{len(arrays)} arrays", asked, free, total)
        with self.native, self.default_stream.native:
            uploaded = {name: self.cupy.asarray(array) for name, array in arrays.items()}
            self.default_stream.native.synchronize()
        return uploaded

    def host_access(self, buffer: Buffer, writes: bool) -> None:
        self.check_open()
        if self.order:
            if writes:
                self.order.host_op("a write", writes=[buffer])
            else:
                self.order.host_op("a read", reads=[buffer])

    # -- the end -----------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.name} is closed. Open it again: open_device('cuda').")

    def close(self) -> None:
        if self._closed:
            return
        with self.native:
            self.runtime.deviceSynchronize()
        self.collect()
        self.spans.close()
        self._closed = True

    def meta(self) -> dict[str, Any]:
        return self.host.meta() | {
            "gpu": self.name,
            "spans": self.spans_from,
            "cupy": self.cupy.__version__,
            "driver": _version(self.runtime.driverGetVersion()),
            "runtime": _version(self.runtime.runtimeGetVersion()),
        }

    def __repr__(self) -> str:
        why = f"; {self._why}" if self._why else ""
        return f"<{self.name}: a CUDA device; {self.spans_from}{why}>"
