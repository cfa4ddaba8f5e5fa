"""Small charts of runs. Each carries the stamp that says where its numbers come from."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from heterolab.errors import InputError
from heterolab.trace import metrics
from heterolab.view.catalogue import text
from heterolab.view.colours import COLOURS
from heterolab.view.words import duration, trace_of

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run
    from heterolab.view.words import Shown

GROUP_COLOURS = {"cpu": COLOURS["cpu"], "link": COLOURS["h2d"], "gpu": COLOURS["kernel"]}


def throughput_and_latency(runs: Mapping[Any, Run], knob: str = "") -> go.Figure:
    """Throughput against mean latency as a knob moves: one labelled point a setting.

    Parameters
    ----------
    runs
        By the knob's value, in the order in which the points are joined.
    knob
        Its name, for the labels.
    """
    shown = {value: run for value, run in _some(runs).items() if len(run.answers)}
    figure = go.Figure(
        go.Scatter(
            x=[float(run.latencies_ns.mean()) / 1e6 for run in shown.values()],
            y=[metrics.throughput_per_s(run) for run in shown.values()],
            text=[escape(f"{knob}={value}" if knob else str(value)) for value in shown],
            mode="lines+markers+text",
            textposition="top center",
            marker={"size": 9},
            line={"color": COLOURS["cpu"]},
        )
    )
    axes = {"xaxis_title": text("chart.latency"), "yaxis_title": text("chart.throughput")}
    return _finish(figure, _stamps(runs), **axes, xaxis_rangemode="tozero", yaxis_rangemode="tozero")


def batch_size_histogram(run: Run, limit: int | None = None) -> go.Figure:
    """How many batches had which size, beside the limit that was set."""
    sizes = metrics.batch_sizes(run)
    limit = run.settings.batch if limit is None else limit
    values = np.arange(1, max(int(sizes.max(initial=1)), limit) + 1)
    counts = [int((sizes == value).sum()) for value in values]
    figure = go.Figure(go.Bar(x=values.tolist(), y=counts, marker_color=COLOURS["cpu"]))
    figure.add_vline(x=limit, line_dash="dash", annotation_text=text("chart.limit", limit=limit))
    axes = {"xaxis_title": text("chart.batch_size"), "yaxis_title": text("chart.batches")}
    return _finish(figure, run.stamp, **axes)


def latency_histogram(run: Run, qs: tuple[float, ...] = (50, 95, 99)) -> go.Figure:
    """The distribution of latencies, with percentiles; one that rests on too few says so."""
    latencies = run.latencies_ns
    figure = go.Figure(go.Histogram(x=(latencies / 1e6).tolist(), nbinsx=40, marker_color=COLOURS["api"]))
    found = metrics.latency_percentiles(latencies, qs)
    for place, (q, ns) in enumerate(found.values_ns.items()):
        key = "chart.percentile_few" if q in found.too_few else "chart.percentile"
        figure.add_vline(
            x=ns / 1e6,
            line_dash="dash",
            annotation_text=text(key, q=f"{q:g}", value=duration(ns)),
            annotation_y=1 - 0.1 * place,
        )
    axes = {"xaxis_title": text("chart.latency_ms"), "yaxis_title": text("chart.requests")}
    return _finish(figure, run.stamp, **axes)


def balance_bars(runs: Mapping[str, Shown]) -> go.Figure:
    """The balance cards of runs, side by side: ms per request on CPU, link and GPU."""
    cards = {name: metrics.balance_card(run).as_dict() for name, run in _some(runs).items()}
    figure = go.Figure([
        go.Bar(
            name=text(f"lane.{group}"),
            x=[escape(str(name)) for name in cards],
            y=[card[group] for card in cards.values()],
            marker_color=colour,
        )
        for group, colour in GROUP_COLOURS.items()
    ])
    return _finish(figure, _stamps(runs), yaxis_title=text("chart.ms_per_request"), barmode="group")


def _some(runs: Mapping[Any, Any]) -> Mapping[Any, Any]:
    if not runs:
        raise InputError("runs={}: a chart needs at least one run, e.g. {8: pipe.run(load, on=dev)}.")
    return runs


def _stamps(runs: Mapping[Any, Shown]) -> str:
    """Every stamp that occurs, once."""
    return " + ".join(dict.fromkeys(trace_of(run).stamp for run in runs.values()))


def _finish(figure: go.Figure, stamp: str, **layout: Any) -> go.Figure:
    figure.update_layout(
        title={"text": f"<b>{escape(stamp)}</b>", "font": {"size": 12, "color": "#333333"}},
        height=380,
        margin={"l": 60, "r": 20, "t": 40, "b": 50},
        plot_bgcolor="#FFFFFF",
        paper_bgcolor="#FFFFFF",
        font={"color": "#222222"},
        **layout,
    )
    figure.update_xaxes(gridcolor="#EEEEEE")
    figure.update_yaxes(gridcolor="#EEEEEE")
    return figure
