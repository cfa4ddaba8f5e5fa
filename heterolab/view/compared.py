"""Prediction over measurement: two traces on one scale, with the errors in words and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from heterolab.trace import metrics
from heterolab.trace.compare import Differences, LaneError, Op, Pair, differences, error
from heterolab.trace.trace import NONE
from heterolab.view.catalogue import text
from heterolab.view.words import columns, digits, duration, kind_name, lane_name, share, table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from heterolab.view.timeline import Lanes, Placed
    from heterolab.view.words import Shown

#: Distance of two lanes; a lane's two rows are 1 apart.
LANE_STEP = 2.3
#: Kinds of op that are listed by name where only one of the two traces has them.
MOST_NAMES = 4


@dataclass(frozen=True, repr=False)
class Comparison:
    """A prediction laid over a measurement; :func:`compare` makes one.

    In a notebook it shows itself as tables; :meth:`figure` draws it.

    Attributes
    ----------
    found
        What was compared, op by op: see :class:`heterolab.trace.compare.Differences`.
    """

    found: Differences

    @property
    def wall_error(self) -> float | None:
        """(predicted − measured) / measured of the wall time."""
        return self.found.wall_error

    @property
    def throughput_error(self) -> float | None:
        """The same of the requests a second; None where the traces do not tell."""
        return self.found.throughput_error

    @property
    def lanes(self) -> tuple[LaneError, ...]:
        """By lane: time at work and last end, measured and predicted, in ns."""
        return self.found.lanes

    def worst(self, count: int = 5) -> list[Pair]:
        """The `count` ops whose durations differ most."""
        return self.found.worst(count)

    def figure(self, *, lanes: Lanes = "three") -> go.Figure:
        """Two rows a lane on one time scale, the measured one above the predicted one."""
        return draw(self, lanes)

    # -- words -----------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The error of the wall time in a line."""
        walls = {"measured": self.found.measured.wall_ns, "predicted": self.found.predicted.wall_ns}
        told = {name: duration(ns) for name, ns in walls.items()}
        return text("compare.title", error=per_cent(self.wall_error), **told)

    @property
    def doubts(self) -> list[str]:
        """Why the errors say less than they seem to, a sentence or two each."""
        device = {"measured": self.found.measured.device, "predicted": self.found.predicted.device}
        return [
            text("compare.careful", doubt=text(f"compare.doubt_{name}", **device))
            for name in self.found.doubts
        ]

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """(what, measured, predicted, error): the run as a whole, then lane by lane."""
        walls = (self.found.measured.wall_ns, self.found.predicted.wall_ns)
        rows = [_row(text("compare.wall"), *walls)]
        if self.found.throughputs is not None:
            mine, theirs = map(digits, self.found.throughputs)
            rows.append((text("compare.throughput"), mine, theirs, per_cent(self.throughput_error)))
        for lane in self.lanes:
            name = lane_name(lane.lane)
            rows += [
                _row(text("compare.busy", lane=name), lane.measured_busy_ns, lane.predicted_busy_ns),
                _row(text("compare.end", lane=name), lane.measured_end_ns, lane.predicted_end_ns),
            ]
        return rows

    @property
    def worst_rows(self) -> list[tuple[str, str, str, str]]:
        """(op, measured, predicted, error) of the ops that differ most."""
        return [
            _row(op_name(pair.measured, pair.predicted.name), pair.measured.took_ns, pair.predicted.took_ns)
            for pair in self.worst()
        ]

    @property
    def notes(self) -> list[str]:
        """Which ops were compared, which could not be, and in which order they start."""
        found = self.found
        notes = [text("compare.joined", count=len(found.pairs))]
        for key, left in (("measured", found.only_measured), ("predicted", found.only_predicted)):
            if left:
                notes.append(text(f"compare.only_{key}", ops=_counted(left)))
        if not found.neighbours:
            return [*notes, text("compare.no_order")]
        same, of = found.in_order, found.neighbours
        notes.append(text("compare.order", same=same, of=of, share=share(same, of)))
        return notes

    @property
    def alt(self) -> str:
        """What stands for the picture where it cannot be seen."""
        lanes = "; ".join(
            text("compare.alt_lane", lane=lane_name(name), measured=duration(a), predicted=duration(b))
            for name, a, b in _group_busy(self.found)
        )
        stamps = {"measured": self.found.measured.stamp, "predicted": self.found.predicted.stamp}
        return " ".join([text("compare.alt", title=self.title, lanes=lanes, **stamps), *self.doubts])

    def __str__(self) -> str:
        found = self.found
        head = _head(text("compare.what"), found)
        return "\n".join([
            f"{text(f'compare.{_how(found)}')}: {self.found.measured.stamp}",
            f"{text('compare.predicted')}: {self.found.predicted.stamp}",
            *self.doubts,
            "",
            *columns(head, self.rows),
            "",
            *columns(_head(text("compare.worst"), found), self.worst_rows),
            "",
            *self.notes,
        ])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        stamps = (
            f"<p>{escape(text(f'compare.{name}'))}: <b>{escape(trace.stamp)}</b></p>"
            for name, trace in (("measured", self.found.measured), ("predicted", self.found.predicted))
        )
        doubts = (f"<p role='note'><b>{escape(doubt)}</b></p>" for doubt in self.doubts)
        tables = (
            table(self.rows, _head(text("compare.what"), self.found)),
            table(self.worst_rows, _head(text("compare.worst"), self.found)),
        )
        return "".join([*stamps, *doubts, *tables, f"<p>{escape(' '.join(self.notes))}</p>"])


def compare(measured: Shown, predicted: Shown) -> Comparison:
    """Lay a prediction over a measurement of the same run.

    Parameters
    ----------
    measured
        A Run or a Trace of a real device; a recording will do (:meth:`heterolab.Trace.load`).
    predicted
        The same on the simulator. Under an open load the batches differ from device to device,
        so predict with the measured run's own: :func:`heterolab.predict_like`.

    Returns
    -------
    Comparison
        Errors are (predicted − measured) / measured.

    Raises
    ------
    InputError
        The two did other work: their settings or loads differ, or they share no op; or they are
        the wrong way round. What can still be compared is, with a warning: two machines, other
        batches, ops that only one of them has.

    >>> hl.compare(run, hl.predict_like(run, pipe, load, on=sim)).figure()  # doctest: +SKIP
    """
    return Comparison(differences(measured, predicted))


def per_cent(value: float | None) -> str:
    """An error with its sign: ``+3.2 %``; a dash where there is none."""
    return "–" if value is None else text("compare.error", error=f"{100 * value:+.1f}")


def op_name(op: Op, other: str = "") -> str:
    """An op in words; `other` is its name in the other trace, where this one shows pieces."""
    name = op.name or text("compare.pieces", name=other or kind_name(op.kind))
    told = {"name": name, "kind": kind_name(op.kind)}
    return (
        text("compare.op", **told) if op.batch == NONE else text("compare.op_batch", batch=op.batch, **told)
    )


def _how(found: Differences) -> str:
    """What to call the first trace: a simulated one was not measured."""
    return "simulated" if found.measured.source == "simulated" else "measured"


def _head(what: str, found: Differences) -> tuple[str, str, str, str]:
    return (what, text(f"compare.{_how(found)}"), text("compare.predicted"), text("compare.off"))


def _row(what: str, measured_ns: int, predicted_ns: int) -> tuple[str, str, str, str]:
    return (what, duration(measured_ns), duration(predicted_ns), per_cent(error(predicted_ns, measured_ns)))


def _counted(left: Sequence[Op]) -> str:
    names = Counter(op.name or kind_name(op.kind) for op in left).most_common()
    told = [text("compare.counted", count=count, name=name) for name, count in names[:MOST_NAMES]]
    if len(names) > MOST_NAMES:
        told.append(text("compare.more", count=sum(count for _, count in names[MOST_NAMES:])))
    return ", ".join(told)


def _group_busy(found: Differences) -> list[tuple[str, int, int]]:
    """The three groups, and for how long each was at work: measured, predicted."""
    return [
        (group, metrics.busy_ns(found.measured, group), metrics.busy_ns(found.predicted, group))
        for group in metrics.GROUPS
    ]


# -- the picture -------------------------------------------------------------------------


def draw(comparison: Comparison, lanes: Lanes = "three") -> go.Figure:
    """See :meth:`Comparison.figure`. Every such figure has the same plotly traces: each kind of
    span measured and predicted, then the hover cards. So one can take another's place."""
    import plotly.graph_objects as go

    from heterolab.view.colours import COLOURS, EDGES
    from heterolab.view.timeline import Row, bars, hover_points, lay_out, place

    found = comparison.found
    sides = [place(found.measured, lanes), place(found.predicted, lanes)]
    labels = list(dict.fromkeys(row.label for side in sides for row in side.rows))
    sides = [_moved(side, labels, below) for below, side in enumerate(sides)]
    longest = max(found.measured.end_ns, found.predicted.end_ns)
    unit, unit_ns = ("ms", 1e6) if longest >= 10_000_000 else ("µs", 1e3)
    figure = go.Figure()
    for kind, colour in COLOURS.items():
        for below, side in enumerate(sides):
            drawn = bars(kind, [side], unit_ns)
            if below:  # hatched, so that nobody needs the colours to tell the two apart
                drawn.fillpattern = {"shape": "/", "size": 6, "bgcolor": "#FFFFFF", "fgcolor": EDGES[kind]}
                drawn.showlegend = False
            else:
                drawn.fillcolor = colour
            figure.add_trace(drawn)
    figure.add_trace(hover_points(sides, unit_ns, longest))
    rows = []
    for number, label in enumerate(labels):
        off = per_cent(_busy_error(found, sides, label))
        rows.append(Row(text(f"compare.row_{_how(found)}", lane=label), -LANE_STEP * number))
        rows.append(Row(text("compare.row_predicted", error=off), -LANE_STEP * number - 1))
    axis = text("compare.axis", unit=unit)
    lay_out(figure, rows, comparison.title, axis, [0.5], (0.0, longest / unit_ns))
    lines = [
        text("compare.above", stamp=found.measured.stamp),
        text("compare.below", stamp=found.predicted.stamp),
        *(doubt.partition(". ")[0].rstrip(".") for doubt in comparison.doubts),  # in full beside it
    ]
    _write_above(figure, lines)
    figure.layout.title.update(y=0.99, yref="container", yanchor="top")
    figure.layout.uirevision = "comparison"
    figure.layout.meta = {"alt": comparison.alt}
    return figure


def _moved(side: Placed, labels: Sequence[str], below: int) -> Placed:
    """A trace's spans in the rows of a comparison: each lane's first row, or the one below."""
    y = side.y.copy()
    for row in side.rows:
        inside = np.rint(side.y) == row.y
        y[inside] += -LANE_STEP * labels.index(row.label) - below - row.y
    rows = tuple(replace(row, y=-LANE_STEP * labels.index(row.label) - below) for row in side.rows)
    return replace(side, y=y, rows=rows)


def _busy_error(found: Differences, sides: Sequence[Placed], label: str) -> float | None:
    """The error of the time at work in one row of the picture."""
    busy = []
    for side in sides:
        here = np.zeros(len(side.trace), bool)
        for row in side.rows:
            if row.label == label:
                here |= np.abs(side.y - row.y) < 0.5
        worked = side.trace.where(here & np.isin(side.trace["kind"], metrics.WORK_KINDS))
        busy.append(metrics.length_ns(metrics.union(worked["start_ns"], worked["end_ns"])))
    return error(busy[1], busy[0])


def _write_above(figure: go.Figure, lines: Sequence[str]) -> None:
    """Where the numbers come from, and what to be careful of, above the lanes."""
    figure.add_annotation(
        text="<br>".join(f"<b>{escape(line)}</b>" for line in lines),
        x=0,
        xref="paper",
        xanchor="left",
        y=1,
        yref="paper",
        yanchor="bottom",
        align="left",
        showarrow=False,
        font={"size": 12, "color": "#333333"},
    )
    extra = 16 * len(lines) + 6
    figure.layout.margin.t += extra
    figure.layout.height += extra


__all__ = ["Comparison", "compare"]
