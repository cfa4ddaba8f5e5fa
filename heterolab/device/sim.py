"""A simulated GPU: ops cost what a machine's profile says, values are computed for real.

The host's side is in ``simhost.py``, the device's physics in ``engines.py``; here is the
device that programs see. An op's effect on memory takes place at its virtual *end*, so that a
program which reads too early reads old values here too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil, exp
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterolab.device import checks
from heterolab.device.base import Array, Buffer, Device, Event, Kernel, Limits, Memory, Stream, Work
from heterolab.device.engines import Gpu
from heterolab.device.failures import Failure, tell, untold
from heterolab.device.managed import ManagedMemory
from heterolab.device.op import Looked, Op, Price, pauses_of, roofline_ns
from heterolab.device.order import Clock, Order, Races
from heterolab.device.physics import Physics
from heterolab.device.profile import DeviceProfile, Pageable
from heterolab.device.simhost import SimHost
from heterolab.errors import InputError, OutOfDeviceMemory, ProfileError, RaceError
from heterolab.trace.trace import API, D2H, DEFAULT_STREAM, H2D, KERNEL, NO_STREAM, NONE, SYNC, Span

PAGEABLE, MAPPED, MANAGED = Memory.PAGEABLE, Memory.MAPPED, Memory.MANAGED


class SimEvent(Event):
    """A mark in a simulated stream: the ops that were its last when it was recorded."""

    device: SimDevice

    def __init__(self, device: SimDevice, op: int, past: Clock | None, ops: list[Op]) -> None:
        self.device, self.op, self.ops, self._past = device, op, ops, past

    @property
    def done(self) -> bool:
        self.device.host.catch_up()
        for op in self.ops:
            if not op.done:
                return False
        if self._past is not None and self.device.order is not None:
            self.device.order.host_saw(self._past)
            self._past = None
        return True

    @property
    def past(self) -> Clock | None:
        return self._past

    def result(self) -> None:
        if not self.done:
            raise InputError(f"{self!r} is not done yet. Wait for it first: host.wait_any([it]).")
        tell((failure for op in self.ops for failure in op.failures), self.op)

    def __repr__(self) -> str:
        return f"<event {self.op}, {'done' if all(op.done for op in self.ops) else 'not done'}>"


class SimStream(Stream):
    """A queue on a simulated device: each op waits for the one before, and for events."""

    device: SimDevice

    def __init__(self, device: SimDevice, index: int, non_blocking: bool) -> None:
        self.device, self.index, self.non_blocking = device, index, non_blocking
        self.last: Op | None = None
        #: Ops of other streams that the next op has to wait for, through events.
        self.awaited: list[Op] = []

    def copy(self, dst: Buffer, src: Buffer, *, batch: int = NONE) -> int:
        device = self.device
        kind = checks.copy_kind(device, dst, src)
        if device.pageable is not None and (src.memory is PAGEABLE or dst.memory is PAGEABLE):
            return self._copy_pageable(kind, dst, src, batch, device.pageable)
        device.check("copy", self, (src,), (dst,))
        op = device.copy_op(kind, self, dst.nbytes, batch)
        if device.values:
            op.effect = _copying(dst, src)
        costs = device.costs
        return device.issue(op, "copy", self, costs.copy_ns, "copy", costs.cold_copy_ns)

    def _copy_pageable(self, kind: str, dst: Buffer, src: Buffer, batch: int, costs: Pageable) -> int:
        """The host takes part in copies from and to pageable memory."""
        device = self.device
        staged = costs.h2d is not None and src.memory is PAGEABLE
        if staged and device.order:  # it is the host that reads `src`, and now
            device.order.host_op("a copy", reads=[src])
        device.check("copy", self, () if staged else (src,), (dst,))
        op = device.copy_op(kind, self, dst.nbytes, batch)
        if staged:
            return device.issue_staged(op, dst, src, self, costs)
        if device.values:
            op.effect = _copying(dst, src)
        return device.issue_drained(op, self, costs)

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
        work = kernel.work(reads, writes)
        nbytes = far = 0
        managed: list[Buffer] = []
        for buffer in (*reads, *writes):
            nbytes += buffer.nbytes
            if buffer.memory is MAPPED:
                far += buffer.nbytes
            elif buffer.memory is MANAGED:
                managed.append(buffer)
        op = Op(device.next_op(), KERNEL, kernel.name, self.index, nbytes, batch)
        held_ns, warmth, cold_ns = device.price(op, work, far)
        device.check(kernel.name, self, reads, writes)  # last: what is refused has touched nothing
        if device.values:
            op.effect = _running(kernel, reads, writes)
        if managed and device.managed is not None:
            op.faults = partial(device.managed.touched_by_kernel_ns, managed)
        return device.issue(op, "launch", self, held_ns, warmth, cold_ns)

    def prefetch(self, buffer: Buffer, to: str = "device", *, batch: int = NONE) -> int:
        device = self.device
        device.check_open()
        kind = checks.prefetch(device, buffer, to)
        managed = device.managed
        assert managed is not None, "there are no managed buffers without it"
        if not managed.costs.concurrent:
            raise InputError(
                f"prefetch of {buffer!r}: {device.name} cannot (concurrentManagedAccess is 0). All managed "
                "memory moves to it before each kernel."
            )
        op = Op(device.next_op(), kind, "prefetch", self.index, 0, batch)

        def move() -> float:
            op.nbytes, ns = managed.prefetch(buffer, to_device=kind == H2D)
            return ns

        op.faults = move
        costs = device.costs
        return device.issue(op, "prefetch", self, costs.copy_ns, "copy", costs.cold_copy_ns)

    def record(self) -> SimEvent:
        device = self.device
        number = device.call("record", device.costs.record_ns, self)
        past = device.order.record(self.index) if device.order else None
        return SimEvent(device, number, past, device.frontier(self))

    def wait(self, event: Event) -> None:
        device = self.device
        checks.event(device, event)
        assert isinstance(event, SimEvent)
        device.call("wait", device.costs.wait_ns, self)
        if device.order and event.past is not None:
            device.order.wait(self.index, event.past)
        for op in event.ops:
            if op is not self.last and op not in self.awaited:
                self.awaited.append(op)

    def synchronize(self) -> None:
        self.device.hold([self])

    def __repr__(self) -> str:
        return f"<stream {self.index} of {self.device.name}>"


class SimDevice(Device):
    """See the module. ``open_device("sim:h200")`` makes one."""

    host: SimHost
    source = "simulated"
    default_stream: SimStream
    profile: DeviceProfile

    def __init__(self, physics: Physics, why: str, races: Races, values: bool, host: SimHost) -> None:
        self.host, self.physics, self.profile, self._why = host, physics, physics.profile, why
        profile = self.profile
        self.costs = profile.seam or profile.host
        self.index = host.next_device_index()
        kind = profile.provenance.kind
        self.name = profile.name if kind == "measured" else f"{profile.name} ({kind})"
        if physics.without:
            self.name += f", without {', '.join(physics.without)}"
        self.values = values
        self.order = None if races == "off" else Order(races)
        capacity = profile.limits
        self.limits = Limits(capacity.memory_bytes, capacity.pinned_bytes, capacity.streams)
        self.pageable, self._mapped = profile.pageable, profile.mapped
        self._pauses = pauses_of(profile.gaps)
        self._start_ns = round(self.costs.start_ns)
        copies = profile.copies
        self._copy_ns = {H2D: Looked(copies.h2d), D2H: Looked(copies.d2h), KERNEL: Looked(copies.inside)}
        self._prices: dict[str, Price | None] = {}  # by kernel, as they come
        self.next_op, self._rows = host.recorder.next_op, host.recorder.rows
        self._gpu = Gpu(self.index, host.agenda, physics, host.cpu, self._rows, self._take_effect)
        host.shared = host.shared or profile.compute.on_host_gil is not None
        self.managed = None if profile.managed is None else ManagedMemory(profile.managed)
        self._taken = {True: 0, False: 0}  # bytes that only the host holds, and others
        self._streams: list[SimStream] = []
        #: A call → the host's work until its last, and the host's count of changes to that.
        self._called: dict[str, tuple[float, float]] = {}
        self._warm: dict[str, int] = {}
        self._closed = False
        self.default_stream = SimStream(self, DEFAULT_STREAM, non_blocking=False)

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
        stream = SimStream(self, len(self._streams), non_blocking)
        self._streams.append(stream)
        if self.order:
            self.order.add_stream(stream.index, blocking=not non_blocking)
        return stream

    def synchronize(self) -> None:
        self.hold([self.default_stream, *self._streams])

    def hold(self, streams: Sequence[SimStream]) -> None:
        """Hold the host until `streams` are idle, then raise the first failure not yet told."""
        self.check_open()
        host, number = self.host, self.next_op()
        entry, _ = host.enter(self.costs.between_ns, 0, held=True)
        ops = [op for stream in streams for op in self.frontier(stream)]
        host.catch_up()
        idle = all(op.done for op in ops)
        host.sleep_until_done(ops, "synchronize()")
        host.spend(self.costs.sync_idle_ns if idle else self.costs.sync_ns)
        index = streams[0].index if len(streams) == 1 else NO_STREAM
        self._span(number, SYNC, "synchronize", index, entry)
        if self.order:
            self.order.host_synchronized([stream.index for stream in streams])
        tell((failure for op in ops for failure in op.failures), number)

    def frontier(self, stream: SimStream) -> list[Op]:
        """The ops that have to end before something new on `stream` may start."""
        ops = stream.awaited.copy()
        if stream.last is not None:
            ops.append(stream.last)
        if not stream.non_blocking:
            for other in self._barrier(stream):
                ops += other.awaited
                if other.last is not None:
                    ops.append(other.last)
        return ops

    def _barrier(self, stream: SimStream) -> Sequence[SimStream]:
        """The legacy default stream waits for all blocking streams, and they for it."""
        if not self.physics.legacy_barrier:
            return ()
        if stream is self.default_stream:
            return [other for other in self._streams if not other.non_blocking]
        return (self.default_stream,)

    # -- enqueueing --------------------------------------------------------------------

    def copy_op(self, kind: str, stream: SimStream, nbytes: int, batch: int) -> Op:
        """A copy and its price."""
        op = Op(self.next_op(), kind, "copy", stream.index, nbytes, batch)
        op.work_ns = self._copy_ns[kind][nbytes]
        if self.host.jitter:
            op.work_ns = self.host.noisy(op.work_ns)
        return op

    def call(self, call: Literal["record", "wait"], warm_ns: float, stream: SimStream) -> int:
        """A call that enqueues no op: it costs time, and has a number and a span."""
        self.check_open()
        number, costs = self.next_op(), self.costs
        if self._warm.get(call) != self.host.stirred:
            warm_ns += self._cold(call) * costs.cold_event_ns
        entry, exit_ns = self.host.enter(costs.between_ns, warm_ns)
        row = (number, API, call, "host", stream.index, self.index, entry, entry, exit_ns, 0, NONE, NONE)
        self._rows.append(row)
        return number

    def copy_ns(self) -> float:
        """How long the host is inside a copy's call that does not block."""
        return self.costs.copy_ns + self._cold("copy") * self.costs.cold_copy_ns

    def _cold(self, call: str) -> float:
        """How cold the host's caches are for this call: 0 just after the same call, 1 (or more,
        once memory was staged) after much other work, see HostCosts."""
        host, costs = self.host, self.costs
        if self._warm.get(call) == host.stirred:
            return 0.0
        now, last = (host.worked_ns, host.staged_bytes), self._called.get(call)
        self._called[call], self._warm[call] = now, host.stirred
        last = last or (-costs.cold_start_ns, 0.0)
        work = 1 - exp(-(now[0] - last[0]) / costs.cold_work_ns)
        return work + costs.cold_bytes_factor * (1 - exp(-(now[1] - last[1]) / costs.cold_bytes))

    def issue(self, op: Op, call: str, stream: SimStream, ns: float, warmth: str, cold_ns: float) -> int:
        """The host enqueues `op`; returns its number.

        The call takes `ns` where it was made just before, and up to `cold_ns` more where much was
        done since the last one of the same `warmth`.
        """
        costs = self.costs
        if self._warm.get(warmth) != self.host.stirred:
            ns += self._cold(warmth) * cold_ns
        entry, exit_ns = self.host.enter(costs.between_ns, ns)
        op.queued_ns = entry
        share = costs.submit_share
        if op.launches > 1:  # the last of its launches comes at the end of the call
            share /= op.launches
            op.launched_ns = op.work_ns
            op.not_before_ns = exit_ns + round(op.work_ns / op.launches)
        self._submit(op, stream, entry + round(share * (exit_ns - entry)))
        number, batch = op.number, op.batch
        row = (number, API, call, "host", op.stream, self.index, entry, entry, exit_ns, 0, batch, NONE)
        self._rows.append(row)
        return number

    def _submit(self, op: Op, stream: SimStream, at_ns: int) -> None:
        """The device has `op` from `at_ns` on: name what it waits for, and hand it over."""
        op.ready_ns = at_ns + self._start_ns
        last, stream.last = stream.last, op
        if last is not None:
            op.needs(last, self._pauses.within[last.kind][op.kind])
        if stream.awaited:
            for other in stream.awaited:
                op.needs(other, self._pauses.event)
            stream.awaited = []
        if not stream.non_blocking:
            for behind in self._barrier(stream):
                for other in [*behind.awaited, behind.last] if behind.last else behind.awaited:
                    op.needs(other, self._pauses.legacy[other.kind][op.kind])
        self._gpu.submit(op)

    def issue_staged(self, op: Op, dst: Buffer, src: Buffer, stream: SimStream, costs: Pageable) -> int:
        """H2D from pageable memory: the host copies the bytes, piece by piece, into a pinned
        buffer, and each piece goes over the link while the next one is copied."""
        assert costs.h2d is not None
        self.host.catch_up()
        if self.values:
            target, staged = _bytes_of(dst), _bytes_of(src).copy()
            op.effect = lambda: np.copyto(target, staged)
        # The table holds the bare call itself; what a cold one, or one through the seam, costs more:
        held_ns = costs.h2d.at(op.nbytes) + self.copy_ns() - self.profile.host.copy_ns
        entry, exit_ns = self.host.enter(self.costs.between_ns, held_ns, held=True)
        self.host.staged(op.nbytes)
        op.queued_ns = entry
        pieces = ceil(op.nbytes / costs.chunk_bytes)
        last_piece = op.nbytes - (pieces - 1) * costs.chunk_bytes
        over_link = self.profile.copies.h2d.at
        after_ns = over_link(last_piece)
        if pieces > 1:  # the piece before may still be on its way
            staged_ns = costs.h2d.at(op.nbytes) - costs.h2d.at(op.nbytes - last_piece)
            after_ns = max(after_ns, over_link(costs.chunk_bytes) - staged_ns)
        op.not_before_ns = exit_ns + round(after_ns + self.costs.start_ns)
        self._submit(op, stream, entry + round((exit_ns - entry) * min(1.0, costs.chunk_bytes / op.nbytes)))
        self._span(op.number, API, "copy", stream.index, entry, op.batch)
        return op.number

    def issue_drained(self, op: Op, stream: SimStream, costs: Pageable) -> int:
        """D2H to pageable memory: the host waits for the stream, then copies the bytes out."""
        entry, exit_ns = self.host.enter(self.costs.between_ns, self.copy_ns(), held=True)
        op.queued_ns = entry
        self._submit(op, stream, entry + round(self.costs.submit_share * (exit_ns - entry)))
        self.host.sleep_until_done([op], "copy()")
        self.host.spend(max(0.0, costs.d2h.at(op.nbytes) - op.work_ns))
        self.host.staged(op.nbytes)
        self._span(op.number, API, "copy", stream.index, entry, op.batch)
        if self.order:
            self.order.host_synchronized([stream.index])
        return op.number

    def _span(self, number: int, kind: str, call: str, stream: int, entry: int, batch: int = NONE) -> None:
        end = self.host.now()
        self.host.recorder.add(
            Span(number, kind, call, "host", stream, self.index, entry, entry, end, 0, batch)
        )

    # -- what an op costs -----------------------------------------------------------

    def price(self, op: Op, work: Work, far: int) -> tuple[float, str, float]:
        """Price a kernel that reads or writes `far` bytes over the link: its time and grid by its
        name, else its own, else by its arithmetic and bytes.

        Gives how long the host is held for its launches: the time of a warm call, which calls keep
        it warm, and how much longer it is when cold.
        """
        price = self._price(op.name)
        op.blocks, op.threads, op.launches = work.blocks, work.threads, work.launches
        if work.block_ns:
            op.work_ns, op.per_block = work.block_ns, True
        elif price is not None:
            op.work_ns = price.time[work.size]
        else:
            rate = self.profile.flops_per_ns(work.dtype) if work.flops else 1.0
            op.work_ns = roofline_ns(work, self.profile.compute, rate)
        if far and self._mapped is not None:
            over_link = self._mapped.at(far)
            op.on_link = over_link > op.work_ns
            op.work_ns = max(op.work_ns, over_link)
        if self.host.jitter:
            op.work_ns = self.host.noisy(op.work_ns)
        costs = self.costs
        if price is None or price.host is None:
            return work.launches * costs.launch_ns, "launch", costs.cold_launch_ns
        cold_ns = costs.cold_launch_ns if price.cold_host_ns is None else price.cold_host_ns
        return price.host[work.size], op.name, cold_ns

    def _price(self, kernel: str) -> Price | None:
        """What the profile knows of a kernel by its name."""
        try:
            return self._prices[kernel]
        except KeyError:
            cost = self.profile.kernels.get(kernel)
            price = self._prices[kernel] = None if cost is None else Price(cost)
            return price

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
            not op.done for stream in streams for op in self.frontier(stream)
        ):
            raise RaceError(
                f"the host touches {buffer!r} while {self.name} works, and that GPU cannot share managed "
                "memory (concurrentManagedAccess is 0): on a real one the process ends here. Wait for it "
                "first: device.synchronize()."
            )
        ns = managed.touched_by_host_ns(buffer)
        if ns:
            number, entry = self.next_op(), self.host.now()
            self.host.spend(ns)
            self._span(number, API, "migrate", NO_STREAM, entry)

    def check(self, what: str, stream: Stream, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Refuse a closed device, and an access that nothing orders."""
        if self._closed:
            self.check_open()
        if self.order is not None:
            self.order.device_op(stream.index, what, reads, writes)

    # -- the end -----------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise InputError(f"{self.name} is closed. Open it again: open_device('sim:…').")

    def close(self) -> None:
        self._closed = True

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


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    array: NDArray[Any] = buffer.array
    return array.reshape(-1).view(np.uint8)


def _host_only(memory: Memory) -> bool:
    """Whether the bytes never lie in the device's memory; managed ones may, and must fit there."""
    return memory.on_host and memory is not MANAGED


def _copying(dst: Buffer, src: Buffer) -> Callable[[], None]:
    """The effect of a copy on memory."""
    return partial(np.copyto, _bytes_of(dst), _bytes_of(src))


def _running(kernel: Kernel, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Callable[[], None]:
    """The effect of a kernel on memory."""
    inputs, outputs = [b.array for b in reads], [b.array for b in writes]
    return (
        partial(kernel.recall, inputs, outputs) if kernel.recall else partial(kernel.run, np, inputs, outputs)
    )
