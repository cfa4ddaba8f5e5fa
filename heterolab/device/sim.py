"""A simulated GPU: ops cost what a machine's profile says, values are computed for real.

The host's side is in ``simhost.py``, the device's physics in ``engines.py``; here is the
device that programs see. An op's effect on memory takes place at its virtual *end*, so that a
program which reads too early reads old values here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterolab.device import checks
from heterolab.device.base import Array, Buffer, Device, Limits, Memory, Stream
from heterolab.device.engines import Gpu
from heterolab.device.failures import Failure, tell, untold
from heterolab.device.managed import ManagedMemory
from heterolab.device.op import Op
from heterolab.device.order import Order, Races
from heterolab.device.physics import Physics
from heterolab.device.profile import DeviceProfile
from heterolab.device.simcalls import Calls
from heterolab.device.simhost import SimHost
from heterolab.device.simstream import MANAGED, SimStream
from heterolab.errors import InputError, OutOfDeviceMemory, ProfileError, RaceError
from heterolab.trace.trace import API, DEFAULT_STREAM, NO_STREAM, SYNC


class SimDevice(Device):
    """See the module. ``open_device("sim:h200")`` makes one."""

    host: SimHost
    source = "simulated"
    default_stream: SimStream
    profile: DeviceProfile

    def __init__(self, physics: Physics, why: str, races: Races, values: bool, host: SimHost) -> None:
        self.host, self.physics, self.profile, self._why = host, physics, physics.profile, why
        profile = self.profile
        self.index = host.next_device_index()
        kind = profile.provenance.kind
        self.name = profile.name if kind == "measured" else f"{profile.name} ({kind})"
        if physics.without:
            self.name += f", without {', '.join(physics.without)}"
        self.values = values
        self.order = None if races == "off" else Order(races)
        capacity = profile.limits
        self.limits = Limits(capacity.memory_bytes, capacity.pinned_bytes, capacity.streams)
        self.pageable = profile.pageable
        rows = host.recorder.rows
        self._gpu = Gpu(self.index, host.agenda, physics, host.cpu, rows, self._take_effect)
        self.calls = Calls(physics, self.index, host, self._gpu)
        host.shared = host.shared or profile.compute.on_host_gil is not None
        self.managed = None if profile.managed is None else ManagedMemory(profile.managed)
        self._taken = {True: 0, False: 0}  # bytes that only the host holds, and others
        self._streams: list[SimStream] = []
        self._blocking: list[SimStream] = []  # which the legacy default stream waits for
        self._closed = False
        #: Whether a call has anything to check: the order of accesses, or that this is closed.
        self.checked = self.order is not None
        self.default_stream = SimStream(self, DEFAULT_STREAM, non_blocking=False, barrier=self._blocking)

    @classmethod
    def open(
        cls,
        profile: str | Path | DeviceProfile = "h200",
        why: str = "",
        races: Races = "raise",
        seed: int = 0,
        jitter: float = 0.0,
        values: bool = True,
        without: str | Iterable[str] = (),
        host: SimHost | None = None,
    ) -> SimDevice:
        """A simulated device.

        Parameters
        ----------
        profile
            A built-in profile's name, a JSON file, or a profile.
        why
            Why this device was chosen; its repr says it.
        races
            What an access that nothing orders does: ``"raise"``, ``"show"`` (warns, and lets the
            wrong values through), ``"off"``.
        seed, jitter
            Noise on every cost: a relative deviation (0: none), drawn from `seed`.
        values
            False: copies and kernels cost time and move no values.
        without
            Effects of the physics to leave out, by their names in :data:`physics.EFFECTS`.
        host
            The host to run under, to put several devices on one clock; by default its own. Such a
            host goes by the profile it was made from, with all its effects.

        Raises
        ------
        ProfileError
            There is no such profile, or it is corrupt.
        InputError
            There is no such effect.
        """
        loaded = profile if isinstance(profile, DeviceProfile) else DeviceProfile.load(profile)
        physics = Physics.of(loaded, without)
        return cls(physics, why, races, values, host or SimHost(physics.profile, seed, jitter))

    # -- streams and time --------------------------------------------------------------

    def stream(self, non_blocking: bool = True) -> SimStream:
        self.check_open()
        if len(self._streams) >= self.limits.streams:
            raise InputError(f"{self.name} runs at most {self.limits.streams} streams; reuse those you have.")
        barrier = () if non_blocking or not self.physics.legacy_barrier else (self.default_stream,)
        stream = SimStream(self, len(self._streams), non_blocking, barrier)
        self._streams.append(stream)
        if barrier:
            self._blocking.append(stream)
        if self.order:
            self.order.add_stream(stream.index, blocking=not non_blocking)
        return stream

    def synchronize(self) -> None:
        self.hold([self.default_stream, *self._streams])

    def hold(self, streams: Sequence[SimStream]) -> None:
        """Hold the host until `streams` are idle, then raise the first failure not yet told."""
        self.check_open()
        host, costs, number = self.host, self.calls.costs, self.calls.next_op()
        entry, _ = host.enter(costs.between_ns, 0, held=True)
        ops = [op for stream in streams for op in stream.frontier()]
        host.catch_up()
        idle = all(op.done for op in ops)
        host.sleep_until_done(ops, "synchronize()")
        host.spend(costs.sync_idle_ns if idle else costs.sync_ns)
        index = streams[0].index if len(streams) == 1 else NO_STREAM
        self.calls.span(number, SYNC, "synchronize", index, entry)
        if self.order:
            self.order.host_synchronized([stream.index for stream in streams])
        tell((failure for op in ops for failure in op.failures), number)

    # -- what has happened -------------------------------------------------------------

    def _take_effect(self, op: Op) -> None:
        """An op has ended: its effect on memory, and who has failed in its stream."""
        failed = self._gpu.failed
        if op.effect is not None:
            try:
                op.effect()
            except BaseException as error:  # kept until the host asks: see failures.py
                error.add_note(f"In the kernel {op.name!r} on stream {op.stream} of {self.name}.")
                failed[op.stream] = [*failed.get(op.stream, ()), Failure(error)]
            op.effect = None
        if op.stream in failed:
            op.failures = failed[op.stream] = untold(failed[op.stream])

    def collect(self) -> None:
        """Let all that is due by now have happened: its spans are in the recorder then."""
        self.host.catch_up()

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
        if memory is MANAGED and self.managed is None:
            raise ProfileError(
                f"memory='managed': the profile of {self.profile.name} has no costs of managed memory "
                "(section managed). Measure them on that machine with `heterolab calibrate`, or use pinned "
                "memory and copies, or mapped memory, which kernels read over the link."
            )
        sizes, kind, nbytes = checks.allocation(shape, dtype)
        self._take(nbytes, memory, name)
        unseen = memory is Memory.DEVICE and not self.values  # nobody will look: one element stands for all
        try:
            root = np.zeros(1 if unseen else sizes, kind)
        except MemoryError:
            self._taken[_host_only(memory)] -= nbytes
            remedy = "Use a smaller size" + (", or values=False." if memory is Memory.DEVICE else ".")
            raise OutOfDeviceMemory(
                f"a buffer of {checks.human_bytes(nbytes)} fits {self.name}, but this machine cannot hold "
                f"its simulated values. {remedy}"
            ) from None
        buffer = Buffer(self, np.broadcast_to(root, sizes) if unseen else root, memory, name)
        if memory is MANAGED and self.managed is not None:
            self.managed.add(buffer.storage, nbytes)
        # All parts and views of it keep `root` alive.
        gone = weakref.finalize(root, self._give_back, nbytes, _host_only(memory), buffer.storage)
        gone.atexit = False
        return buffer

    def _take(self, nbytes: int, memory: Memory, name: str) -> None:
        host_only = _host_only(memory)
        total = self.limits.pinned_bytes if host_only else self.limits.memory_bytes
        free = total - self._taken[host_only]
        what = f"buffer {name!r}" if name else "a buffer"
        checks.must_fit(self.name, f"{what} in {memory.value} memory", nbytes, free, total)
        self._taken[host_only] += nbytes

    def _give_back(self, nbytes: int, host_only: bool, storage: int) -> None:
        self._taken[host_only] -= nbytes
        if self.managed is not None:
            self.managed.forget(storage)
        if self.order:
            self.order.forget(storage)

    def upload(self, arrays: Mapping[str, NDArray[Any]]) -> Mapping[str, Array]:
        views = {name: array.view() for name, array in arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return views

    def host_access(self, buffer: Buffer, writes: bool) -> None:
        self.check_open()
        self.host.catch_up()
        if self.order and writes:
            self.order.host_op("a write", writes=[buffer])
        elif self.order:
            self.order.host_op("a read", reads=[buffer])
        if buffer.memory is MANAGED and self.managed is not None:
            self._come_to_host(buffer, self.managed)

    def _come_to_host(self, buffer: Buffer, managed: ManagedMemory) -> None:
        """The host touches managed memory: it is held until the pages are there."""
        streams = [self.default_stream, *self._streams]
        if not managed.costs.concurrent and any(
            not op.done for stream in streams for op in stream.frontier()
        ):
            raise RaceError(
                f"the host touches {buffer!r} while {self.name} works, and that GPU cannot share managed "
                "memory (concurrentManagedAccess is 0): on a real one the process ends here. Wait for it "
                "first: device.synchronize()."
            )
        ns = managed.touched_by_host_ns(buffer)
        if ns:
            number, entry = self.calls.next_op(), self.host.now()
            self.host.spend(ns)
            self.calls.span(number, API, "migrate", NO_STREAM, entry)

    def check(self, what: str, stream: Stream, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Refuse a closed device, and an access that nothing orders."""
        self.check_open()
        if self.order is not None:
            self.order.device_op(stream.index, what, reads, writes)

    # -- the end -----------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.name} is closed. Open it again: open_device('sim:…').")

    def close(self) -> None:
        self._closed = self.checked = True

    def meta(self) -> dict[str, Any]:
        meta = {
            "profile": self.profile.name,
            "provenance": asdict(self.profile.provenance),
            "seed": self.host.seed,
            "jitter": self.host.jitter,
            "values": self.values,
        }
        return meta | ({"without": list(self.physics.without)} if self.physics.without else {})

    def __repr__(self) -> str:
        values = "" if self.values else "; costs only, no values"
        why = f"; {self._why}" if self._why else ""
        without = f"; without {', '.join(self.physics.without)}" if self.physics.without else ""
        return f"<simulated {self.profile.name}, costs {self.profile.stamp}{without}{values}{why}>"


def _host_only(memory: Memory) -> bool:
    """Whether the bytes never lie in the device's memory; managed ones may, and must fit there."""
    return memory.on_host and memory is not MANAGED
