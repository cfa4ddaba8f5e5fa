"""Streams and events of a simulated device: what a program's calls do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device import checks
from heterolab.device.base import Buffer, Event, Kernel, Memory, Stream
from heterolab.device.failures import tell
from heterolab.device.op import Op
from heterolab.device.order import Clock
from heterolab.device.profile import Pageable
from heterolab.errors import InputError
from heterolab.trace.trace import H2D, KERNEL, NONE

if TYPE_CHECKING:
    from heterolab.device.sim import SimDevice

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

    def __init__(
        self, device: SimDevice, index: int, non_blocking: bool, barrier: Sequence[SimStream]
    ) -> None:
        self.device, self.index, self.non_blocking = device, index, non_blocking
        #: Streams that this one always waits for: the legacy default stream for all blocking
        #: streams, and they for it.
        self.barrier = barrier
        self.last: Op | None = None
        #: Ops of other streams that the next op has to wait for, through events.
        self.awaited: list[Op] = []

    def copy(self, dst: Buffer, src: Buffer, *, batch: int = NONE) -> int:
        device = self.device
        kind = checks.copy_kind(device, dst, src)
        if device.pageable is not None and (src.memory is PAGEABLE or dst.memory is PAGEABLE):
            return self._copy_pageable(kind, dst, src, batch, device.pageable)
        if device.checked:
            device.check("copy", self, (src,), (dst,))
        calls = device.calls
        op = calls.copying(kind, self, dst.nbytes, batch)
        if device.values:
            op.effect = _copying(dst, src)
        costs = calls.costs
        return calls.issue(op, "copy", self, costs.copy_ns, "copy", costs.cold_copy_ns)

    def _copy_pageable(self, kind: str, dst: Buffer, src: Buffer, batch: int, costs: Pageable) -> int:
        """The host takes part in copies from and to pageable memory."""
        device, calls = self.device, self.device.calls
        staged = costs.h2d is not None and src.memory is PAGEABLE
        if staged and device.order:  # it is the host that reads `src`, and now
            device.order.host_op("a copy", reads=[src])
        device.check("copy", self, () if staged else (src,), (dst,))
        op = calls.copying(kind, self, dst.nbytes, batch)
        if staged:
            device.host.catch_up()
            if device.values:
                op.effect = partial(np.copyto, _bytes_of(dst), _bytes_of(src).copy())
            return calls.issue_staged(op, self, costs)
        if device.values:
            op.effect = _copying(dst, src)
        number = calls.issue_drained(op, self)
        if device.order:
            device.order.host_synchronized([self.index])
        return number

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
        calls = device.calls
        op = Op(calls.next_op(), KERNEL, kernel.name, self.index, nbytes, batch)
        held_ns, warmth, cold_ns = calls.price(op, work, far)
        if device.checked:  # last: what is refused has touched nothing
            device.check(kernel.name, self, reads, writes)
        if device.values:
            op.effect = _running(kernel, reads, writes)
        if managed and device.managed is not None:
            op.faults = partial(device.managed.touched_by_kernel_ns, managed)
        return calls.issue(op, "launch", self, held_ns, warmth, cold_ns)

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
        calls = device.calls
        op = Op(calls.next_op(), kind, "prefetch", self.index, 0, batch)

        def move() -> float:
            op.nbytes, ns = managed.prefetch(buffer, to_device=kind == H2D)
            return ns

        op.faults = move
        costs = calls.costs
        return calls.issue(op, "prefetch", self, costs.copy_ns, "copy", costs.cold_copy_ns)

    def record(self) -> SimEvent:
        device = self.device
        device.check_open()
        number = device.calls.mark("record", device.calls.costs.record_ns, self)
        past = device.order.record(self.index) if device.order else None
        return SimEvent(device, number, past, self.frontier())

    def wait(self, event: Event) -> None:
        device = self.device
        checks.event(device, event)
        assert isinstance(event, SimEvent)
        device.check_open()
        device.calls.mark("wait", device.calls.costs.wait_ns, self)
        if device.order and event.past is not None:
            device.order.wait(self.index, event.past)
        for op in event.ops:
            if op is not self.last and op not in self.awaited:
                self.awaited.append(op)

    def synchronize(self) -> None:
        self.device.hold([self])

    def frontier(self) -> list[Op]:
        """The ops that have to end before something new on this stream may start."""
        ops = self.awaited.copy()
        if self.last is not None:
            ops.append(self.last)
        for other in self.barrier:
            ops += other.awaited
            if other.last is not None:
                ops.append(other.last)
        return ops

    def __repr__(self) -> str:
        return f"<stream {self.index} of {self.device.name}>"


def _bytes_of(buffer: Buffer) -> NDArray[np.uint8]:
    array: NDArray[Any] = buffer.array
    return array.reshape(-1).view(np.uint8)


def _copying(dst: Buffer, src: Buffer) -> Callable[[], None]:
    """The effect of a copy on memory."""
    return partial(np.copyto, _bytes_of(dst), _bytes_of(src))


def _running(kernel: Kernel, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> Callable[[], None]:
    """The effect of a kernel on memory."""
    inputs, outputs = [b.array for b in reads], [b.array for b in writes]
    return (
        partial(kernel.recall, inputs, outputs) if kernel.recall else partial(kernel.run, np, inputs, outputs)
    )
