"""One copy or kernel of a simulated device: what it waits for, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterolab.device.base import Work
from heterolab.device.failures import Failure
from heterolab.device.profile import Compute, Gaps
from heterolab.trace.trace import KERNEL, NONE


class Op:
    """One copy or kernel on its way through the device.

    It is *ready* once the host has submitted it, and everything it depends on has ended and
    the gap behind that has passed. Then its engine starts it when there is room.
    """

    __slots__ = (
        "after",
        "batch",
        "blocks",
        "dependents",
        "done",
        "effect",
        "end_ns",
        "failures",
        "kind",
        "launched_ns",
        "launches",
        "name",
        "nbytes",
        "not_before_ns",
        "number",
        "on_link",
        "per_block",
        "queued_ns",
        "ready",
        "ready_ns",
        "start_ns",
        "stream",
        "threads",
        "unmet",
        "work_ns",
    )

    def __init__(self, number: int, kind: str, name: str, stream: int, nbytes: int, batch: int) -> None:
        self.number, self.kind, self.name = number, kind, name
        self.stream, self.nbytes, self.batch = stream, nbytes, batch
        self.queued_ns = self.start_ns = self.end_ns = 0
        self.work_ns = 0.0  # how long it takes on an idle device ...
        self.per_block = False  # ... or each of its blocks
        self.blocks, self.threads = 0, 256
        self.on_link = False  # a kernel that is held up by its reads of host memory
        self.launches, self.launched_ns = 1, 0.0  # kernels behind it, and their work in all
        self.not_before_ns = 0  # it cannot end before: the host is still feeding it
        self.ready_ns, self.after = 0, NONE  # when it may start, and the op that decided that
        self.unmet = 0  # how many of those it waits for have not ended
        self.dependents: list[tuple[Op, float]] = []
        self.ready = self.done = False
        self.effect: Callable[[], None] | None = None
        self.failures: Sequence[Failure] = ()  # of its stream, untold when it ended

    def needs(self, other: Op, gap_ns: float) -> None:
        """Start only `gap_ns` after `other` has ended."""
        if other.done:
            self.met(other, gap_ns)
        else:
            self.unmet += 1
            other.dependents.append((self, gap_ns))

    def met(self, other: Op, gap_ns: float) -> None:
        """`other` has ended: that may be what this op had to wait for."""
        at = other.end_ns + round(gap_ns)
        if at > self.ready_ns:
            self.ready_ns, self.after = at, other.number


def gap_between(gaps: Gaps, first: Op, then: Op) -> float:
    """The shortest pause between two ops of one stream."""
    if first.kind == KERNEL:
        return gaps.kernel_kernel_ns if then.kind == KERNEL else gaps.kernel_copy_ns
    if then.kind == KERNEL:
        return gaps.copy_kernel_ns
    return gaps.copy_copy_ns if first.kind == then.kind else gaps.turn_ns


def roofline_ns(work: Work, compute: Compute, flops_per_ns: float) -> float:
    """The time of a kernel (of all its launches) that the profile does not know by name."""
    arithmetic = work.flops / flops_per_ns if work.flops else 0.0
    memory = compute.memory.at(work.bytes) if work.bytes else 0.0
    return work.launches * compute.fixed_ns + max(arithmetic, memory)
