"""Failed ops, and who has been told: the rule that simulated and CPU devices share.

A kernel fails long after its launch has returned, so its error waits until the host asks. It
is told once: by the first event behind it that is asked, or by a synchronize, and forgotten
then. Only a mark recorded *earlier* than the teller still tells it, for the mark stands for
that very work: a batch that failed must not look well because somebody synchronized first.
"""

from __future__ import annotations

from collections.abc import Iterable


class Failure:
    """An op's error. `told` is the op number of the event or synchronize that has told it."""

    __slots__ = ("error", "told")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.told: int | None = None


def untold(failures: Iterable[Failure]) -> list[Failure]:
    """Those nobody was told of: what a stream goes on remembering."""
    return [failure for failure in failures if failure.told is None]


def tell(failures: Iterable[Failure], number: int) -> None:
    """Raise the first of `failures` that the event or synchronize `number` has to tell."""
    mine = [f for f in dict.fromkeys(failures) if f.told is None or number <= f.told]
    for failure in mine:
        failure.told = number
    if mine:
        raise mine[0].error
