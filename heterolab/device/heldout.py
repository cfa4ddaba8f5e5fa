"""What a fit says about programs that it has not seen: the third that was held out.

The programs are dealt into thirds (:func:`~heterolab.device.fit.parts`); a split is (deal, part):
the part that is held out. The three parts of one deal hold each program out once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heterolab.device import datasheet
from heterolab.device.fit import PARTS, fit, parts
from heterolab.device.neutral import Json
from heterolab.device.profile import BUILT_IN, DeviceProfile
from heterolab.device.programs import Program, load_programs
from heterolab.device.score import Report, score
from heterolab.errors import InputError

#: The split whose fit is the built-in profile of the H200: of the three parts of deal 0 the one on
#: which every bound holds. That choice looked at the reports; the figures over all three parts,
#: each program held out once, did not choose anything.
SHIPPED = (0, 1)

#: What has to hold on programs that the fit has not seen: (name, bound, whether less is better).
BOUNDS = (
    ("makespan error, median", 0.04, True),
    ("makespan error, p90", 0.18, True),
    ("makespan inside the measured band", 0.78, False),
    ("makespan error, worst family's median", 0.10, True),
    ("with recorded host calls, median", 0.015, True),
    ("with recorded host calls, p90", 0.08, True),
    ("span durations, median", 0.02, True),
    ("start order across streams", 0.92, False),
)


@dataclass(frozen=True)
class Check:
    """One figure of a report beside its bound."""

    name: str
    value: float
    bound: float
    less: bool

    @property
    def holds(self) -> bool:
        return self.value <= self.bound if self.less else self.value >= self.bound


def checks(report: Report) -> list[Check]:
    """The figures of `report` that have a bound, in the order of :data:`BOUNDS`."""
    figures, durations = report.figures(), report.durations()
    error, recorded = figures["error"], figures["error_with_recorded_host"]
    values = (
        error["median"],
        error["p90"],
        figures["inside"],
        max(report.figures(family)["error"]["median"] for family in report.families),
        recorded["median"],
        recorded["p90"],
        durations["all"]["median"],
        report.start_order or 0.0,
    )
    return [
        Check(name, value, bound, less) for (name, bound, less), value in zip(BOUNDS, values, strict=True)
    ]


def split(programs: Sequence[Program], deal: int, part: int) -> tuple[list[Program], list[Program]]:
    """Programs to fit on, and those of part `part`, held out."""
    dealt = parts(programs, deal)
    return [p for other in range(PARTS) if other != part for p in dealt[other]], dealt[part]


def held_out(programs: Sequence[Program], base: Json, deal: int, part: int) -> tuple[Json, Report]:
    """The profile fitted on two thirds, and its score on the third one."""
    fitted_on, held = split(programs, deal, part)
    data = fit(fitted_on, base)
    return data, score(held, DeviceProfile.from_json(data))


def pooled(reports: Sequence[Report]) -> Report:
    """Several reports as one: of the parts of one deal, each program held out once."""
    speeds = [report.ops_per_s for report in reports]
    return Report(
        [p for report in reports for p in report.programs],
        [s for report in reports for s in report.spans],
        sum(speeds) / len(speeds),
    )


def experiment(path: str | Path, base: str, splits: int, part: int = SHIPPED[1]) -> tuple[Json, Json]:
    """Fit on two thirds and report on the other: the fitted profile, and all figures as JSON.

    Parameters
    ----------
    base
        Name or JSON file of the profile whose sections other than the physics stay.
    splits
        How many splits to report on. The first is `part` of deal 0; its other two parts come
        next, then those of deal 1, 2, …
    """
    path = Path(path)
    programs = load_programs(path)
    if not 0 <= part < PARTS:
        raise InputError(f"part={part}: the programs are dealt into parts 0 to {PARTS - 1}.")
    if len(programs) < 2 * PARTS or any(program.traced is None for program in programs):
        raise InputError(
            f"{path.name}: a fit needs at least {2 * PARTS} programs, each with a traced run "
            f"(measured.traced); there are {len(programs)}."
        )
    source = BUILT_IN / f"{base}.json" if base.isidentifier() else Path(base)
    DeviceProfile.load(base)  # says what is wrong with it
    data: Json = json.loads(source.read_text(encoding="utf-8"))
    order = [(0, part), *((0, other) for other in range(PARTS) if other != part)]
    order += [(deal, other) for deal in range(1, splits) for other in range(PARTS)]
    done = [(deal, other, *held_out(programs, data, deal, other)) for deal, other in order[: max(splits, 1)]]
    result = {
        "programs": len(programs),
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "splits": [
            {"deal": deal, "part": other, "ids": [p.id for p in report.programs], **_figures(report)}
            for deal, other, _, report in done
        ],
    }
    if len(done) >= PARTS:
        result["each_program_held_out_once"] = _figures(pooled([report for *_, report in done[:PARTS]]))
    return done[0][2], result


def _figures(report: Report) -> Json:
    return {
        "bounds": [
            {"name": c.name, "value": round(c.value, 4), "bound": c.bound, "holds": c.holds}
            for c in checks(report)
        ],
        "family_medians": {
            family: round(report.figures(family)["error"]["median"], 4) for family in report.families
        },
    }


def main(
    path: str | Path, base: str = "h200", out: str | Path = "", splits: int = 1, as_json: bool = False
) -> str:
    """What ``heterolab bench fit FILE`` prints; `out` gets the profile of the first split."""
    data, result = experiment(path, base, splits)
    if out:
        Path(out).write_text(datasheet.dumps(data), encoding="utf-8")
    return json.dumps(result, indent=1) if as_json else "\n".join(_table(result))


def _table(result: Json) -> Iterator[str]:
    splits: list[dict[str, Any]] = result["splits"]
    first = splits[0]
    held, rest = len(first["ids"]), result["programs"] - len(first["ids"])
    yield f"Fitted on {rest} programs; figures on the {held} held out, of which the fit saw nothing."
    yield from _rows(first["bounds"])
    if more := result.get("each_program_held_out_once"):
        yield f"\nThree fits, each program held out once ({result['programs']}):"
        yield from _rows(more["bounds"])
    if len(splits) > 1:
        yield f"\n{len(splits)} splits, lowest and highest held-out figure:"
        for i, bound in enumerate(first["bounds"]):
            values = [s["bounds"][i]["value"] for s in splits]
            missed = sum(not s["bounds"][i]["holds"] for s in splits)
            note = f"   missed in {missed}" if missed else ""
            yield f"{bound['name']:40} {min(values):7.1%} to {max(values):6.1%}{note}"
    yield f"\nHeld out: {', '.join(first['ids'])}"


def _rows(bounds: Sequence[dict[str, Any]]) -> Iterator[str]:
    less = {name: sign for name, _, sign in BOUNDS}
    for b in bounds:
        sign, said = "≤" if less[b["name"]] else "≥", "" if b["holds"] else "   missed"
        yield f"{b['name']:40} {b['value']:7.1%}   {sign} {b['bound']:.1%}{said}"
