"""What ops cost, ready to be asked for again and again.

A profile's tables are interpolated, and programs ask for the same few sizes all the time: each is
looked up once, for all devices that go by the same physics.
"""

from __future__ import annotations

from heterolab.device.base import Work
from heterolab.device.profile import Compute, DeviceProfile, Gaps, KernelCost, Table
from heterolab.trace.trace import D2H, H2D, KERNEL


class Prices:
    """The prices of one profile.

    Attributes
    ----------
    copies
        Kind of copy → bytes → ns of it alone, pinned.
    staged, drained
        Bytes → ns for which a pageable copy holds the host, in and out; None where it holds nobody.
    pauses
        The shortest pauses between ops.
    """

    def __init__(self, profile: DeviceProfile) -> None:
        copies, pageable = profile.copies, profile.pageable
        self.copies = {H2D: Looked(copies.h2d), D2H: Looked(copies.d2h), KERNEL: Looked(copies.inside)}
        self.staged = Looked(pageable.h2d) if pageable and pageable.h2d else None
        self.drained = Looked(pageable.d2h) if pageable else None
        self.pauses = Pauses(profile.gaps)
        self._costs = profile.kernels
        self._kernels: dict[str, Price | None] = {}  # as they come

    def kernel(self, name: str) -> Price | None:
        """What the profile knows of a kernel by its name."""
        try:
            return self._kernels[name]
        except KeyError:
            cost = self._costs.get(name)
            price = self._kernels[name] = None if cost is None else Price(cost)
            return price


class Looked(dict[float, float]):
    """A table's costs by size, each looked up once: programs ask for the same few sizes."""

    MOST = 4096

    def __init__(self, table: Table) -> None:
        self._table = table

    def __missing__(self, size: float) -> float:
        if len(self) >= self.MOST:
            self.clear()
        cost = self[size] = self._table.at(size)
        return cost


class Price:
    """What a profile knows of a kernel by its name."""

    __slots__ = ("cold_host_ns", "host", "time")

    def __init__(self, cost: KernelCost) -> None:
        self.time = Looked(cost.time)
        self.host = None if cost.host is None else Looked(cost.host)
        self.cold_host_ns = cost.cold_host_ns


class Pauses:
    """The shortest pauses between ops, in whole ns: ``pauses.within[first.kind][then.kind]``
    in a stream, `legacy` likewise at the legacy default stream's barrier, `event` through one."""

    def __init__(self, gaps: Gaps) -> None:
        between = {
            KERNEL: {KERNEL: gaps.kernel_kernel_ns, H2D: gaps.kernel_copy_ns, D2H: gaps.kernel_copy_ns},
            H2D: {KERNEL: gaps.copy_kernel_ns, H2D: gaps.copy_copy_ns, D2H: gaps.turn_ns},
            D2H: {KERNEL: gaps.copy_kernel_ns, H2D: gaps.turn_ns, D2H: gaps.copy_copy_ns},
        }
        self.within = _whole(between, 0.0)
        self.legacy = _whole(between, gaps.legacy_ns)
        self.event = round(gaps.event_ns)


def _whole(between: dict[str, dict[str, float]], more_ns: float) -> dict[str, dict[str, int]]:
    return {a: {b: round(ns + more_ns) for b, ns in behind.items()} for a, behind in between.items()}


def roofline_ns(work: Work, compute: Compute, flops_per_ns: float) -> float:
    """The time of a kernel (of all its launches) that the profile does not know by name."""
    arithmetic = work.flops / flops_per_ns if work.flops else 0.0
    memory = compute.memory.at(work.bytes) if work.bytes else 0.0
    return work.launches * compute.fixed_ns + max(arithmetic, memory)
