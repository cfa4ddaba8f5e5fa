"""One copy or kernel of a simulated device: what it waits for, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from heterolab.device.base import Work
from heterolab.device.failures import Failure
from heterolab.device.profile import Compute, Gaps, KernelCost, Table
from heterolab.trace.trace import D2H, H2D, KERNEL, NONE


class Op:
    """One copy or kernel on its way through the device.

    It is *ready* once the host has submitted it, and everything it depends on has ended and
    the gap behind that has passed. Then its engine starts it when there is room.
    """

    __slots__ = (
        "after",
        "batch",
        "blocks",
        "done",
        "effect",
        "end_ns",
        "failures",
        "faults",
        "kind",
        "launched_ns",
        "launches",
        "name",
        "nbytes",
        "not_before_ns",
        "number",
        "on_link",
        "others",
        "per_block",
        "queued_ns",
        "ready",
        "ready_ns",
        "start_ns",
        "stream",
        "then",
        "then_gap_ns",
        "threads",
        "unmet",
        "work_ns",
    )

    def __init__(self, number: int, kind: str, name: str, stream: int, nbytes: int, batch: int) -> None:
        self.number, self.kind, self.name = number, kind, name
        self.stream, self.nbytes, self.batch = stream, nbytes, batch
        self.queued_ns = self.ready_ns = self.end_ns = 0  # issued; may start; ended
        self.start_ns = self.after = NONE  # not yet; and the op that decided when
        self.work_ns = self.launched_ns = 0.0  # how long it takes on an idle device (or each block)
        self.blocks, self.threads = 0, 256
        self.launches = 1  # kernels behind it, whose work in all is `launched_ns`
        self.not_before_ns = 0  # it cannot end before: the host is still feeding it
        self.unmet = self.then_gap_ns = 0  # how many of those it waits for have not ended
        # Who waits for it, and the gap behind it: as a rule the next op of its stream, rarely others.
        self.then: Op | None = None
        self.others: list[tuple[Op, int]] | None = None
        # `per_block`: work_ns is that of a block; `on_link`: held up by its reads of host memory
        self.ready = self.done = self.per_block = self.on_link = False
        self.effect: Callable[[], None] | None = None
        #: Asked when it is ready: how long it waits for pages, or a prefetch moves them.
        self.faults: Callable[[], float] | None = None
        self.failures: Sequence[Failure] = ()  # of its stream, untold when it ended

    def needs(self, other: Op, gap_ns: int) -> None:
        """Start only `gap_ns` after `other` has ended."""
        if other.done:
            at = other.end_ns + gap_ns
            if at > self.ready_ns:
                self.ready_ns, self.after = at, other.number
            return
        self.unmet += 1
        if other.then is None:
            other.then, other.then_gap_ns = self, gap_ns
        elif other.others is None:
            other.others = [(self, gap_ns)]
        else:
            other.others.append((self, gap_ns))


@lru_cache
def pauses_of(gaps: Gaps) -> Pauses:
    """A profile's gaps, ready to be used; made once for all devices of that profile."""
    return Pauses(gaps)


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


def roofline_ns(work: Work, compute: Compute, flops_per_ns: float) -> float:
    """The time of a kernel (of all its launches) that the profile does not know by name."""
    arithmetic = work.flops / flops_per_ns if work.flops else 0.0
    memory = compute.memory.at(work.bytes) if work.bytes else 0.0
    return work.launches * compute.fixed_ns + max(arithmetic, memory)
