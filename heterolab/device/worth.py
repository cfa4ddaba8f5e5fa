"""What each effect of the simulator's physics is worth: the error that leaving it out makes.

Measured stream programs are predicted with all effects, and again without each one. An effect
that matters for a family of programs shows there, and not elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heterolab.device.physics import EFFECTS, known
from heterolab.device.profile import DeviceProfile
from heterolab.device.programs import Program, load_programs
from heterolab.device.replay import Player

ALL = "all effects"


@dataclass(frozen=True)
class Worth:
    """|predicted − measured| / measured of each program's makespan, without one effect.

    `errors` in the programs' order; `families` says of what kind each is.
    """

    without: str
    errors: tuple[float, ...]
    families: tuple[str, ...]

    @property
    def median(self) -> float:
        return float(np.median(self.errors))

    @property
    def mean(self) -> float:
        return float(np.mean(self.errors))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.errors, 0.9))

    def by_family(self) -> dict[str, float]:
        """The median error of each family of programs."""
        families = np.array(self.families)
        errors = np.array(self.errors)
        return {family: float(np.median(errors[families == family])) for family in sorted(set(families))}


def worth(
    programs: Sequence[Program],
    profile: DeviceProfile | None = None,
    effects: Iterable[str] | None = None,
) -> list[Worth]:
    """Predict the programs with all effects, and without each one.

    Parameters
    ----------
    profile
        The machine's profile; by default the built-in one of the H200.
    effects
        Which effects to leave out, one at a time; by default each of :data:`physics.EFFECTS`.

    Returns
    -------
    list of Worth
        The first has all effects (``without == "all effects"``).

    Raises
    ------
    InputError
        There is no such effect.
    """
    profile = profile or DeviceProfile.load("h200")
    names = [known(name) for name in (EFFECTS if effects is None else effects)]
    families = tuple(program.family for program in programs)
    found = []
    for name in (ALL, *names):
        player = Player(profile, () if name == ALL else (name,))
        errors = (abs(player.wall_us(p) - p.measured_us) / p.measured_us for p in programs)
        found.append(Worth(name, tuple(errors), families))
    return found


def main(path: str | Path, as_json: bool = False) -> str:
    """What ``heterolab bench effects FILE`` prints: a table, or JSON."""
    table = worth(load_programs(path))
    return json.dumps(as_dict(table), indent=1) if as_json else "\n".join(lines(table))


def as_dict(table: Sequence[Worth]) -> dict[str, Any]:
    """The table, ready for JSON."""
    return {
        w.without: {
            "what": EFFECTS[w.without].what if w.without in EFFECTS else "",
            "error": {"median": w.median, "mean": w.mean, "p90": w.p90},
            "median_error_by_family": w.by_family(),
        }
        for w in table
    }


def lines(table: Sequence[Worth]) -> Iterator[str]:
    """The table as text, the effect that matters most first."""
    whole, *others = table
    yield f"{'makespan error without':26} {'median':>7} {'mean':>7} {'p90':>7}   most changed family"
    for w in (whole, *sorted(others, key=lambda w: -w.mean)):
        before, after = whole.by_family(), w.by_family()
        family = max(after, key=lambda name: after[name] - before[name])
        most = f"{family} {before[family]:.1%} → {after[family]:.1%}" if after != before else ""
        yield f"{w.without:26} {w.median:7.1%} {w.mean:7.1%} {w.p90:7.1%}   {most}".rstrip()
