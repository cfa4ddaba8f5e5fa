"""The parts of a calibration, one after the other: timed, told, and each failing for itself."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

from heterolab.device.calibrate.figures import Json
from heterolab.errors import HeteroLabError

T = TypeVar("T")

#: Told as a part begins: its name, the share of the whole that is done, seconds left (about).
Tell = Callable[[str, float, float], None]
#: About how long each part takes, s; one that is not listed: a second.
SECONDS = {
    "opening the device": 2.0,
    "host calls": 0.3,
    "cold calls": 1.0,
    "pauses between ops": 1.0,
    "both directions at once": 1.0,
    "copy channels": 0.3,
    "pageable copies": 3.0,
    "reads over the link beside copies": 0.3,
    "grids on the processors": 0.5,
    "matrix products, the host's calls": 2.0,
    "allocation": 0.3,
    "CUDA graph": 0.2,
    "managed memory": 0.5,
    "the host's memory": 1.0,
    "copies": 2.0,
    "vector add": 1.0,
    "matrix products": 3.0,
    "the host's work in real runs of the pipeline": 9.0,
    "the interpreter lock": 6.0,
    "host calls, waiting, workers": 9.0,
    "kernels": 9.0,
    "waiting for events: polling against a waiter thread": 2.0,
}


class PartsFailed(HeteroLabError):
    """Parts of a calibration failed; what the others measured is in `measured`."""

    measured: Json


class Parts:
    """Runs parts; a part that fails is noted, and the next one runs.

    Parameters
    ----------
    tell
        Told as each part begins.
    plan
        Names of the parts to come: how far it is until the end.
    """

    def __init__(self, tell: Tell, plan: list[str]) -> None:
        self._tell, self._left = tell, list(plan)
        self._total = sum(SECONDS.get(name, 1.0) for name in plan)
        self._began, self._name = time.perf_counter(), ""
        self.seconds: dict[str, float] = {}
        self.failed: dict[str, str] = {}

    def begin(self, name: str) -> None:
        """The part `name` begins, and the one before it ends."""
        self._end()
        self._name = name
        if name in self._left:
            del self._left[: self._left.index(name)]
        left = sum(SECONDS.get(part, 1.0) for part in self._left)
        self._tell(name, 1 - left / self._total if self._total else 1.0, left)
        if self._left and self._left[0] == name:
            del self._left[0]

    def _end(self) -> None:
        now = time.perf_counter()
        if self._name:
            took = self.seconds.get(self._name, 0.0) + now - self._began
            self.seconds[self._name] = round(took, 2)
        self._began, self._name = now, ""

    def run(self, name: str, measure: Callable[[], T]) -> T | None:
        """`measure`'s result; None if it failed, with why in :attr:`failed`."""
        self.begin(name)
        try:
            return measure()
        except Exception as error:  # whatever it was, it must not take the other parts with it
            self.failed[self._name] = f"{type(error).__name__}: {error}"
            return None

    def finish(self) -> None:
        """The last part has ended."""
        self._end()

    def refuse(self, measured: Json) -> None:
        """Raise if a part failed.

        Raises
        ------
        PartsFailed
            Names the parts and what became of them.
        """
        if not self.failed:
            return
        reasons = "; ".join(f"{name} ({why})" for name, why in self.failed.items())
        error = PartsFailed(
            f"{len(self.failed)} of {len(self.seconds)} parts could not be measured: {reasons}. "
            "--keep-going writes a profile without them where that can be: their sections then come from "
            "--base, and the failures stand in its notes."
        )
        error.measured = measured
        raise error


class Bar:
    """Progress in a terminal: one line that is written over; elsewhere a line a part."""

    WIDTH = 24

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._start = time.monotonic()
        self._live = self._stream.isatty()

    def __call__(self, name: str, share: float, left_s: float) -> None:
        passed = time.monotonic() - self._start
        if not self._live:
            print(f"{passed:5.1f} s  {share:4.0%}  {name}", file=self._stream, flush=True)
            return
        full = round(self.WIDTH * share)
        bar = "█" * full + "░" * (self.WIDTH - full)
        self._stream.write(f"\r\x1b[K{bar} {share:4.0%}  about {left_s:.0f} s left  {name}")
        self._stream.flush()

    def close(self) -> None:
        """End the line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def quiet(name: str, share: float, left_s: float) -> None:
    """Tell nobody."""


def lines(say: Callable[[str], Any]) -> Tell:
    """A teller of names only."""
    return lambda name, share, left_s: say(name)
