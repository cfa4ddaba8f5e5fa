"""How right is the simulator? Replay measured stream programs on it, and compare.

What is compared, of each program:

- its makespan (the wall from the first call to the return of the last) against the median of
  the measured passes, predicted from the profile alone;
- the same with the host's own recorded times fed in, a pass at a time, which judges the device
  model without the host's;
- the same with the CPU left out: calls to the device cost the host nothing. That is what a
  model of the GPU alone would predict;
- how long each copy and kernel takes, and in which order those on different streams start,
  against the traced run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device.host import cpu_time_ns
from heterolab.device.profile import DeviceProfile, Table
from heterolab.device.programs import Program, load_programs
from heterolab.device.replay import Player, Replay

__all__ = ["Prediction", "Report", "load_programs", "main", "score", "without_cpu_costs"]

#: A prediction this far outside the range of the measured passes still counts as inside.
BAND = 0.05
#: Two modes: a gap among a program's walls of this share of their median, and this many times
#: as wide as what lies on either side of it.
MODES_GAP, MODES_FACTOR = 0.03, 1.5
#: The speed is taken over repeated predictions of at least so much CPU time.
SPEED_NS = 500_000_000

ORDER = (
    "share of the pairs of spans on different streams that start in the measured order; left out are "
    "pairs that start closer together than the passes disagree about the distance of their calls"
)
WITHOUT_CPU = (
    "calls to the device cost the host nothing (launch, copy, record, wait, synchronise, and the time "
    "between calls); the program's own host work and the staging of pageable copies stay"
)


@dataclass(frozen=True)
class Spans:
    """A program's copies and kernels against the traced run: kind → relative errors of their
    durations, and how many pairs of them start in the measured order, of how many."""

    durations: dict[str, list[float]]
    in_order: int
    pairs: int


@dataclass(frozen=True)
class Prediction:
    """One program's makespan, predicted and measured, in µs. `recorded_error` is the median
    over the passes, each against its own wall; `bimodal`: its walls fall into two modes."""

    id: str
    family: str
    predicted_us: float
    predicted_with_recorded_host_us: list[float]
    measured_us: float
    predicted_without_cpu_costs_us: float
    recorded_error: float
    inside: bool
    bimodal: bool

    @property
    def error(self) -> float:
        """|predicted − measured| / measured."""
        return abs(self.predicted_us - self.measured_us) / self.measured_us

    @property
    def error_without_cpu(self) -> float:
        """The same with the CPU's costs left out."""
        return abs(self.predicted_without_cpu_costs_us - self.measured_us) / self.measured_us


@dataclass(frozen=True)
class Report:
    """Predictions for a file of programs, their spans, and how many ops a second of one core
    the simulator did."""

    programs: list[Prediction]
    spans: list[Spans]
    ops_per_s: float

    @property
    def families(self) -> list[str]:
        return sorted({p.family for p in self.programs})

    def of(self, family: str | None = None) -> list[Prediction]:
        """The predictions for one family, or for all programs."""
        return [p for p in self.programs if family in (None, p.family)]

    def errors(self, family: str | None = None) -> list[float]:
        """|predicted − measured| / measured of each program (of one family)."""
        return [p.error for p in self.of(family)]

    def figures(self, family: str | None = None) -> dict[str, Any]:
        """The score of one family, or of all programs."""
        mine = self.of(family)
        return {
            "programs": len(mine),
            "error": _spread([p.error for p in mine]),
            "inside": sum(p.inside for p in mine) / len(mine),
            "error_with_recorded_host": _spread([p.recorded_error for p in mine]),
            "error_without_cpu_costs": _spread([p.error_without_cpu for p in mine]),
        }

    def durations(self) -> dict[str, dict[str, float]]:
        """Errors of the spans' durations, of all spans and by kind."""
        kinds: dict[str, list[float]] = {"all": []}
        for spans in self.spans:
            for kind, errors in spans.durations.items():
                kinds.setdefault(kind, []).extend(errors)
                kinds["all"] += errors
        return {kind: {"spans": len(e), **_spread(e)} for kind, e in sorted(kinds.items()) if e}

    @property
    def start_order(self) -> float | None:
        """The share of pairs in the measured order, see :data:`ORDER`; None without pairs."""
        pairs = sum(s.pairs for s in self.spans)
        return sum(s.in_order for s in self.spans) / pairs if pairs else None

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "programs": [asdict(p) for p in self.programs],
            "ops_per_s": round(self.ops_per_s),
            "all": self.figures(),
            "by_family": {family: self.figures(family) for family in self.families},
            "span_duration_error": self.durations(),
            "start_order": {
                "agreement": self.start_order,
                "pairs": sum(s.pairs for s in self.spans),
                "means": ORDER,
            },
            "bimodal": [p.id for p in self.programs if p.bimodal],
            "without_cpu_costs_means": WITHOUT_CPU,
        }


def score(
    programs: Sequence[Program],
    profile: DeviceProfile | None = None,
    speed_ns: int = 0,
    without: Iterable[str] = (),
) -> Report:
    """Predict what each program does and compare it with what was measured.

    Parameters
    ----------
    profile
        The machine's profile; by default the built-in one of the H200.
    speed_ns
        Repeat the predictions for at least so much CPU time, for a steadier ``ops_per_s``.
    without
        Effects of the simulator's physics to leave out, see :data:`physics.EFFECTS`.
    """
    profile, without = profile or DeviceProfile.load("h200"), tuple(without)
    player, alone = Player(profile, without), Player(without_cpu_costs(profile), without)
    walls, ops_per_s = _timed(lambda: [player.wall_us(p) for p in programs], _ops(programs), speed_ns)
    predictions = [
        _predict(program, wall, player, alone.wall_us(program))
        for program, wall in zip(programs, walls, strict=True)
    ]
    spans = [_spans(program, player.replay(program)) for program in programs if program.traced]
    return Report(predictions, spans, ops_per_s)


def _ops(programs: Sequence[Program]) -> int:
    return sum(len(program.ops) for program in programs)


def _timed(predict: Callable[[], list[float]], ops: int, speed_ns: int) -> tuple[list[float], float]:
    """The predicted walls, and ops a second of CPU time (the median of the repeats)."""
    began, speeds = cpu_time_ns(), []
    while True:
        before = cpu_time_ns()
        walls = predict()
        after = cpu_time_ns()
        speeds.append(ops * 1e9 / max(after - before, 1))
        if after - began >= speed_ns:
            return walls, median(speeds)


def _predict(program: Program, wall_us: float, player: Player, without_cpu_us: float) -> Prediction:
    recorded = [player.wall_us(program, p.host_us) for p in program.passes]
    lowest, highest = (f(p.wall_us for p in program.passes) for f in (min, max))
    return Prediction(
        program.id,
        program.family,
        wall_us,
        recorded,
        program.measured_us,
        without_cpu_us,
        median(
            abs(us - p.host_run_wall_us) / p.host_run_wall_us
            for us, p in zip(recorded, program.passes, strict=True)
        ),
        lowest * (1 - BAND) <= wall_us <= highest * (1 + BAND),
        bimodal(program),
    )


def without_cpu_costs(profile: DeviceProfile) -> DeviceProfile:
    """`profile` with a host that costs nothing, see :data:`WITHOUT_CPU`."""
    calls = ("launch", "copy", "record", "wait", "between", "sync", "sync_idle")
    cold = ("cold_launch", "cold_copy", "cold_event")
    nothing: dict[str, Any] = {f"{name}_ns": 0.0 for name in (*calls, *cold)}
    host = replace(profile.host, **nothing)
    free = Table.constant(0.0)
    kernels = {
        name: replace(cost, host=cost.host and free, cold_host_ns=0.0)
        for name, cost in profile.kernels.items()
    }
    return replace(profile, host=host, seam=None, kernels=kernels)


def bimodal(program: Program) -> bool:
    """Whether the measured walls of `program` fall into two modes.

    The first repeat of each pass, with cold caches, is left out. Of the others, sorted, the
    widest gap with at least two walls on either side has to be wider than
    :data:`MODES_GAP` of the median, and :data:`MODES_FACTOR` times as wide as the walls on
    either side of it spread.
    """
    walls = sorted(us for p in program.passes for us in (p.walls_us[1:] or p.walls_us))
    if len(walls) < 4:
        return False
    split = max(range(2, len(walls) - 1), key=lambda i: walls[i] - walls[i - 1])
    gap = walls[split] - walls[split - 1]
    around = max(walls[split - 1] - walls[0], walls[-1] - walls[split])
    return gap > MODES_GAP * median(walls) and gap > MODES_FACTOR * around


# -- spans -----------------------------------------------------------------------------


def _spans(program: Program, replay: Replay) -> Spans:
    assert program.traced is not None
    durations: dict[str, list[float]] = {}
    seen = sorted(op for op in program.traced.spans if op in replay.spans)
    for i in seen:
        start, end = program.traced.spans[i]
        if end > start:
            ours = replay.spans[i][1] - replay.spans[i][0]
            durations.setdefault(kind_of(program.ops[i]), []).append(abs(ours / (end - start) - 1))
    return Spans(durations, *_order(program, seen, replay))


def kind_of(op: dict[str, Any]) -> str:
    """What an op is, in words: ``h2d pinned``, ``gemm float32``, ``vadd mapped``, ``record``."""
    more = op.get("host") or op.get("dtype") or ("mapped" if op.get("operand") == "mapped" else "")
    return f"{op.get('kernel', op['op'])} {more}".strip()


def _order(program: Program, seen: Sequence[int], replay: Replay) -> tuple[int, int]:
    """How many pairs of spans start in the measured order, of how many (see :data:`ORDER`)."""
    assert program.traced is not None
    if not seen:
        return 0, 0
    measured = _distances([program.traced.spans[i][0] for i in seen])
    predicted = _distances([replay.spans[i][0] for i in seen])
    calls = np.stack([_distances([p.host_us[i][0] for i in seen]) for p in program.passes])
    streams = np.array([program.ops[i]["stream"] for i in seen])
    counted = np.triu(streams[:, None] != streams[None, :])
    counted &= np.abs(measured) > calls.max(axis=0) - calls.min(axis=0)
    agree = counted & (np.sign(measured) == np.sign(predicted))
    return int(agree.sum()), int(counted.sum())


def _distances(times: Sequence[float]) -> NDArray[np.float64]:
    """All differences of `times`, shape (times, times)."""
    array = np.asarray(times, np.float64)
    return np.subtract.outer(array, array).T


# -- what is printed -------------------------------------------------------------------


def _spread(errors: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}


def main(path: str | Path, as_json: bool = False, without: Iterable[str] = ()) -> str:
    """What ``heterolab bench simulator FILE`` prints: tables, or JSON."""
    without = tuple(without)
    report = score(load_programs(path), speed_ns=SPEED_NS, without=without)
    if as_json:
        return json.dumps(report.as_dict() | ({"without": without} if without else {}), indent=1)
    title = [f"without {', '.join(without)}:"] if without else []
    return "\n".join([*title, *tables(report)])


def tables(report: Report) -> Iterator[str]:
    """The score as text: makespans by family, spans by kind, and programs with two modes."""
    yield (
        f"{'makespan error':16} {'programs':>8} {'median':>7} {'p90':>7} {'inside':>7}   "
        f"{'recorded host:':>14} {'p90':>7}   {'no CPU costs:':>13} {'p90':>7}"
    )
    for family in (*report.families, None):
        f = report.figures(family)
        error, recorded, free = (
            f[key] for key in ("error", "error_with_recorded_host", "error_without_cpu_costs")
        )
        star = "*" if any(p.bimodal for p in report.of(family)) else ""
        yield (
            f"{(family or 'all') + star:16} {f['programs']:8} {error['median']:7.1%} {error['p90']:7.1%} "
            f"{f['inside']:7.0%}   {recorded['median']:14.1%} {recorded['p90']:7.1%}   "
            f"{free['median']:13.1%} {free['p90']:7.1%}"
        )
    yield f"\n{'span durations':16} {'spans':>8} {'median':>7} {'p90':>7}"
    for kind, d in report.durations().items():
        yield f"{kind:16} {d['spans']:8} {d['median']:7.1%} {d['p90']:7.1%}"
    if report.start_order is not None:
        yield f"\nstart order: {report.start_order:.1%} ({ORDER})"
    yield f"inside: from {BAND:.0%} below the lowest pass to {BAND:.0%} above the highest"
    yield f"no CPU costs: {WITHOUT_CPU}"
    for p in report.programs:
        if p.bimodal:
            yield f"* {p.id}: its measured walls fall into two modes; {p.error:.1%} off their median"
    yield f"\n{report.ops_per_s:,.0f} ops a second of one core"
