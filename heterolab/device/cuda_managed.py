"""Managed (unified) memory on a real GPU: CUDA's own, through CuPy.

On a timeline a prefetch is the host's call alone: the GPU's tracers do not tell page migrations
as copies.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device import checks
from heterolab.device.base import Buffer
from heterolab.errors import InputError, OutOfDeviceMemory
from heterolab.trace.trace import D2H, NONE

if TYPE_CHECKING:
    from heterolab.device.cuda import CudaDevice, CudaStream

#: CUDA's number of the attribute, and of the host among devices.
CONCURRENT_MANAGED_ACCESS, HOST = 89, -1


def managed_array(
    device: CudaDevice, sizes: tuple[int, ...], kind: np.dtype[Any], nbytes: int, what: str
) -> NDArray[Any]:
    """Zeros in managed memory, as the host sees them. All views of it keep the allocation."""
    if not device.runtime.deviceGetAttribute(CONCURRENT_MANAGED_ACCESS, device.native.id):
        raise InputError(
            f"memory='managed': on {device.name} the host must not touch managed memory while a kernel runs "
            "(CUDA's concurrentManagedAccess is 0: Windows, WSL, old GPUs); a process that does is ended. "
            "Use pinned or mapped memory."
        )
    free, total = device._free_memory()
    checks.must_fit(device.name, what, nbytes, free, total)
    with device.native:
        try:
            block = device.cupy.cuda.malloc_managed(nbytes)
        except device.cupy.cuda.memory.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"{what} needs {checks.human_bytes(nbytes)} of managed memory, which CUDA does not give "
                f"({error}). Use a smaller size."
            ) from error
    memory: Any = (ctypes.c_byte * nbytes).from_address(block.ptr)
    root: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    root.fill(0)
    gone = weakref.finalize(root, _drop, [block])
    gone.atexit = False
    return root.view(kind).reshape(sizes)


def _drop(block: list[Any]) -> None:
    """The last view is gone: so is the allocation, with its last owner."""
    block.clear()


def prefetch(stream: CudaStream, buffer: Buffer, to: str, batch: int = NONE) -> int:
    """See :meth:`Stream.prefetch`."""
    device = stream.device
    device.check_open()
    kind = checks.prefetch(device, buffer, to)
    where = HOST if kind == D2H else device.native.id
    op, queued = device.begin_call()
    device.runtime.memPrefetchAsync(buffer.address, buffer.nbytes, where, stream.ptr)
    device.end_call("prefetch", stream, op, queued, batch)
    return op
