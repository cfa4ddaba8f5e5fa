"""One copy or kernel of a simulated device: what it waits for, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heterolab.device.failures import Failure
from heterolab.trace.trace import NONE


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
