"""The timeline with its idle gaps in the colour of their cause, and the critical path as a line."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from heterolab.trace import metrics
from heterolab.trace.critical import Step
from heterolab.trace.explain import Gap, summed
from heterolab.view.catalogue import text
from heterolab.view.timeline import FILL, LANE_PX, Placed, place, timeline
from heterolab.view.words import cause_name

if TYPE_CHECKING:
    from heterolab.view.explained import Explanation

#: So many gaps, the longest, have a hover card.
MOST_CARDS = 1_000

#: So many causes, the heaviest, have a colour of their own; and the room that their names take.
LEGEND, LEGEND_PX = 6, 40
OTHER_COLOUR = "#BBBBBB"
#: The causes' colours: those of the lane that is to blame, where there is one.
CAUSE_COLOURS = {
    metrics.LAUNCH_CALL: "#56B4E9",
    metrics.COPY_CALL: "#8CD3F5",
    metrics.PAGEABLE: "#E69F00",
    metrics.HOST_SYNC: "#B87F00",
    metrics.INPUT_COPY: "#009E73",
    metrics.OUTPUT_COPY: "#D55E00",
    metrics.EVENT: "#F0E442",
    metrics.HAND_OVER: "#CCC06A",
    metrics.ARRIVALS: "#E4E4E4",
    metrics.BATCH_DELAY: "#AA8BC9",
    metrics.WAKE: "#777777",
    metrics.UNRECORDED: "#999999",
    metrics.END: "#F0F0F0",
    metrics.UNKNOWN: "#FFFFFF",
}
#: Shades that tell one CPU stage from the other.
CPU_COLOURS = ("#0072B2", "#004B75", "#5A9BC4", "#00324F")


def draw(explanation: Explanation, device: int | None = None) -> go.Figure:
    """See :meth:`Explanation.figure`."""
    found = explanation.found
    figure = timeline(found.trace, title=explanation.title)
    placed = place(found.trace, "three")
    unit_ns = 1e6 if found.trace.end_ns >= 10_000_000 else 1e3
    device = explanation.gpu(device)
    gaps = [gap for gap in found.gaps if gap.device == device]
    y = placed.rows[-1].y - 1  # a row of its own, below the GPU's
    heaviest = list(summed((gap.cause, gap.took_ns) for gap in gaps))
    stages = [cause for cause in heaviest if cause.startswith(metrics.CPU_WORK)]
    for cause in heaviest[:LEGEND]:
        of_it, name = [gap for gap in gaps if gap.cause == cause], cause_name(cause)
        colour = CAUSE_COLOURS.get(cause) or CPU_COLOURS[stages.index(cause) % len(CPU_COLOURS)]
        figure.add_trace(_drawn_gaps(of_it, y, unit_ns, colour, name))
    if rest := [gap for gap in gaps if gap.cause in heaviest[LEGEND:]]:
        name = text("explain.other_causes", count=len(heaviest) - LEGEND)
        figure.add_trace(_drawn_gaps(rest, y, unit_ns, OTHER_COLOUR, name))
    figure.add_trace(_gap_cards(explanation, gaps, y, unit_ns))
    for trace in _drawn_path(found.path, placed, unit_ns):
        figure.add_trace(trace)
    axis = figure.layout.yaxis
    label = text("explain.idle_row", gpu=explanation.gpu_name(device))
    axis.tickvals, axis.ticktext = (*axis.tickvals, y), (*axis.ticktext, label)
    axis.range = (axis.range[0] - 1, axis.range[1])
    figure.layout.margin.l = max(figure.layout.margin.l, 30 + 7 * len(label))
    figure.layout.margin.b += LEGEND_PX
    figure.layout.height += LANE_PX + LEGEND_PX
    figure.layout.meta = {"alt": explanation.alt}
    figure.layout.uirevision = "explained"
    return figure


def _drawn_gaps(gaps: Sequence[Gap], y: float, unit_ns: float, colour: str, name: str) -> Any:
    """Gaps as rectangles in their own row."""
    start, end = (np.array([getattr(gap, side) for gap in gaps]) / unit_ns for side in ("start_ns", "end_ns"))
    low, high = np.full(len(gaps), y - FILL / 2), np.full(len(gaps), y + FILL / 2)
    none = np.full(len(gaps), np.nan)
    return go.Scatter(
        x=np.stack([start, start, end, end, start, none], axis=1).ravel(),
        y=np.stack([low, high, high, low, low, none], axis=1).ravel(),
        mode="lines",
        fill="toself",
        fillcolor=colour,
        line={"color": "#888888" if colour == CAUSE_COLOURS[metrics.UNKNOWN] else colour, "width": 0.5},
        name=text("explain.idle", cause=escape(name)),
        hoverinfo="skip",
    )


def _gap_cards(explanation: Explanation, gaps: Sequence[Gap], y: float, unit_ns: float) -> Any:
    """An invisible point in the middle of each gap with its sentence."""
    shown = sorted(gaps, key=lambda gap: -gap.took_ns)[:MOST_CARDS]
    return go.Scatter(
        x=[(gap.start_ns + gap.end_ns) / 2 / unit_ns for gap in shown],
        y=[y] * len(shown),
        text=[escape(explanation.sentence(gap)).replace(". ", ".<br>") for gap in shown],
        mode="markers",
        marker={"size": 14, "opacity": 0},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="",
    )


def _drawn_path(path: Sequence[Step], placed: Placed, unit_ns: float) -> list[Any]:
    """The critical path: work as a line through it, waits dotted."""
    trace = placed.trace
    by_lane: dict[str, float] = {}
    by_op: dict[tuple[int, str], float] = {}
    for op, kind, lane, y in zip(
        trace["op"].tolist(), trace["kind"].tolist(), trace["lane"].tolist(), placed.y.tolist(), strict=True
    ):
        by_lane.setdefault(lane, y)
        by_op.setdefault((op, kind), y)
    lines: dict[str, tuple[list[float | None], list[float | None]]] = {"work": ([], []), "wait": ([], [])}
    last: float | None = None
    for step in path:
        y = by_op.get((step.op, step.kind), by_lane.get(step.lane, 0.0))
        xs, ys = lines["wait" if step.cause else "work"]
        if last is not None and last != y:  # from lane to lane
            lines["wait"][0].extend([step.start_ns / unit_ns, step.start_ns / unit_ns, None])
            lines["wait"][1].extend([last, y, None])
        xs.extend([step.start_ns / unit_ns, step.end_ns / unit_ns, None])
        ys.extend([y, y, None])
        last = y
    styles: dict[str, dict[str, Any]] = {"work": {"width": 4}, "wait": {"width": 1.5, "dash": "dot"}}
    return [
        go.Scatter(
            x=xs,
            y=ys,
            mode="lines",
            line={"color": "#000000", **styles[name]},
            name=text(f"explain.path_{name}"),
            hoverinfo="skip",
        )
        for name, (xs, ys) in lines.items()
    ]
