"""Managed (unified) memory on a simulated device: where each page is, and what moving it costs.

A managed buffer has one address, and its pages move to where they are touched. A kernel that
touches a page in host memory *faults*: it waits for the driver to notice, and for the page. The
driver answers faults by the *group* of neighbouring pages. A prefetch moves pages ahead, without
faults. When the host touches pages that are on the device, they come back, and the host waits.

What one op touches is known only when it runs, so each is asked then: see :attr:`Op.faults`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from heterolab.device.base import Buffer
from heterolab.device.profile import Managed


class ManagedMemory:
    """The managed allocations of one device. All pages begin in host memory."""

    def __init__(self, costs: Managed) -> None:
        self.costs = costs
        #: Allocation → its bytes, and whether each group of pages is on the device.
        self._allocations: dict[int, tuple[int, NDArray[np.bool_]]] = {}

    def add(self, storage: int, nbytes: int) -> None:
        """A new allocation."""
        groups = -(-nbytes // self.costs.group_bytes)
        self._allocations[storage] = nbytes, np.zeros(groups, np.bool_)

    def forget(self, storage: int) -> None:
        """The allocation is gone."""
        self._allocations.pop(storage, None)

    def touched_by_kernel_ns(self, buffers: Iterable[Buffer]) -> float:
        """A kernel touches `buffers` now: how long it waits for their pages.

        A GPU that cannot fault (``concurrent`` is false) gets all managed memory before each
        kernel, in one go.
        """
        if self.costs.concurrent:
            moved = [self._move(buffer, to_device=True) for buffer in buffers]
            fault_ns = self.costs.fault_ns
        else:
            moved = [self._move_all(storage) for storage in self._allocations]
            fault_ns = 0.0
        return self._ns(sum(groups for groups, _ in moved), sum(n for _, n in moved), fault_ns)

    def touched_by_host_ns(self, buffer: Buffer) -> float:
        """The host touches `buffer` now: how long it is held."""
        costs = self.costs
        fault_ns = costs.fault_ns if costs.host_fault_ns is None else costs.host_fault_ns
        return self._ns(*self._move(buffer, to_device=False), fault_ns)

    def prefetch(self, buffer: Buffer, to_device: bool) -> tuple[int, float]:
        """A prefetch of `buffer` runs now: the bytes that it moves, and how long that takes."""
        groups, nbytes = self._move(buffer, to_device)
        return nbytes, self._ns(groups, nbytes, 0.0)

    def _ns(self, groups: int, nbytes: int, fault_ns: float) -> float:
        return groups * fault_ns + nbytes / self.costs.bytes_per_ns

    def _move(self, buffer: Buffer, to_device: bool) -> tuple[int, int]:
        """Move what is elsewhere; gives how many groups and bytes that was."""
        size = self.costs.group_bytes
        first, last = buffer.offset // size, -(-(buffer.offset + buffer.nbytes) // size)
        return self._move_groups(buffer.storage, slice(first, last), to_device)

    def _move_all(self, storage: int) -> tuple[int, int]:
        return self._move_groups(storage, slice(None), to_device=True)

    def _move_groups(self, storage: int, part: slice, to_device: bool) -> tuple[int, int]:
        total, on_device = self._allocations[storage]
        there = on_device[part]
        groups = int(np.count_nonzero(there != to_device))
        there[:] = to_device
        return groups, min(groups * self.costs.group_bytes, total)
