"""Checks: each states its invariants in words, and says what is wrong in the student's own numbers.

A check is a generator of :class:`Found`, one an invariant, in the order: structure, correctness,
speed. The first that does not hold ends it. A check never raises for what a student wrote: an
error in the student's function becomes a verdict that names the student's own line.
"""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from heterolab.device import open_device
from heterolab.device.base import Device
from heterolab.errors import HeteroLabError, InputError
from heterolab.lab.messages import text
from heterolab.view.words import error_in_words

State = Literal["pass", "fail", "inconclusive"]
_MARKS = {"pass": "✓", "fail": "✗", "inconclusive": "?"}
_WIDTH = 100
#: Two times of the same work may differ by this factor on a machine that others use as well.
NOISE = 1.15


@dataclass(frozen=True)
class Found:
    """One invariant, and whether it holds. `problem` is empty where it does."""

    invariant: str
    problem: str = ""
    state: State = "pass"


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes
    ----------
    name
        The exercise.
    state
        ``pass``, ``fail``, or ``inconclusive`` (a ratio inside the noise of a real machine).
    found
        The invariants looked at, in order; the last one is the one that failed, if any.
    """

    name: str
    state: State
    found: tuple[Found, ...]

    @property
    def passed(self) -> bool:
        return self.state == "pass"

    @property
    def problem(self) -> str:
        """What is wrong and where to look; empty when nothing is."""
        return next((found.problem for found in reversed(self.found) if found.problem), "")

    def __bool__(self) -> bool:
        return self.passed

    def __repr__(self) -> str:
        lines = [f"{_MARKS[self.state]} {text('check.' + self.state)} · {self.name}"]
        once = {found.invariant: found for found in self.found}  # of repeated ones the last, the worst
        for found in once.values():
            lines.append(f"  {_MARKS[found.state]} {found.invariant}")
            if found.problem:
                lines += textwrap.wrap(found.problem, _WIDTH, initial_indent="    ", subsequent_indent="    ")
        return "\n".join(lines)


class Stopped(Exception):
    """The student's function raised; the message says what and on which of its lines."""


def attempt(function: Any, *args: Any) -> Any:
    """``function(*args)`` of a student; what it raises becomes :class:`Stopped`."""
    needs_function(function)
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise Stopped(_raised(error)) from error


def needs_function(value: Any) -> None:
    """Stop where a student gave something else than a function."""
    if not callable(value):
        raise Stopped(text("check.not_callable", value=_short(value)))


def _raised(error: BaseException) -> str:
    return text("check.raised", error=error_in_words(error), line=student_line(error))


def student_line(error: BaseException) -> str:
    """The innermost line of the traceback that is not in this package or a library."""
    package = str(Path(__file__).parents[1])
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(package) and "site-packages" not in f.filename]
    if not theirs:
        return text("check.call_line")
    return text("check.line", number=theirs[-1].lineno, code=(theirs[-1].line or "").strip())


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "…"


def holds(key: str, problem: str = "", **values: Any) -> Found:
    """The invariant with that message key holds, unless a problem's key is given."""
    if not problem:
        return Found(text(key))
    return Found(text(key), text(problem, **values), "fail")


def ratio(
    key: str,
    value: float,
    low: float,
    high: float,
    *,
    below: str,
    above: str,
    source: str = "simulated",
    reference: Callable[[], float] | None = None,
    **values: Any,
) -> Found:
    """`value` lies in [low, high]; both bounds count, since too good means that work was skipped.

    On a real GPU (`source`: where the times come from) a value up to 15 % outside is
    inconclusive: noise. So is any on a CPU that plays the device, whose lanes share its cores.
    And so is one on a machine where the course's own solution lies outside as well: `reference`
    gives its value, and is asked only then. Who is clearly worse than that has failed.
    """
    if low <= value <= high:
        return Found(text(key))
    shown = {"value": f"{value:.2f}", "low": f"{low:.2f}", "high": f"{high:.2f}"}
    problem = text(below if value < low else above, **shown, **values)
    if source == "cpu-clock":
        return Found(text(key), f"{problem} {text('check.cpu')}", "inconclusive")
    if reference is not None:
        own = reference()
        outside = own > high if value > high else own < low
        if outside and own / NOISE <= value <= own * NOISE:
            told = text("check.machine", own=f"{own:.2f}")
            return Found(text(key), f"{problem} {told}", "inconclusive")
    if source != "simulated" and low / NOISE <= value <= high * NOISE:
        return Found(text(key), f"{problem} {text('check.noise')}", "inconclusive")
    return Found(text(key), problem, "fail")


Check = Callable[..., Iterator[Found]]

#: Exercise → module and function. Modules are imported when their check is asked for.
_HOME = {
    "03-1": ("heterolab.lab.checks_03", "chunked_job"),
    "03-2": ("heterolab.lab.checks_03", "repairs"),
    "03-3": ("heterolab.lab.checks_03", "whole_sum"),
    "05-1": ("heterolab.lab.checks_05", "idle_hook"),
    "05-2": ("heterolab.lab.checks_05", "two_changes"),
}


def check(name: str, *answer: Any, on: Device | None = None) -> Verdict:
    """Check the answer to an exercise.

    Parameters
    ----------
    name
        The exercise, e.g. ``"03-1"``.
    *answer
        What the exercise asks for: a function, or values.
    on
        The device to run it on; by default a fresh one, chosen as ``open_device()`` does.

    Returns
    -------
    Verdict
        Never an exception for what the student wrote.

    Raises
    ------
    InputError
        There is no exercise of that name.
    """
    if name not in _HOME:
        raise InputError(f"check({name!r}): there is no such exercise. There are: {', '.join(_HOME)}.")
    module, function = _HOME[name]
    checking: Check = getattr(import_module(module), function)
    dev = on or open_device()

    def looking() -> Iterator[Found]:
        if len(answer) != 1:
            raise Stopped(text("check.one_answer", name=name, count=len(answer)))
        attempt(dev.synchronize)  # what an earlier cell left on the device comes out here
        yield from checking(dev, *answer)

    return examine(text("exercise", name=name), looking())


def examine(name: str, checking: Iterator[Found]) -> Verdict:
    """Run through the invariants up to the first that does not hold."""
    found: list[Found] = []
    try:
        for one in checking:
            found.append(one)
            if one.state == "fail":
                break
    except Stopped as stopped:
        found.append(Found(text("check.runs"), str(stopped), "fail"))
    except HeteroLabError as error:  # e.g. the student closed the device that the check goes on with
        found.append(Found(text("check.runs"), _raised(error), "fail"))
    states = [one.state for one in found]
    state: State = "fail" if "fail" in states else "inconclusive" if "inconclusive" in states else "pass"
    if not found:
        raise InputError(f"{name}: this check looks at nothing.")
    return Verdict(name, state, tuple(found))
