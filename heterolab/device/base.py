"""The seam: what a Host and a Device are, whatever stands behind them.

The **Host** keeps the clock and does the CPU's work. A **Device** holds memory and runs
streams. The pipeline is ordinary, single-threaded host code written over these two, and it
cannot tell a simulated GPU, a CPU that plays the device, and a real GPU apart.

Everything that takes time goes through one of the methods below, so everything that takes
time is on the timeline.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterolab.device.order import Order
from heterolab.device.profile import DeviceProfile
from heterolab.errors import InputError
from heterolab.trace.trace import NONE, Recorder

Array = Any  # a NumPy array on the host and the simulator, a CuPy array on a GPU


class Memory(enum.Enum):
    """Where the bytes of a buffer live.

    ``PAGEABLE`` is ordinary host memory. ``PINNED`` host memory cannot be paged out, so the
    GPU's copy engine reads it by itself. ``MAPPED`` is pinned and the GPU's kernels read it
    over the link, with no copy (zero-copy). ``MANAGED`` (unified) moves by page faults.
    ``DEVICE`` is the GPU's own.
    """

    PAGEABLE = "pageable"
    PINNED = "pinned"
    MAPPED = "mapped"
    MANAGED = "managed"
    DEVICE = "device"

    @classmethod
    def of(cls, name: Memory | str) -> Memory:
        """The memory kind of that name; an unknown one is refused with the list of names."""
        try:
            return cls(name)  # type: ignore[arg-type]
        except ValueError:
            names = ", ".join(m.value for m in cls)
            raise InputError(f"memory={name!r} is not a memory kind. Choose from: {names}.") from None

    def __init__(self, value: str) -> None:
        #: Whether the host can touch the bytes itself, and whether kernels can.
        self.on_host = value != "device"
        self.in_kernels = value not in ("pageable", "pinned")


class Wait(Protocol):
    """Anything the host can wait for: an Event of a stream, or the Future of a CPU job."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Any:
        """The value; raises what the work raised. Only once it is done."""


@dataclass(frozen=True)
class Work:
    """What a kernel costs, in units that a machine's profile can price.

    Attributes
    ----------
    flops
        Arithmetic operations.
    bytes
        Bytes read and written in device memory.
    dtype
        The type the arithmetic is done in; picks the rate.
    blocks, threads
        The launch grid; ``blocks=0`` means "enough to fill the device".
    launches
        Kernel launches behind this one op: a model's eager forward pass is hundreds, and the
        host is held for all of them; a CUDA graph is one.
    block_ns
        A block's duration when the kernel fixes it itself (a spin kernel), else 0.
    size
        The size looked up in the profile's table for this kernel's name, where it has one.
    """

    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "float32"
    blocks: int = 0
    threads: int = 256
    launches: int = 1
    block_ns: int = 0
    size: int = 1


@dataclass(frozen=True)
class CudaSource:
    """A kernel's own CUDA C++: how a GPU runs it in place of the array code.

    `arguments(reads, writes)` gives the kernel's arguments in order (device arrays and NumPy
    scalars of the exact C types), `grid(reads, writes)` gives (blocks, threads).
    """

    code: str
    entry: str
    arguments: Callable[[Sequence[Array], Sequence[Array]], tuple[Any, ...]]
    grid: Callable[[Sequence[Array], Sequence[Array]], tuple[int, int]]
    shared_bytes: Callable[[Sequence[Array], Sequence[Array]], int] | None = None


@dataclass(frozen=True)
class Kernel:
    """A named function over arrays, with its cost.

    Attributes
    ----------
    name
        The name on the timeline and in a profile's tables.
    run
        ``run(xp, reads, writes)``: computes `writes` in place with the array module `xp`
        (NumPy on the CPU, CuPy on a GPU). It is the reference that every device must match.
    work
        ``work(reads, writes)`` gives the :class:`Work` of one launch from the buffers' shapes.
    cuda
        CUDA C++ that does the same, for devices that can run it.
    recall
        ``recall(reads, writes)``: the same values as ``run(numpy, …)`` from memory where they
        were computed before. Used only where time is simulated and values alone matter.
    """

    name: str
    run: Callable[[Any, Sequence[Array], Sequence[Array]], None]
    work: Callable[[Sequence[Buffer], Sequence[Buffer]], Work]
    cuda: CudaSource | None = None
    recall: Callable[[Sequence[Array], Sequence[Array]], None] | None = None


@dataclass(frozen=True)
class Limits:
    """What a device can hold and do at most."""

    memory_bytes: int
    pinned_bytes: int
    streams: int = 128


_storages = iter(range(1, 1 << 62))
#: Parts that a buffer remembers at most.
MOST_PARTS = 4096


@dataclass(eq=False)
class Buffer:
    """A typed run of bytes somewhere, and possibly a part of a larger one.

    Slices along the first axis (``buffer[a:b]``) and :meth:`view` share the bytes; two
    buffers conflict only where their bytes overlap.

    Attributes
    ----------
    array
        The array behind it: NumPy for host memory and on CPU and simulated devices, CuPy in
        a GPU's memory. Kernels get it; host code asks :meth:`read` or :meth:`write`.
    storage, offset
        Which allocation it lies in, and how many bytes from its start.
    """

    device: Device
    array: Array
    memory: Memory
    name: str = ""
    storage: int = field(default_factory=lambda: next(_storages))
    offset: int = 0
    # A program that streams takes the same parts again and again: each is made once.
    _parts: dict[tuple[Any, ...], Buffer] = field(default_factory=dict, repr=False)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.array.shape)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.array.dtype)
        return dtype

    @cached_property
    def nbytes(self) -> int:
        return int(self.array.size) * int(self.array.dtype.itemsize)

    @cached_property
    def address(self) -> int:
        """Where the bytes begin, in host memory or on the device."""
        if isinstance(self.array, np.ndarray):
            return int(self.array.__array_interface__["data"][0])
        return int(self.array.data.ptr)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> Buffer:
        """Rows ``a:b``, without a copy."""
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise InputError(f"{self!r}[{rows!r}]: a part of a buffer is a plain slice, a:b.")
        first, last, _ = rows.indices(len(self))
        return self._part((first, max(last, first)), lambda: self.array[rows])

    def view(self, *shape: int) -> Buffer:
        """The first ``prod(shape)`` elements as an array of that shape, without a copy."""
        key = ("view", *shape)
        if key not in self._parts:
            if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
                raise InputError(f"{self!r}.view{shape}: give every size as a whole number, 0 or more.")
            count, room = prod(shape), prod(self.shape)
            if count > room:
                raise InputError(f"{self!r} holds {room} elements; a view of {shape} needs {count}.")
        return self._part(key, lambda: self.array.reshape(-1)[: prod(shape)].reshape(shape))

    def _part(self, key: tuple[Any, ...], array: Callable[[], Array]) -> Buffer:
        """A part of this buffer: made once, then remembered."""
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= MOST_PARTS:
                self._parts.clear()
            rows = 0 if key[0] == "view" else key[0]
            offset = self.offset + rows * (self.nbytes // max(len(self), 1))
            part = Buffer(self.device, array(), self.memory, self.name, self.storage, offset)
            self._parts[key] = part
        return part

    def read(self) -> NDArray[Any]:
        """The host's view of the values, read-only; refused for device memory."""
        view = self._host_view(writes=False).view()
        view.flags.writeable = False
        return view

    def write(self) -> NDArray[Any]:
        """The host's view of the values, to be written now; refused for device memory."""
        return self._host_view(writes=True)

    def _host_view(self, writes: bool) -> NDArray[Any]:
        if not self.memory.on_host:
            raise InputError(
                f"{self!r} lives in the device's memory, which the host cannot touch. Copy it to a "
                "host buffer first: stream.copy(host_buffer, device_buffer), then wait for it."
            )
        self.device.host_access(self, writes)
        array: NDArray[Any] = self.array
        return array

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        label = f" {self.name!r}" if self.name else ""
        return f"<{self.memory.value} buffer{label} {shape} {self.dtype}>"


class Event(ABC):
    """A mark in a stream, made only by :meth:`Stream.record`."""

    device: Device
    op: int

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the mark has finished."""

    @abstractmethod
    def result(self) -> Any:
        """None; raises the error of a failed op before the mark, unless an earlier mark or a
        synchronize before the mark has told of it."""


class Stream(ABC):
    """An ordered queue of work on a Device. Calls return once the work is enqueued."""

    device: Device
    index: int
    non_blocking: bool

    @abstractmethod
    def copy(self, dst: Buffer, src: Buffer, *, batch: int = NONE) -> int:
        """Copy all of `src` over `dst` (same bytes). Returns the op number.

        From pageable memory the host is held while the bytes are staged, to pageable memory
        until they have arrived; with pinned memory the call returns at once.
        """

    @abstractmethod
    def launch(
        self,
        kernel: Kernel,
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
        *,
        batch: int = NONE,
    ) -> int:
        """Run `kernel` over the buffers. Returns the op number."""

    @abstractmethod
    def prefetch(self, buffer: Buffer, to: str = "device", *, batch: int = NONE) -> int:
        """Move the pages of a managed buffer, ``to`` the ``"device"`` or the ``"host"``, before
        they are touched there. It changes no values, and costs the host what a copy's call does.
        Returns the op number.
        """

    @abstractmethod
    def record(self) -> Event:
        """A mark behind all that was enqueued so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Hold later work on this stream until `event` is done. The host is not held."""

    @abstractmethod
    def synchronize(self) -> None:
        """Hold the host until all work enqueued on this stream has finished."""


class Pool(ABC):
    """CPU workers that run jobs beside the host thread."""

    workers: int

    @abstractmethod
    def submit(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Wait:
        """Queue ``fn(*args)``; `size` is what the profile's cost for `name` scales with."""

    @abstractmethod
    def close(self) -> None:
        """End the workers; queued jobs are finished first."""


class Background(ABC):
    """A loop that runs by itself; see :meth:`Host.spawn`."""

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end; True if it ended. Raises what the loop raised."""


class Host(ABC):
    """The clock, and the CPU's work. One a run; it serves one or more Devices."""

    recorder: Recorder

    @abstractmethod
    def now(self) -> int:
        """Nanoseconds since the host was made. The only clock of pipelines and labs."""

    @abstractmethod
    def call(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Any:
        """Run ``fn(*args)`` here, on the host thread, and record it as the span `name`.

        On a virtual clock the cost comes from the profile's entry for `name` at `size`.
        """

    @abstractmethod
    def pool(self, workers: int, kind: Literal["thread", "process"] = "thread") -> Pool:
        """Workers for CPU jobs."""

    @abstractmethod
    def wait_any(self, waits: Sequence[Wait], until: int | None = None) -> list[Wait]:
        """Sleep until one of `waits` is done, `until` (ns) is reached, or :meth:`wake` is called.

        Returns the waits that are done, in the order given. With none and no `until` the host
        sleeps until woken; where nothing can ever wake it, :class:`StalledError` is raised.
        """

    @abstractmethod
    def wake(self) -> None:
        """End a `wait_any` early. May be called from any thread."""

    @abstractmethod
    def spawn(self, step: Callable[[], bool]) -> Background:
        """Call `step` until it returns False, beside the caller where this host has threads,
        else now. A host with a virtual clock has none: its loop ends before this returns."""


class Device(ABC):
    """Memory, and streams that run copies and kernels."""

    host: Host
    index: int = 0
    #: In words, e.g. ``NVIDIA H200``, and where its times come from (see Trace.source).
    name: str
    source: str
    limits: Limits
    #: False where only time is simulated: results then mean nothing.
    values: bool = True
    order: Order | None
    default_stream: Stream
    #: The costs that it is simulated from; None where its time is real.
    profile: DeviceProfile | None = None

    @abstractmethod
    def stream(self, non_blocking: bool = True) -> Stream:
        """A new stream. A blocking one synchronises with the legacy default stream."""

    @cached_property
    def kept(self) -> dict[Any, Any]:
        """What was made for this device and will be wanted again, such as a model's kernels. It
        lives with the device, so that a device nobody uses any more can go, and all with it."""
        return {}

    def streams(self, count: int, non_blocking: bool = True) -> list[Stream]:
        """`count` streams, the same ones at every call: a device has a limited number, and work
        that comes again and again must not use them up."""
        if not isinstance(count, int) or count < 0:
            raise InputError(f"streams({count!r}): give the number of streams, 1 or more.")
        made: list[Stream] = self.kept.setdefault(("streams", non_blocking), [])
        while len(made) < count:
            made.append(self.stream(non_blocking))
        return made[:count]

    @abstractmethod
    def buffer(
        self,
        shape: int | tuple[int, ...],
        dtype: DTypeLike = "float32",
        memory: Memory | str = Memory.DEVICE,
        name: str = "",
    ) -> Buffer:
        """Allocate. Refused beyond the device's limits, before anything is taken."""

    @abstractmethod
    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Array]:
        """Read-only arrays (a model's weights) on this device. Set-up: it is not traced."""

    @abstractmethod
    def synchronize(self) -> None:
        """Hold the host until all streams are idle."""

    @abstractmethod
    def collect(self) -> None:
        """Move the device spans known by now into the host's recorder."""

    @abstractmethod
    def host_access(self, buffer: Buffer, writes: bool) -> None:
        """The host is about to read or write `buffer`: check the order, bring values up to date."""

    def close(self) -> None:  # noqa: B027 - a device that holds nothing has nothing to give back
        """Give back what the device holds. Using it afterwards is an error."""

    def meta(self) -> dict[str, Any]:
        """What a trace should say of this device: profile, driver, versions."""
        return {}
