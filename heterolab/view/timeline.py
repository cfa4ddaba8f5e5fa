"""The timeline: who did what when, on three lanes (CPU, link, GPU) that unfold.

A picture of thousands of spans has to stay quick, so all spans of a kind are *one* plotly
trace: rectangles one after the other, with a gap (NaN) after each. The hover cards belong to
one more trace of invisible points along the spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from heterolab.trace import metrics
from heterolab.trace.trace import DEFAULT_STREAM, KERNEL, NONE, Span, Trace
from heterolab.view.catalogue import text
from heterolab.view.colours import COLOURS, EDGES, drawn_as
from heterolab.view.page import page
from heterolab.view.words import Description, describe, duration, kind_name, lane_name, size, trace_of

if TYPE_CHECKING:
    from heterolab.view.words import Shown

Lanes = Literal["three", "all"]

#: Height of a lane in pixels, and of what is not lanes.
LANE_PX, FRAME_PX = 66, 120
#: A long span gets a hover point at least every this part of the picture.
HOVER_STEPS = 60
#: So many spans, the longest, have a hover card: thousands more would make the picture slow.
MOST_CARDS = 4_000
#: How much of its row a span fills.
FILL = 0.8


@dataclass(frozen=True)
class Row:
    """A labelled row of the picture; `depth` spans may lie one above the other in it."""

    label: str
    y: float


@dataclass(frozen=True)
class Placed:
    """A trace laid out: each span's middle and height on the y axis, and the rows."""

    trace: Trace
    y: NDArray[np.float64]
    height: NDArray[np.float64]
    rows: tuple[Row, ...]


def timeline(
    shown: Shown | Sequence[Shown],
    *,
    lanes: Lanes = "three",
    title: str = "",
    bound: bool = False,
    last_ns: int | None = None,
) -> go.Figure:
    """The timeline of a run or trace, or of several on one scale, one under the other.

    Parameters
    ----------
    shown
        A Run, a Trace, or a sequence of them (e.g. predicted and measured).
    lanes
        ``"three"``: CPU, link, GPU. ``"all"``: every worker, copy direction and stream.
    title
        What the picture is of.
    bound
        Draw a line where the busiest lane alone would end: no schedule is faster.
    last_ns
        Show only what ended in the last so many ns: of a long run that still goes on.
    """
    several = list(shown) if isinstance(shown, Sequence) else [shown]
    traces = [_ending_after(trace_of(one), last_ns) for one in several]
    first = 0 if last_ns is None else min((trace.start_ns for trace in traces), default=0)
    longest = max((trace.end_ns for trace in traces), default=0)
    unit, unit_ns = ("ms", 1e6) if longest >= 10_000_000 else ("µs", 1e3)
    figure = go.Figure()
    placed, tops = _stack([place(trace, lanes) for trace in traces])
    for kind in COLOURS:
        figure.add_trace(bars(kind, placed, unit_ns))
    figure.add_trace(hover_points(placed, unit_ns, longest))
    for one, top in zip(placed, tops, strict=True):
        _stamp(figure, one.trace, top)
        if bound and metrics.lanes_bound_ns(one.trace):
            _draw_bound(figure, one, top, unit_ns)
    rows = [row for one in placed for row in one.rows]
    lay_out(figure, rows, title, text("timeline.axis", unit=unit), tops, (first / unit_ns, longest / unit_ns))
    figure.layout.meta = {"alt": " ".join(describe(one).alt for one in several)}
    return figure


def save_html(shown: Shown, path: str | Path, *, title: str = "HeteroLab") -> Path:
    """Write the interactive timeline of a run or trace, with its figures and requests.

    The file holds all it needs (5 MB of it is the plotting library), so it opens anywhere,
    without a network.
    """
    path = Path(path)
    picture = timeline(shown).to_html(full_html=False, include_plotlyjs=True, div_id="timeline")
    path.write_text(page(shown, picture, title), encoding="utf-8")
    return path


def _ending_after(trace: Trace, last_ns: int | None) -> Trace:
    return trace if last_ns is None else trace.where(trace["end_ns"] > trace.end_ns - last_ns)


# -- where a span lies -------------------------------------------------------------------


def place(trace: Trace, lanes: Lanes) -> Placed:
    """Give every span a row. The first row is at the top, at y = 0, the next at −1, …"""
    keys = _three_keys(trace) if lanes == "three" else _all_keys(trace)
    rows: list[Row] = []
    y, height = np.zeros(len(trace)), np.full(len(trace), FILL)
    for group, within in keys:
        middle = float(-len(rows))
        rows.append(Row(group, middle))
        depth = max(len(within), 1)
        for strip, mask in enumerate(within):
            y[mask] = middle + FILL / 2 - FILL * (strip + 0.5) / depth
            height[mask] = FILL / depth
    return Placed(trace, y, height, tuple(rows))


Key = tuple[str, list[NDArray[np.bool_]]]


def _three_keys(trace: Trace) -> list[Key]:
    """CPU, link and GPU; in each, what can run at once lies in strips one above the other."""
    names = metrics.lanes(trace)
    keys: list[Key] = []
    for group in ("cpu", "link"):
        inside = [name for name in names if metrics.group_of(name) == group]
        keys.append((text(f"lane.{group}"), [trace["lane"] == name for name in inside]))
    strips = _strips(trace)
    on_gpu = [strips == strip for strip in range(int(strips.max(initial=0)) + 1)]
    return [*keys, (text("lane.gpu"), on_gpu)]


def _all_keys(trace: Trace) -> list[Key]:
    """Every lane, and for kernels every stream, has a row of its own."""
    keys: list[Key] = [
        (lane_name(name), [trace["lane"] == name]) for name in metrics.lanes(trace) if name != "gpu"
    ]
    for stream in np.unique(trace.kind(KERNEL)["stream"]).tolist():
        on_it = (trace["kind"] == KERNEL) & (trace["stream"] == stream)
        default = stream == DEFAULT_STREAM
        label = text("lane.default_stream") if default else text("lane.stream", number=stream)
        keys.append((label, [on_it]))
    return keys


def _strips(trace: Trace) -> NDArray[np.int64]:
    """For each kernel the first strip that is free when it starts; −1 for other spans."""
    strips = np.full(len(trace), -1, np.int64)
    free_at: list[int] = []
    kernels = np.flatnonzero(trace["kind"] == KERNEL)
    starts, ends = trace["start_ns"].tolist(), trace["end_ns"].tolist()
    for i in kernels.tolist():
        strip = next((n for n, free in enumerate(free_at) if free <= starts[i]), len(free_at))
        if strip == len(free_at):
            free_at.append(0)
        free_at[strip] = ends[i]
        strips[i] = strip
    return strips


def _stack(placed: list[Placed]) -> tuple[list[Placed], list[float]]:
    """Move each one below the one before; also gives where each one's stamp goes."""
    moved, tops, below = [], [], 0.0
    for one in placed:
        tops.append(below + 0.5)
        rows = tuple(Row(row.label, row.y + below) for row in one.rows)
        moved.append(Placed(one.trace, one.y + below, one.height, rows))
        below -= len(rows) + 0.6
    return moved, tops


# -- what plotly draws -------------------------------------------------------------------


def bars(kind: str, placed: list[Placed], unit_ns: float) -> go.Scatter:
    """All spans of one kind, as rectangles in one path with gaps."""
    xs, ys = [], []
    for one in placed:
        mask = drawn_as(one.trace["kind"]) == kind
        start, end = one.trace["start_ns"][mask] / unit_ns, one.trace["end_ns"][mask] / unit_ns
        low, high = (one.y - one.height / 2)[mask], (one.y + one.height / 2)[mask]
        gap = np.full(len(start), np.nan)
        xs.append(np.stack([start, start, end, end, start, gap], axis=1).ravel())
        ys.append(np.stack([low, high, high, low, low, gap], axis=1).ravel())
    x = np.concatenate(xs).astype(np.float32) if xs else np.zeros(0, np.float32)
    y = np.concatenate(ys).astype(np.float32) if ys else np.zeros(0, np.float32)
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        fill="toself",
        fillcolor=COLOURS[kind],
        # The edge keeps spans apart that touch, and visible where they are narrower than a pixel.
        line={"color": EDGES[kind], "width": 0.7},
        name=kind_name(kind),
        showlegend=bool(len(x)),
        hoverinfo="skip",
    )


def hover_points(placed: list[Placed], unit_ns: float, end_ns: int) -> go.Scatter:
    """Invisible points along the spans that carry the hover cards."""
    xs: list[NDArray[np.float64]] = []
    ys: list[NDArray[np.float64]] = []
    cards: list[str] = []
    step = max(end_ns / HOVER_STEPS, 1)
    for one in placed:
        longest = _longest(one.trace, MOST_CARDS // len(placed))
        for span, y in zip(one.trace.where(longest), one.y[longest].tolist(), strict=True):
            count = 1 + int((span.end_ns - span.start_ns) / step)
            inside = (np.arange(count) + 0.5) / count
            xs.append((span.start_ns + inside * (span.end_ns - span.start_ns)) / unit_ns)
            ys.append(np.full(count, y))
            cards += [card(span)] * count
    return go.Scatter(
        x=np.concatenate(xs).astype(np.float32) if xs else np.zeros(0, np.float32),
        y=np.concatenate(ys).astype(np.float32) if ys else np.zeros(0, np.float32),
        text=cards,
        mode="markers",
        marker={"size": 12, "opacity": 0},
        hovertemplate="%{text}<extra></extra>",
        showlegend=False,
        name="",
    )


def _longest(trace: Trace, count: int) -> NDArray[np.bool_]:
    """Which spans are among the `count` longest."""
    mask = np.ones(len(trace), bool)
    if len(trace) > count:
        mask[np.argsort(trace["end_ns"] - trace["start_ns"], kind="stable")[:-count]] = False
    return mask


def card(span: Span) -> str:
    """What the hover card says of a span, as plotly's HTML; names are escaped."""
    head = [f"<b>{escape(span.name)}</b>", escape(kind_name(span.kind)), text("timeline.op", op=span.op)]
    if span.batch != NONE:
        head.append(text("timeline.batch", batch=span.batch))
    length = span.end_ns - span.start_ns
    times = {"start": duration(span.start_ns), "end": duration(span.end_ns), "length": duration(length)}
    lines = [" · ".join(head), text("timeline.when", **times)]
    if span.bytes:
        rate = f"{span.bytes / length:.1f}" if length else "–"
        lines.append(text("timeline.bytes", bytes=size(span.bytes), rate=rate))
    if span.after != NONE:
        lines.append(text("timeline.after", after=span.after))
    if span.queued_ns < span.start_ns:
        lines.append(text("timeline.queued", before=duration(span.start_ns - span.queued_ns)))
    return "<br>".join(lines)


def _stamp(figure: go.Figure, trace: Trace, top: float) -> None:
    """Where the numbers come from, above the lanes."""
    words = trace.stamp if len(trace) else f"{trace.stamp} · {text('timeline.empty')}"
    figure.add_annotation(
        text=f"<b>{escape(words)}</b>",
        x=0,
        xref="paper",
        xanchor="left",
        y=top,
        yanchor="bottom",
        showarrow=False,
        font={"size": 12, "color": "#333333"},
    )


def _draw_bound(figure: go.Figure, one: Placed, top: float, unit_ns: float) -> None:
    """A line where the busiest lane would end if it never paused, its label below the lanes."""
    busy = metrics.busy_by_lane(one.trace)
    lane = max(busy, key=lambda name: busy[name])
    x, bottom = (one.trace.start_ns + busy[lane]) / unit_ns, top - len(one.rows)
    line = {"dash": "dash", "color": "#000000", "width": 1.5}
    figure.add_shape(type="line", x0=x, x1=x, y0=top, y1=bottom, line=line)
    figure.add_annotation(
        text=escape(text("timeline.bound", lane=lane_name(lane), time=duration(busy[lane]))),
        x=x,
        y=bottom + 0.05,
        yanchor="top",
        xanchor="left" if busy[lane] < one.trace.wall_ns / 2 else "right",
        showarrow=False,
        font={"size": 11},
    )


def lay_out(
    figure: go.Figure,
    rows: list[Row],
    title: str,
    axis: str,
    tops: list[float],
    reach: tuple[float, float],
) -> None:
    start, end = reach
    lowest = min((row.y for row in rows), default=0.0)
    axes: dict[str, Any] = {
        "xaxis": {
            "title": {"text": axis},
            "range": [start, end + 0.01 * (end - start) if end > start else start + 1],
            "zeroline": False,
            "gridcolor": "#EEEEEE",
        },
        "yaxis": {
            "tickvals": [row.y for row in rows],
            "ticktext": [row.label for row in rows],
            "range": [lowest - 0.75, max(tops, default=0.5) + 0.35],
            "fixedrange": True,
            "zeroline": False,
            "showgrid": False,
        },
    }
    figure.update_layout(
        title={"text": escape(title), "font": {"size": 15}},
        height=FRAME_PX + LANE_PX * (len(rows) if len(rows) <= 6 else 6 + (len(rows) - 6) // 2),
        margin={
            "l": 30 + 7 * max((len(row.label) for row in rows), default=0),
            "r": 20,
            "t": 40 if title else 10,
            "b": 70,
        },
        plot_bgcolor="#FFFFFF",
        paper_bgcolor="#FFFFFF",
        font={"color": "#222222"},
        hovermode="closest",
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0.01,
            "yanchor": "bottom",
            "itemclick": False,
            "itemdoubleclick": False,
        },
        uirevision="timeline",
        **axes,
    )


__all__ = ["Description", "card", "describe", "save_html", "timeline"]
