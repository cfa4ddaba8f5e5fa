"""Stream programs on the simulator: the same calls through the same seam as everything else.

A program is replayed from the profile alone, or with the host's own times of a measured run fed
in (its calls that do not block, and the gaps between them), which judges the device model
without the host's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from heterolab.device.base import Buffer, Event, Kernel, Memory, Work
from heterolab.device.physics import Physics
from heterolab.device.profile import DeviceProfile
from heterolab.device.programs import Program
from heterolab.device.sim import SimDevice
from heterolab.device.simhost import SimHost
from heterolab.device.simstream import SimStream
from heterolab.trace.trace import D2H, H2D, KERNEL, NONE

#: The host's times of a run: (entry, exit) of each op's call, in µs.
HostTimes = Sequence[tuple[float, float]]

#: One byte that stands for all: copies and kernels move no values here.
_BYTES = np.zeros(1, np.uint8)


class RecordedHost(SimHost):
    """A host whose calls take the times that a real one took; what blocks is predicted.

    :meth:`play` says which recorded times the next call has.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        super().__init__(profile)
        self._times = (0.0, 0.0)
        self._last_exit_us = 0.0

    def play(self, times: tuple[float, float]) -> None:
        """The next call's recorded entry and exit, in µs."""
        self._times = times

    def work(self, ns: float, gil: float = 1.0, waits: float | None = None) -> None:
        self.enter(0.0, ns)

    def enter(self, between_ns: float, ns: float, held: bool = False) -> tuple[int, int]:
        entry_us, exit_us = self._times
        self.spend((entry_us - self._last_exit_us) * 1000)
        entry = self.now()
        self.spend(ns if held else (exit_us - entry_us) * 1000)
        self._last_exit_us = exit_us
        return entry, self.now()


@dataclass(frozen=True)
class Replay:
    """A program as the simulator ran it, in µs: its wall, when the host left each op's call, and
    op → (start, end) on the device."""

    wall_us: float
    exits_us: tuple[float, ...]
    spans: dict[int, tuple[float, float]]


class Player:
    """Runs programs on a simulated device, op by op, through the seam. `without` names effects of
    its physics to leave out (:data:`physics.EFFECTS`)."""

    def __init__(self, profile: DeviceProfile, without: Iterable[str] = ()) -> None:
        # The programs were issued by bare calls, not through this package.
        self.physics = Physics.of(replace(profile, seam=None), without)
        self.profile = self.physics.profile

    def wall_us(self, program: Program, host_us: HostTimes | None = None) -> float:
        """The predicted wall of `program`: from the first call to the end of the last."""
        host, steps = self._ready(program, host_us)
        if host_us is None:
            for op in program.ops:
                steps.do(op)
        else:
            assert isinstance(host, RecordedHost)
            for op, times in zip(program.ops, host_us, strict=True):
                host.play(times)
                steps.do(op)
        return host.now() / 1000

    def replay(self, program: Program, host_us: HostTimes | None = None) -> Replay:
        """As :meth:`wall_us`, and where the time went."""
        host, steps = self._ready(program, host_us)
        exits, ops = [], {}
        for i, op in enumerate(program.ops):
            if host_us is not None:
                assert isinstance(host, RecordedHost)
                host.play(host_us[i])
            number = steps.do(op)
            exits.append(host.now() / 1000)
            if number != NONE:
                ops[number] = i
        wall = host.now() / 1000
        host.sleep_until(lambda: not host.agenda, "the end")  # also of what nobody waited for
        spans = {
            ops[span.op]: (span.start_ns / 1000, span.end_ns / 1000)
            for span in host.recorder.since(0)
            if span.kind in (H2D, D2H, KERNEL)
        }
        return Replay(wall, tuple(exits), spans)

    def _ready(self, program: Program, host_us: HostTimes | None) -> tuple[SimHost, _Steps]:
        host = SimHost(self.profile) if host_us is None else RecordedHost(self.profile)
        device = SimDevice(self.physics, "", races="off", values=False, host=host)
        return host, _Steps(device, program.blocking)


class _Steps:
    """A program's ops as calls to a device's streams."""

    def __init__(self, device: SimDevice, blocking: Sequence[bool]) -> None:
        self.device = device
        #: By index; -1 is the default stream.
        self.streams: list[SimStream] = [
            *(device.stream(non_blocking=not b) for b in blocking),
            device.default_stream,
        ]
        self.events: dict[int, Event] = {}
        self._buffers: dict[tuple[str, int], Buffer] = {}

    def do(self, op: dict[str, Any]) -> int:
        """Make the op's call; gives the number of a copy or kernel."""
        kind, index = op["op"], int(op.get("stream", -1))
        stream = self.streams[index]
        if kind == "kernel":
            return self._launch(stream, op)
        if kind == "h2d":
            return stream.copy(self._buffer("device", op["bytes"]), self._buffer(op["host"], op["bytes"]))
        if kind == "d2h":
            return stream.copy(self._buffer(op["host"], op["bytes"]), self._buffer("device", op["bytes"]))
        if kind == "record":
            self.events[op["event"]] = stream.record()
        elif kind == "wait":
            stream.wait(self.events[op["event"]])
        elif kind == "sync_stream":
            stream.synchronize()
        elif kind == "sync":
            self.device.synchronize()
        else:
            self.device.host.work(op["us"] * 1000)
        return NONE

    def _launch(self, stream: SimStream, op: dict[str, Any]) -> int:
        name: str = op["kernel"]
        if name == "vadd":
            mapped = op.get("operand") == "mapped"
            reads = (self._buffer("mapped", 4 * op["n"]),) if mapped else ()
            return stream.launch(_vadd(op["n"]), reads)
        if name == "spin":
            return stream.launch(_spin(op["blocks"], op["threads"], op["ns"]))
        return stream.launch(_gemm(op["m"], op["dtype"]))

    def _buffer(self, memory: str, nbytes: int) -> Buffer:
        buffer = self._buffers.get((memory, nbytes))
        if buffer is None:
            buffer = self._buffers[memory, nbytes] = Sized(self.device, Memory(memory), nbytes)
        return buffer


class Sized(Buffer):
    """A buffer of which only the size matters: nothing is ever in it."""

    def __init__(self, device: SimDevice, memory: Memory, nbytes: int) -> None:
        self.device, self.memory, self.nbytes = device, memory, nbytes
        self.array, self.name, self.storage, self.offset = _BYTES, "", 0, 0


# Programs launch the same kernels again and again: each is made once.


@lru_cache(1024)
def _vadd(n: int) -> Kernel:
    return _kernel("vector_add", Work(flops=n, bytes=12 * n, blocks=-(-n // 256), threads=256, size=n))


@lru_cache(1024)
def _spin(blocks: int, threads: int, ns: int) -> Kernel:
    return _kernel("spin", Work(blocks=blocks, threads=threads, block_ns=ns))


@lru_cache(1024)
def _gemm(m: int, dtype: str) -> Kernel:
    return _kernel(f"gemm.{dtype}", gemm(m, dtype))


def gemm(m: int, dtype: str) -> Work:
    """The cost of an m × m × m matrix product: tiles of 128 × 128, two on an SM."""
    itemsize = 4 if dtype == "float32" else 2
    tiles = (-(-m // 128)) ** 2
    return Work(flops=2.0 * m**3, bytes=3 * itemsize * m * m, dtype=dtype, blocks=tiles, threads=1024, size=m)


def _kernel(name: str, work: Work) -> Kernel:
    return Kernel(name, lambda xp, reads, writes: None, lambda reads, writes: work)
