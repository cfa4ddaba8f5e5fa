"""Two traces of the same work, op by op: how far is the prediction from the measurement?

Traces of one program hold the same ops, in the order in which the host issued them, whatever
they ran on. So an op is known by what it is: its batch, kind, name, and which of those it is
(its *occurrence*, by op number). One trace may show an op in several pieces, as the hundreds of
kernels of a forward pass or as the pulses that the simulator draws, and the other in one: then
its first start, its last end, and the sum of its pieces are compared.

An error is (predicted − measured) / measured throughout: +0.05 means that the prediction is 5 %
too long. Every function here is pure; words and pictures are in ``heterolab/view/compared.py``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from heterolab.errors import InputError
from heterolab.trace import metrics
from heterolab.trace.trace import D2H, DEVICE_KINDS, H2D, NONE, Trace

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run

#: What may be said against a comparison that is made all the same; see :attr:`Differences.doubts`.
OTHER_DEVICE, OTHER_BATCHES, OTHER_OPS = "device", "batches", "ops"
EVENTS_SEE_ENDS, UNKNOWN_LOAD = "events", "load"


@dataclass(frozen=True)
class Op:
    """One op of a trace, put together from its spans.

    Attributes
    ----------
    number, kind, name, batch, lane, stream
        As in :class:`~heterolab.trace.trace.Span`; `name` is empty where the pieces have several.
    occurrence
        How many ops of that batch, kind and name were issued before it.
    start_ns, end_ns
        First start and last end.
    busy_ns
        The lengths of its pieces, added up.
    pieces
        How many spans it has.
    bytes
        As in the span.
    """

    number: int
    kind: str
    name: str
    batch: int
    lane: str
    stream: int
    occurrence: int
    start_ns: int
    end_ns: int
    busy_ns: int
    pieces: int
    bytes: int

    @property
    def took_ns(self) -> int:
        """From the first start to the last end."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Pair:
    """An op as it was measured, and as it was predicted."""

    measured: Op
    predicted: Op

    @property
    def off_ns(self) -> int:
        """By how much the prediction is too long."""
        return self.predicted.took_ns - self.measured.took_ns


@dataclass(frozen=True)
class LaneError:
    """A lane in both traces: how long it was at work, and when its last work ended."""

    lane: str
    measured_busy_ns: int
    predicted_busy_ns: int
    measured_end_ns: int
    predicted_end_ns: int

    @property
    def busy_error(self) -> float | None:
        """Of the time at work; None where nothing was measured on this lane."""
        return error(self.predicted_busy_ns, self.measured_busy_ns)

    @property
    def end_error(self) -> float | None:
        return error(self.predicted_end_ns, self.measured_end_ns)


@dataclass(frozen=True)
class Differences:
    """What :func:`differences` found.

    Attributes
    ----------
    measured, predicted
        The traces, without what ran before the run began (a warm-up).
    pairs
        The ops that both have, in the order in which they were issued.
    only_measured, only_predicted
        The ops that only one has.
    lanes
        The lanes of either, in the order in which they are drawn.
    throughputs
        Requests a second, measured and predicted; None where the traces do not tell.
    in_order, neighbours
        Of `neighbours` pairs of ops that were measured to start one after the other on two
        streams, so many start in that order in the prediction too.
    doubts
        Why the errors say less than they seem to: ``device`` (the traces are of two machines),
        ``batches`` (the requests were put together otherwise), ``ops`` (some ops are in one trace
        only), ``events`` (CUDA events see a composite op as one span, its pauses included), ``load``
        (one of the two does not say which requests it served).
    """

    measured: Trace
    predicted: Trace
    pairs: tuple[Pair, ...]
    only_measured: tuple[Op, ...]
    only_predicted: tuple[Op, ...]
    lanes: tuple[LaneError, ...]
    throughputs: tuple[float, float] | None
    in_order: int
    neighbours: int
    doubts: tuple[str, ...]

    @property
    def wall_error(self) -> float | None:
        """Of the time from the first start to the last end."""
        return error(self.predicted.wall_ns, self.measured.wall_ns)

    @property
    def throughput_error(self) -> float | None:
        return None if self.throughputs is None else error(self.throughputs[1], self.throughputs[0])

    def worst(self, count: int = 5) -> list[Pair]:
        """The ops whose durations differ most, the worst first."""
        return sorted(self.pairs, key=lambda pair: (-abs(pair.off_ns), pair.measured.number))[:count]


def error(predicted: float, measured: float) -> float | None:
    """(predicted − measured) / measured; None where nothing was measured."""
    return (predicted - measured) / measured if measured else None


def differences(measured: Run | Trace, predicted: Run | Trace) -> Differences:
    """Join the ops of two traces, and compare them.

    Raises
    ------
    InputError
        The two did not do the same: their settings or their loads differ, or they have no op in
        common. Or they are the wrong way round.
    """
    traces = [_of_the_run(one if isinstance(one, Trace) else one.trace) for one in (measured, predicted)]
    first, second = traces
    _refuse_swapped(first, second)
    _refuse_other_work(first, second)
    pairs, only_measured, only_predicted = join(ops(first), ops(second))
    if not pairs:
        raise InputError(
            f"these two traces have no op in common: the one has {_some_names(only_measured)}, the other "
            f"{_some_names(only_predicted)}. Compare a run with the prediction of the same run."
        )
    same, neighbours = start_order(pairs)
    doubts = _doubts(first, second, pairs, bool(only_measured or only_predicted))
    return Differences(
        first,
        second,
        tuple(pairs),
        tuple(only_measured),
        tuple(only_predicted),
        tuple(_lane_errors(first, second)),
        _throughputs(measured, predicted),
        same,
        neighbours,
        doubts,
    )


# -- ops, and which belong together ------------------------------------------------------


def ops(trace: Trace) -> list[Op]:
    """The ops of a trace that are work (not a sleeping or a held host), in the order of issue."""
    spans: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for span in trace.kind(*metrics.WORK_KINDS):
        spans[span.op, span.kind].append(span)
    seen: dict[tuple[int, str, str], int] = defaultdict(int)
    found = []
    for (number, kind), pieces in sorted(spans.items()):
        first = pieces[0]
        name = first.name if all(piece.name == first.name for piece in pieces) else ""
        key = (first.batch, kind, name)
        found.append(
            Op(
                number,
                kind,
                name,
                first.batch,
                first.lane,
                first.stream,
                seen[key],
                min(piece.start_ns for piece in pieces),
                max(piece.end_ns for piece in pieces),
                sum(piece.end_ns - piece.start_ns for piece in pieces),
                len(pieces),
                first.bytes,
            )
        )
        seen[key] += 1
    return found


def join(measured: Sequence[Op], predicted: Sequence[Op]) -> tuple[list[Pair], list[Op], list[Op]]:
    """Which ops are the same, and what is left over on either side.

    First by batch, kind, name and occurrence. An op whose pieces have several names (exact spans
    of a composite's kernels) is found by its place among what is left of its batch and kind.
    """
    pairs, left, rest = _same_key(
        {(op.batch, op.kind, op.name, op.occurrence): op for op in measured},
        {(op.batch, op.kind, op.name, op.occurrence): op for op in predicted},
    )
    if not all(op.name for op in (*left, *rest)):
        more, left, rest = _same_key(_by_place(left), _by_place(rest))
        pairs += more
    pairs.sort(key=lambda pair: (pair.measured.number, pair.measured.kind))
    return pairs, left, rest


def _same_key(measured: dict[Any, Op], predicted: dict[Any, Op]) -> tuple[list[Pair], list[Op], list[Op]]:
    pairs = [Pair(op, predicted[key]) for key, op in measured.items() if key in predicted]
    left = [op for key, op in measured.items() if key not in predicted]
    return pairs, left, [op for key, op in predicted.items() if key not in measured]


def _by_place(left: Sequence[Op]) -> dict[Any, Op]:
    seen: dict[tuple[int, str], int] = defaultdict(int)
    places: dict[Any, Op] = {}
    for op in left:
        places[op.batch, op.kind, seen[op.batch, op.kind]] = op
        seen[op.batch, op.kind] += 1
    return places


def start_order(pairs: Iterable[Pair]) -> tuple[int, int]:
    """How many neighbours start in the same order, of how many.

    Neighbours are an op of the device and the next one that was measured to start on another
    stream: streams order their own ops, so those say nothing. Ops that start together agree
    with either order.
    """
    on_device = [pair for pair in pairs if pair.measured.kind in DEVICE_KINDS]
    on_device.sort(key=lambda pair: (pair.measured.start_ns, pair.measured.number))
    same = count = 0
    following: Pair | None = None  # the first op after this one
    elsewhere: Pair | None = None  # the first one after it on another stream than `following`
    for pair in reversed(on_device):
        if following is not None and following.measured.stream != pair.measured.stream:
            elsewhere = following
        if elsewhere is not None:
            count += 1
            same += pair.predicted.start_ns <= elsewhere.predicted.start_ns
        following = pair
    return same, count


# -- lanes and requests ------------------------------------------------------------------


def _lane_errors(measured: Trace, predicted: Trace) -> Iterable[LaneError]:
    both = Trace.from_spans([*measured, *predicted], measured.source, measured.device)
    for lane in metrics.lanes(both):
        busy, end = [], []
        for trace in (measured, predicted):
            here = (trace["lane"] == lane) & np.isin(trace["kind"], metrics.WORK_KINDS)
            intervals = metrics.union(trace["start_ns"][here], trace["end_ns"][here])
            busy.append(metrics.length_ns(intervals))
            end.append(int(trace["end_ns"][here].max(initial=0)))
        if any(busy):
            yield LaneError(lane, *busy, *end)


def _throughputs(measured: Run | Trace, predicted: Run | Trace) -> tuple[float, float] | None:
    values = [per_s(one) for one in (measured, predicted)]
    return None if None in values else (values[0] or 0.0, values[1] or 0.0)


def per_s(shown: Run | Trace) -> float | None:
    """Requests a second; a bare trace tells it only if its run noted how many were answered."""
    if not isinstance(shown, Trace):
        return metrics.throughput_per_s(shown)
    answers = shown.meta.get("answers")
    return answers / shown.end_ns * 1e9 if isinstance(answers, int) and shown.end_ns > 0 else None


# -- may the two be compared? ------------------------------------------------------------


def _of_the_run(trace: Trace) -> Trace:
    """Without the ops that were issued before the run's first: a warm-up whose spans came late."""
    return trace.where(trace["op"] >= 0)


def _refuse_swapped(measured: Trace, predicted: Trace) -> None:
    if measured.source == "simulated" != predicted.source:
        raise InputError(
            f"compare(measured, predicted): the first is {measured.stamp!r}, the second {predicted.stamp!r}. "
            "The measured one comes first: give them the other way round."
        )


def _refuse_other_work(measured: Trace, predicted: Trace) -> None:
    loads = [trace.meta.get("load") for trace in (measured, predicted)]
    if None not in loads and loads[0] != loads[1]:
        raise InputError(
            f"these two served different loads: {loads[0]} and {loads[1]}. Run the prediction with the "
            "load of the measured run."
        )
    mine, theirs = (settings_of(trace) for trace in (measured, predicted))
    if mine is None or theirs is None:
        return
    differ = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    if differ:
        told = ", ".join(f"{name}={mine.get(name)!r} and {name}={theirs.get(name)!r}" for name in differ)
        raise InputError(
            f"these two ran with different settings: {told}. Run the prediction with those of the "
            "measured run."
        )


def settings_of(trace: Trace) -> dict[str, Any] | None:
    """The pipeline's settings that a trace was recorded with; None where it does not say.

    They are a mapping of all settings, or (older recordings) those that were not the default,
    as one would type them: ``batch=32, chunk=32``.
    """
    noted = trace.meta.get("settings")
    if isinstance(noted, dict):
        return noted
    if not isinstance(noted, str):
        return None
    from heterolab.pipeline.pipeline import Settings  # the pipeline builds on traces

    try:
        call = ast.parse(f"settings({noted})", mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)  # noqa: PT018
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return asdict(Settings(**given))
    except (SyntaxError, ValueError, TypeError, AssertionError):
        return None


def _doubts(measured: Trace, predicted: Trace, pairs: Sequence[Pair], unjoined: bool) -> tuple[str, ...]:
    found = []
    if _machine(measured) != _machine(predicted):
        found.append(OTHER_DEVICE)
    batches = [
        {batch for batch in trace["batch"].tolist() if batch != NONE} for trace in (measured, predicted)
    ]
    copied = [pair for pair in pairs if pair.measured.kind in (H2D, D2H)]
    if batches[0] != batches[1] or any(pair.measured.bytes != pair.predicted.bytes for pair in copied):
        found.append(OTHER_BATCHES)
    if unjoined:
        found.append(OTHER_OPS)
    coarse = "cuda-events" in (measured.source, predicted.source)
    if coarse and any(pair.measured.pieces != pair.predicted.pieces for pair in pairs):
        found.append(EVENTS_SEE_ENDS)
    noted = [("settings" in trace.meta, "load" in trace.meta) for trace in (measured, predicted)]
    if any(settings for settings, _ in noted) and not all(load for _, load in noted):
        found.append(UNKNOWN_LOAD)
    return tuple(found)


def _machine(trace: Trace) -> str:
    """The machine's own name: a simulated one's without the kind of its profile."""
    return str(trace.meta.get("profile", trace.device))


def _some_names(found: Sequence[Op]) -> str:
    names = list(dict.fromkeys(op.name or op.kind for op in found))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more if names else "none"
