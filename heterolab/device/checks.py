"""What devices refuse, each with the same words, before anything is enqueued or allocated."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import DTypeLike

from heterolab.device.base import Buffer, Device, Event, Kernel, Memory
from heterolab.errors import InputError, OutOfDeviceMemory
from heterolab.trace.trace import D2H, H2D, KERNEL


def copy_kind(device: Device, dst: Buffer, src: Buffer) -> str:
    """The kind of span a copy makes: ``h2d``, ``d2h``, or ``kernel`` inside the device."""
    for buffer in (dst, src):
        if not isinstance(buffer, Buffer) or buffer.device is not device:
            _must_be_here(device, buffer)
    if dst.nbytes != src.nbytes:
        raise InputError(
            f"copy of {src!r} ({src.nbytes} bytes) over {dst!r} ({dst.nbytes} bytes): both must have the "
            "same size. Take a part of the larger one: buffer[a:b] or buffer.view(shape)."
        )
    if dst.memory is Memory.MANAGED or src.memory is Memory.MANAGED:
        raise InputError(
            f"copy of {src!r} over {dst!r}: managed memory is not copied, its pages move to where they are "
            "touched. Give the buffer to the kernel itself; stream.prefetch(buffer) moves its pages ahead."
        )
    if dst.memory.on_host and src.memory.on_host:
        raise InputError(
            f"copy of {src!r} over {dst!r}: both are host memory. Do it on the host: "
            "dst.write()[...] = src.read()."
        )
    if dst.memory.on_host:
        return D2H
    return H2D if src.memory.on_host else KERNEL


def prefetch(device: Device, buffer: Buffer, to: str) -> str:
    """The kind of span a prefetch makes: ``h2d`` or ``d2h``."""
    _must_be_here(device, buffer)
    if buffer.memory is not Memory.MANAGED:
        raise InputError(
            f"prefetch of {buffer!r}: only the pages of managed memory move by themselves. Copy it "
            "(stream.copy), or allocate it with memory='managed'."
        )
    if to not in ("device", "host"):
        raise InputError(f'prefetch(to={to!r}): give "device" or "host".')
    return H2D if to == "device" else D2H


def operands(device: Device, kernel: Kernel, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
    """Refuse what is no kernel, and buffers that a kernel on `device` cannot reach."""
    if not isinstance(kernel, Kernel):
        name = getattr(kernel, "__name__", repr(kernel))
        remedy = f"Call it: stream.launch({name}(), ...)." if callable(kernel) else "Make one: Kernel(...)."
        raise InputError(f"launch of {name}: this is not a kernel. {remedy}")
    for buffer in (*reads, *writes):
        if not isinstance(buffer, Buffer) or buffer.device is not device:
            _must_be_here(device, buffer)
        if not buffer.memory.in_kernels:
            raise InputError(
                f"kernel {kernel.name!r} cannot reach {buffer!r}: it lives in host memory. Copy it to a "
                "device buffer first (stream.copy), or allocate it with memory='mapped', which kernels "
                "read over the link."
            )


def event(device: Device, event: object) -> None:
    """Refuse to let a stream of `device` wait for what it cannot see."""
    if not isinstance(event, Event):
        raise InputError(f"{event!r} is not an event. Make one: event = stream.record().")
    if event.device is not device:
        raise InputError(
            f"{event!r} is not an event of this device but of another ({event.device.name}), for which "
            f"{device.name} cannot wait. Let the host wait for it: host.wait_any([event])."
        )


def _must_be_here(device: Device, buffer: Buffer) -> None:
    if not isinstance(buffer, Buffer):
        raise InputError(
            f"{type(buffer).__name__} {buffer!r:.60} is not a buffer. Make one, device.buffer(shape, dtype, "
            "memory='pinned'), and put the values in: buffer.write()[...] = values."
        )
    if buffer.device is not device and not buffer.memory.on_host:
        raise InputError(
            f"{buffer!r} lives on another device ({buffer.device.name}). Copy it to a host buffer there, "
            f"and from that one to {device.name}."
        )


def allocation(
    shape: int | tuple[int, ...], dtype: DTypeLike
) -> tuple[tuple[int, ...], np.dtype[np.generic], int]:
    """A buffer's shape, dtype and size in bytes, or InputError."""
    try:
        sizes = tuple(operator.index(n) for n in (shape if isinstance(shape, tuple) else (shape,)))
        kind = np.dtype(dtype)
    except TypeError as error:
        raise InputError(
            f"a buffer of shape {shape!r} and dtype {dtype!r} cannot be made: {error}."
        ) from None
    if min(sizes, default=1) < 1:
        raise InputError(f"a buffer of shape {shape!r} has no elements: every size must be 1 or more.")
    if kind.hasobject:
        raise InputError(f"a buffer of dtype {kind} cannot be made: a device holds plain numbers only.")
    return sizes, kind, prod(sizes) * kind.itemsize


def must_fit(device_name: str, what: str, asked: int, free: int, total: int) -> None:
    """Refuse an allocation that does not fit, with what was asked for and what is free."""
    if asked > free:
        raise OutOfDeviceMemory(
            f"{what} needs {human_bytes(asked)}; {device_name} has {human_bytes(max(free, 0))} free of "
            f"{human_bytes(total)}. Use a smaller batch, fewer streams or a smaller dtype, or drop buffers "
            "that are no longer needed."
        )


def human_bytes(count: int) -> str:
    """``1536`` → ``1.5 KiB``."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        size /= 1024
    return f"{size:.4g} TiB"
