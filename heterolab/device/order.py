"""Happens-before: who may touch which bytes, and when.

A race is found by *order*, not by luck. Every stream and the host is an actor with a vector
clock; events, waits and synchronisations pass clocks on. When an operation is enqueued, each
earlier access to the same bytes must be in its past; if it is not, the two may run in either
order on some machine on some day, whatever happened this time.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from heterolab.errors import InputError, RaceError

if TYPE_CHECKING:
    from heterolab.device.base import Buffer

#: Actors: the host, the legacy default stream, and streams 0, 1, …
HOST, DEFAULT = -10, -1

#: Where HeteroLab's own code lies.
PACKAGE = str(Path(__file__).parents[1]) + os.sep

Races = Literal["raise", "show", "off"]
Clock = dict[int, int]


class RaceWarning(UserWarning):
    """A race that was let through because ``races="show"``."""


class Access:
    """One operation's touch of a byte range: who, at which tick of its clock, and how."""

    __slots__ = ("actor", "end", "start", "tick", "what", "writes")

    def __init__(self, actor: int, tick: int, start: int, end: int, writes: bool, what: str) -> None:
        self.actor, self.tick, self.start, self.end = actor, tick, start, end
        self.writes, self.what = writes, what

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end

    def within(self, start: int, end: int) -> bool:
        return start <= self.start and self.end <= end


class Order:
    """Vector clocks for one device's streams and its host.

    Parameters
    ----------
    races
        ``"raise"`` raises :class:`RaceError`; ``"show"`` warns, keeps the report in
        :attr:`found` and lets the wrong values through; ``"off"`` is not to be built at all.
    """

    def __init__(self, races: Races = "raise") -> None:
        if races not in ("raise", "show"):
            raise InputError(f'races={races!r} is not known. Use "raise", "show" or "off".')
        self.races = races
        self.found: list[str] = []
        self._clocks: dict[int, Clock] = {HOST: {HOST: 0}, DEFAULT: {DEFAULT: 0}}
        self._blocking: set[int] = set()
        self._accesses: dict[int, list[Access]] = {}

    # -- who waits for whom ------------------------------------------------------------

    def add_stream(self, stream: int, blocking: bool) -> None:
        self._clocks[stream] = {stream: 0}
        if blocking:
            self._blocking.add(stream)

    def record(self, stream: int) -> Clock:
        """The past of an event recorded on `stream` now."""
        self._legacy_barrier(stream)
        self._join(stream, self._clocks[HOST])
        return dict(self._clocks[stream])

    def wait(self, stream: int, event: Clock) -> None:
        """`stream` goes on only after what `event` has captured."""
        self._join(stream, event)

    def host_saw(self, event: Clock) -> None:
        """The host knows that `event` is done."""
        self._join(HOST, event)

    def host_synchronized(self, streams: Iterable[int]) -> None:
        """The host waited until `streams` were idle."""
        for stream in streams:
            self._join(HOST, self._clocks[stream])

    def _join(self, actor: int, past: Clock) -> None:
        mine = self._clocks[actor]
        for other, tick in past.items():
            if tick > mine.get(other, -1):
                mine[other] = tick

    def _legacy_barrier(self, stream: int) -> None:
        """The legacy default stream waits for all blocking streams, and they for it."""
        if stream == DEFAULT:
            for other in self._blocking:
                self._join(DEFAULT, self._clocks[other])
        elif stream in self._blocking:
            self._join(stream, self._clocks[DEFAULT])

    # -- who touches what --------------------------------------------------------------

    def device_op(
        self, stream: int, what: str, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()
    ) -> None:
        """An op is enqueued on `stream`: check each of its accesses, then remember them."""
        self._legacy_barrier(stream)
        self._join(stream, self._clocks[HOST])
        self._touch(stream, f"{what} on {_actor(stream)}", reads, writes)

    def host_op(self, what: str, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = ()) -> None:
        """The host touches bytes itself, now."""
        self._touch(HOST, f"{what} by the host", reads, writes)

    def _touch(self, actor: int, what: str, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> None:
        clock = self._clocks[actor]
        tick = clock[actor] + 1
        touched: dict[int, list[Access]] = {}  # stored at the end: a refused op has touched nothing
        for buffers, writing in ((reads, False), (writes, True)):
            for buffer in buffers:
                start, end = buffer.offset, buffer.offset + buffer.nbytes
                new = Access(actor, tick, start, end, writing, what)
                kept = [new]
                known = touched if buffer.storage in touched else self._accesses
                for old in known.get(buffer.storage, ()):
                    past = old.actor == actor or old.tick <= clock.get(old.actor, -1)
                    if past:
                        # What lies wholly in the past of a newer access that covers it can race
                        # with nothing that does not race with the newer one too.
                        replaced = writing or (old.actor == actor and not old.writes)
                        if replaced and old.within(start, end):
                            continue
                    elif (old.writes or writing) and old.overlaps(start, end):
                        self._report(old, new, buffer)
                    kept.append(old)
                touched[buffer.storage] = kept
        clock[actor] = tick
        self._accesses.update(touched)

    def _report(self, old: Access, new: Access, buffer: Buffer) -> None:
        verb = {True: "writes", False: "reads"}
        if new.actor == HOST:
            remedy = (
                f"Let the host wait first: record an event on {_actor(old.actor)} behind it and wait "
                f"for that event, or call synchronize()."
            )
        elif old.actor == HOST:
            remedy = "Touch the buffer before the operation is enqueued, or after it is done."
        else:
            remedy = (
                f"The missing event: done = {_actor(old.actor)}.record() behind the first, then "
                f"{_actor(new.actor)}.wait(done) before the second."
            )
        message = (
            f"Race on {buffer!r}: {new.what} {verb[new.writes]} bytes that {old.what} "
            f"{verb[old.writes]}, and nothing orders the two. {remedy}"
        )
        if self.races == "raise":
            raise RaceError(message)
        self.found.append(message)
        warnings.warn(message, RaceWarning, stacklevel=_users_level())

    def forget(self, storage: int) -> None:
        """The allocation is gone."""
        self._accesses.pop(storage, None)


def _users_level() -> int:
    """The `stacklevel` with which our caller's warning points at the first line outside HeteroLab."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(PACKAGE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def _actor(actor: int) -> str:
    if actor == HOST:
        return "host"
    return "default_stream" if actor == DEFAULT else f"stream {actor}"
