"""Stage 3: over the link. Slots, their reusable buffers, and the copies in and out.

A *slot* is what one batch in flight occupies: a stream and a set of buffers. `ring` slots
share a stream, so that the next batch can be padded and queued while the last one runs.
A slot's buffers are used again only once the event behind its last operation is done: the
pipeline hands a slot out again only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from heterolab.device.base import Buffer, Device, Memory, Stream
from heterolab.errors import InputError, OutOfDeviceMemory
from heterolab.pipeline.batch import Batch
from heterolab.pipeline.payload import Payload, Returns


@dataclass(eq=False)
class Slot:
    """A stream and the buffers of one batch. Each buffer is large enough for any batch; a
    batch uses the front of it (:meth:`Buffer.view`)."""

    stream: Stream
    host_in: Buffer
    device_in: Buffer
    hidden: Buffer
    lengths: Buffer
    vectors: Buffer
    result: Buffer
    host_out: Buffer


@dataclass(frozen=True)
class SlotPlan:
    """How many elements each buffer of a slot needs, known before anything is allocated."""

    payload: Payload
    returns: Returns
    batch: int
    max_tokens: int
    dim: int
    memory: Memory

    def elements(self) -> dict[str, tuple[int, str]]:
        """Elements and dtype by buffer name, for a full batch of the longest rows."""
        positions = self.batch * self.payload.positions(self.max_tokens)
        return {
            "input": (self.batch * prod(self.payload.row(self.max_tokens)), self.payload.dtype),
            "hidden": (positions * self.dim, "float32"),
            "lengths": (self.batch, "int32"),
            "vectors": (self.batch * self.dim, "float32"),
            "result": (self.batch * prod(self.returns.row), "float32"),
        }

    def nbytes(self) -> int:
        """Device memory of one slot."""
        return sum(count * np.dtype(dtype).itemsize for count, dtype in self.elements().values())


def make_slots(device: Device, plan: SlotPlan, streams: int, ring: int) -> list[Slot]:
    """``streams * ring`` slots; neighbours lie on different streams.

    Raises
    ------
    OutOfDeviceMemory
        They would not fit the device. Nothing is allocated; the message says what would fit.
    """
    if not plan.memory.on_host:
        raise InputError(
            "memory='device': the host fills these buffers; choose pageable, pinned, mapped or managed."
        )
    if streams > device.limits.streams:
        raise InputError(f"streams={streams}: {device.name} runs at most {device.limits.streams}.")
    needed, room = plan.nbytes() * streams * ring, device.limits.memory_bytes
    if needed > room:
        fits = plan.batch * room // needed
        remedy = f"The largest batch that fits is {fits}." if fits else "Use fewer streams or a smaller ring."
        raise OutOfDeviceMemory(
            f"batch={plan.batch} in {streams * ring} slots ({streams} streams × ring={ring}) needs "
            f"{needed / 2**30:.1f} GiB; {device.name} has {room / 2**30:.1f} GiB. {remedy}"
        )
    queues = device.streams(streams)
    return [_make_slot(device, plan, queues[i % streams], i) for i in range(streams * ring)]


def _make_slot(device: Device, plan: SlotPlan, stream: Stream, number: int) -> Slot:
    sizes = plan.elements()

    def make(name: str, memory: Memory) -> Buffer:
        count, dtype = sizes[name]
        return device.buffer(count, dtype, memory, name=f"slot {number} {name}")

    # Kernels read and write mapped memory themselves, over the link, and the pages of managed
    # memory come to them: there is nothing to copy, the device's side of the buffer is the host's.
    zero_copy = plan.memory in (Memory.MAPPED, Memory.MANAGED)
    host_in, host_out = make("input", plan.memory), make("result", plan.memory)
    return Slot(
        stream,
        host_in=host_in,
        device_in=host_in if zero_copy else make("input", Memory.DEVICE),
        hidden=make("hidden", Memory.DEVICE),
        lengths=make("lengths", Memory.DEVICE),
        vectors=make("vectors", Memory.DEVICE),
        result=host_out if zero_copy else make("result", Memory.DEVICE),
        host_out=host_out,
    )


def copy_in(slot: Slot, shape: tuple[int, ...], batch: Batch) -> None:
    """Enqueue the copy of the padded batch to the device."""
    if slot.device_in is not slot.host_in:
        slot.stream.copy(slot.device_in.view(*shape), slot.host_in.view(*shape), batch=batch.number)


def copy_out(slot: Slot, result: Buffer, shape: tuple[int, ...], batch: Batch) -> None:
    """Enqueue the copy of the batch's result to the host."""
    if result is not slot.host_out:
        slot.stream.copy(slot.host_out.view(*shape), result.view(*shape), batch=batch.number)
