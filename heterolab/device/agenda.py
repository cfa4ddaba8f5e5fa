"""What will happen on a virtual clock, in order of time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any, Protocol

#: At one moment, what ends goes before what begins.
END, BEGIN = 0, 1


class Ending(Protocol):
    """What one can play up to: an op of a device."""

    done: bool


class Clock(Protocol):
    """Whose clock goes along: the host's."""

    now_ns: int


class Agenda:
    """What will happen: a heap of (time, priority, number, action, its arguments)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._playing = False
        #: The moment of the action that was played last.
        self.now = 0

    def at(self, time_ns: int, priority: int, action: Callable[..., None], *args: Any) -> None:
        """Have ``action(*args)`` called at `time_ns`."""
        heappush(self._heap, (time_ns, priority, next(self._numbers), action, args))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def next_ns(self) -> int:
        """When the next action is due. Only if there is one."""
        return self._heap[0][0]

    def play_one(self) -> None:
        """Go to the next action and do it."""
        self.now, _, _, action, args = heappop(self._heap)
        self._playing, playing = True, self._playing
        try:
            action(*args)
        finally:
            self._playing = playing

    def play_until(self, time_ns: int) -> None:
        """Do all that is due by `time_ns`. (An action that looks at the clock starts no second play.)"""
        heap = self._heap
        if self._playing or not heap or heap[0][0] > time_ns:
            return
        self._playing = True
        try:
            while heap and heap[0][0] <= time_ns:
                self.now, _, _, action, args = heappop(heap)
                action(*args)
        finally:
            self._playing = False

    def play_till(self, op: Ending, clock: Clock) -> bool:
        """Go on until `op` has ended, and the clock with it; False if that never comes."""
        heap = self._heap
        self._playing, playing = True, self._playing
        try:
            while heap and not op.done:
                self.now, _, _, action, args = heappop(heap)
                action(*args)
                if self.now > clock.now_ns:
                    clock.now_ns = self.now
        finally:
            self._playing = playing
        return op.done
