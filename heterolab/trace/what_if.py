"""What would help most? The same requests again, on the simulator, with one thing changed.

Some changes are settings that one can try. Others are machines that one does not have: a GPU or a
link twice as fast, or parsing that costs nothing. They show what the run waits for. The unchanged run
is simulated as well, so a gain compares like with like whatever the run itself was made on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from heterolab.device import open_device
from heterolab.device.base import Device
from heterolab.device.imagined import imagined
from heterolab.device.profile import DeviceProfile
from heterolab.errors import HeteroLabError, InputError
from heterolab.trace import metrics
from heterolab.trace.compare import settings_of
from heterolab.trace.trace import Trace

if TYPE_CHECKING:
    from heterolab.pipeline.pipeline import Pipeline, Settings
    from heterolab.pipeline.run import Origin, Run
    from heterolab.workload import Load

#: So many of a load's requests are simulated; more would only take longer.
MOST_REQUESTS = 2_000
#: A change counts from here on; below it is noise of batches that fall otherwise.
HELPS = 1.01
#: If nothing raises an open load's throughput by so much, its arrivals are what limits it.
LIMITED_BY_ARRIVALS = 1.05

PINNED, STREAM, WORKERS, BATCH, DELAY, BYTES = "pinned", "stream", "workers", "batch", "delay", "bytes"
GPU, LINK, PARSING = "gpu", "link", "parsing"
THROUGHPUT, LATENCY = "throughput", "latency"

#: The preprocessing stage's name on the timeline and in profiles.
PREPROCESS = "preprocess"


@dataclass(frozen=True)
class Change:
    """One thing changed.

    Attributes
    ----------
    name
        ``pinned``, ``stream``, ``workers``, ``batch``, ``delay``, ``bytes``; or of what cannot be
        tried: ``gpu``, ``link``, ``parsing``.
    settings
        The settings with their new values; empty for a change of the machine.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def can_be_tried(self) -> bool:
        """Whether it is a setting."""
        return bool(self.settings)


@dataclass(frozen=True)
class Outcome:
    """What a change would do.

    Attributes
    ----------
    change
        See :class:`Change`.
    per_s, p90_ns
        Requests a second, and the latency that 90 % of them stay within.
    gain
        Throughput over that of the unchanged run; 1.42 is 42 % more.
    p90_ratio
        Latency over that of the unchanged run; 0.8 is 20 % less.
    why_not
        Why it could not be simulated; then the numbers are 0.
    """

    change: Change
    per_s: float
    p90_ns: int
    gain: float
    p90_ratio: float
    why_not: str = ""


@dataclass(frozen=True)
class Trial:
    """A promise beside its result.

    Attributes
    ----------
    change, goal
        What was tried, and for what: ``throughput`` or ``latency``.
    promised, measured
        Throughput (or p90 latency) with the change over that without, simulated and on the device.
    runs
        The runs on the device: (without, with) a round.
    """

    change: Change
    goal: str
    promised: float
    measured: float
    runs: tuple[tuple[Run, Run], ...]


@dataclass(frozen=True)
class Outlook:
    """What :func:`outlook` found.

    Attributes
    ----------
    profile
        The machine that was simulated.
    settings
        The run's.
    per_s, p90_ns
        Of the unchanged run, simulated.
    outcomes
        The best first, by `goal`; those that could not be simulated last.
    goal
        ``throughput``; or ``latency`` where the arrivals limit the throughput.
    requests, of_requests
        How many of the load's requests were simulated.
    """

    profile: DeviceProfile
    settings: Settings
    per_s: float
    p90_ns: int
    outcomes: tuple[Outcome, ...]
    goal: str
    requests: int
    of_requests: int
    origin: Origin = field(repr=False)

    @property
    def best(self) -> Outcome | None:
        """The best change that can be tried; None where none helps by 1 %."""
        for outcome in self.outcomes:
            if outcome.change.can_be_tried and not outcome.why_not:
                return outcome if self._helps(outcome) else None
        return None

    def _helps(self, outcome: Outcome) -> bool:
        return (outcome.gain if self.goal == THROUGHPUT else 1 / outcome.p90_ratio) >= HELPS

    def try_best(self, on: Device, rounds: int = 1) -> Trial:
        """Run the unchanged pipeline and the best change on `on`, in turns, all of the load.

        Raises
        ------
        InputError
            No change that can be tried helps.
        """
        best = self.best
        if best is None:
            raise InputError("no change that can be tried helps by 1 % or more: there is nothing to try.")
        if not isinstance(rounds, int) or rounds < 1:
            raise InputError(f"rounds={rounds!r}: give a whole number, 1 or more.")
        changed = replace(self.settings, **best.change.settings)
        runs = tuple(
            (_serve(self.origin, self.settings, on), _serve(self.origin, changed, on)) for _ in range(rounds)
        )
        measure = metrics.throughput_per_s if self.goal == THROUGHPUT else p90_ns
        before, after = (median(measure(pair[i]) for pair in runs) for i in (0, 1))
        promised = best.gain if self.goal == THROUGHPUT else best.p90_ratio
        return Trial(best.change, self.goal, promised, after / before if before else 0.0, runs)


def outlook(
    shown: Run | Trace,
    *,
    on: str | DeviceProfile | Device | None = None,
    pipeline: Pipeline | None = None,
    load: Load | None = None,
) -> Outlook:
    """Simulate the run again, unchanged and with each change; see :func:`heterolab.what_if`."""
    origin = _origin(shown, pipeline, load)
    profile = machine(shown if isinstance(shown, Trace) else shown.trace, origin, on)
    settings = _settings(shown, pipeline)
    few = replace(origin.load, requests=origin.load.requests[:MOST_REQUESTS])
    short = replace(origin, load=few)

    def simulated(changed: Settings, machine: DeviceProfile) -> Run:
        device = open_device(machine, values=False, races="off")
        try:
            return _serve(short, changed, device)
        finally:
            device.close()

    base = simulated(settings, profile)
    if not base.answers:
        raise InputError("what_if: none of the run's requests is answered, so nothing can be better.")
    per_s, p90 = metrics.throughput_per_s(base), p90_ns(base)
    outcomes = []
    for change, on_what in changes(settings, profile):
        try:
            run = simulated(replace(settings, **change.settings), on_what())
        except HeteroLabError as error:  # e.g. twice the batch does not fit the device
            outcomes.append(Outcome(change, 0.0, 0, 0.0, 0.0, str(error)))
            continue
        mine, p90_mine = metrics.throughput_per_s(run), p90_ns(run)
        outcomes.append(Outcome(change, mine, p90_mine, mine / per_s, p90_mine / p90 if p90 else 1.0))
    goal = _goal(outcomes, origin.load)
    outcomes.sort(key=lambda one: _rank(one, goal))
    count = len(few.requests), len(origin.load)
    return Outlook(profile, settings, per_s, p90, tuple(outcomes), goal, *count, origin)


def changes(
    settings: Settings, profile: DeviceProfile
) -> Iterator[tuple[Change, Callable[[], DeviceProfile]]]:
    """What is changed, and the machine to simulate it on."""
    tried: dict[str, dict[str, Any]] = {
        PINNED: {"memory": "pinned"},
        STREAM: {"streams": settings.streams + 1},
        WORKERS: {"workers": settings.workers * 2 or 1},
        BATCH: {"batch": settings.batch * 2},
        DELAY: {"max_delay_ms": 0.0},
        BYTES: {"returns": "topk"},
    }
    for name, values in tried.items():
        if any(getattr(settings, setting) != value for setting, value in values.items()):
            yield Change(name, values), lambda: profile
    parts = {"memory": 2, "arithmetic": 2}
    yield Change(GPU), lambda: imagined(f"{profile.name}, twice the GPU", profile, faster=parts)
    yield Change(LINK), lambda: imagined(f"{profile.name}, twice the link", profile, faster={"link": 2})
    yield Change(PARSING), lambda: _without_parsing(profile)


def _without_parsing(profile: DeviceProfile) -> DeviceProfile:
    sizes = profile.cpu_cost(PREPROCESS).time.sizes
    free = {PREPROCESS: {"ns": [0.0] * len(sizes)}}
    return imagined(f"{profile.name}, parsing for nothing", profile, cpu_costs=free)


def machine(trace: Trace, origin: Origin | None, on: str | DeviceProfile | Device | None) -> DeviceProfile:
    """The profile to simulate: the one asked for, else that of the run, else the built-in one of the
    machine that the trace names.

    Raises
    ------
    InputError
        Nobody has measured that machine for us.
    """
    if isinstance(on, DeviceProfile):
        return on
    if isinstance(on, Device):
        if on.profile is None:
            raise InputError(f"on={on!r} is no simulated device. Give a profile: on='sim:h200'.")
        return on.profile
    if on is not None:
        return DeviceProfile.load(str(on).removeprefix("sim:"))
    if origin is not None and origin.profile is not None:
        return origin.profile
    name = trace.meta.get("profile", trace.device)
    for built_in in DeviceProfile.names():
        profile = DeviceProfile.load(built_in)
        if profile.name == name:
            return profile
    raise InputError(
        f"what_if simulates the run again, and no built-in profile is of {name}. Measure it with "
        "`heterolab calibrate --device cuda --out mine.json`, then hl.what_if(run, on='sim:mine.json')."
    )


def p90_ns(run: Run) -> int:
    """The latency that 90 % of the answered requests stay within."""
    return metrics.latency_percentiles(run.latencies_ns, (90,)).values_ns.get(90, 0)


def _serve(origin: Origin, settings: Settings, device: Device) -> Run:
    from heterolab.pipeline.pipeline import Pipeline  # the pipeline builds on traces

    return Pipeline(origin.model, keys=origin.keys, **asdict(settings)).run(origin.load, on=device)


def _origin(shown: Run | Trace, pipeline: Pipeline | None, load: Load | None) -> Origin:
    from heterolab.pipeline.run import Origin

    known = None if isinstance(shown, Trace) else shown.origin
    model, keys = (known.model, known.keys) if known else (None, ())
    if pipeline is not None:
        model, keys = pipeline.model, pipeline.keys
    load = load or (known.load if known else None)
    if model is None or load is None:
        raise InputError(
            "what_if serves the requests again, and a recording does not hold them. Give what made it: "
            "hl.what_if(trace, pipeline=pipe, load=load)."
        )
    return Origin(model, keys, load, known.profile if known else None)


def _settings(shown: Run | Trace, pipeline: Pipeline | None) -> Settings:
    from heterolab.pipeline.pipeline import Settings

    if not isinstance(shown, Trace):
        return shown.settings
    noted = settings_of(shown)
    if noted is not None:
        return Settings(**noted)
    if pipeline is not None:
        return pipeline.settings
    raise InputError("what_if: the trace does not say which settings it ran with. Give pipeline=.")


def _goal(outcomes: list[Outcome], load: Load) -> str:
    limited = not load.in_flight and max(one.gain for one in outcomes) < LIMITED_BY_ARRIVALS
    return LATENCY if limited else THROUGHPUT


def _rank(outcome: Outcome, goal: str) -> tuple[bool, float, float]:
    """Gains that differ by less than a thousandth are the same; then the latency decides."""
    first = -round(outcome.gain, 3) if goal == THROUGHPUT else round(outcome.p90_ratio, 3)
    second = outcome.p90_ratio if goal == THROUGHPUT else -outcome.gain
    return bool(outcome.why_not), first, second
