"""Runs as tables: several beside each other, one GPU's idle time by cause, one request's way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heterolab.errors import InputError
from heterolab.lab.messages import text
from heterolab.lab.shown import Table
from heterolab.trace import metrics
from heterolab.view.words import cause_name, lane_name, share

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run


def beside(runs: Mapping[Any, Run], what: str = "run") -> Table:
    """Runs beside each other: throughput, how long the GPU works, the balance card, what limits.

    Parameters
    ----------
    runs
        By name or knob.
    what
        The names' heading.
    """
    rows = []
    for name, run in runs.items():
        card = metrics.balance_card(run)
        per = [f"{value:.3f}" for value in card.as_dict().values()]
        busy = share(metrics.busy_ns(run.trace, "gpu"), run.trace.wall_ns)
        told = " ".join(map(str, name)) if isinstance(name, tuple) else name
        rows.append((told, f"{metrics.throughput_per_s(run):.0f}", busy, *per, lane_name(card.lane)))
    head = [text(f"table.{key}") for key in ("throughput", "gpu_busy", "cpu_ms", "link_ms", "gpu_ms", "lane")]
    return Table([what, *head], rows)


def idle_causes(run: Run, most: int = 5) -> Table:
    """Why the GPU was idle: the `most` heaviest causes, as shares of the whole run."""
    causes = list(metrics.gpu_idle_by_cause(run.trace).items())[:most]
    rows = [(cause_name(cause), share(ns, run.trace.wall_ns)) for cause, ns in causes]
    return Table([text("table.cause"), text("table.share")], rows)


def one_request(run: Run, id: int) -> Table:
    """The way of one request through the pipeline, in µs since it arrived.

    Raises
    ------
    InputError
        The run has no answered request of that number.
    """
    timing = run.timings.get(id)
    if timing is None or timing.batched_ns < 0:
        raise InputError(f"request {id} was not answered in this run; it has 0 to {len(run.answers) - 1}.")
    moments = [
        ("table.arrived", timing.arrival_ns),
        ("table.prepared", timing.prepared_ns),
        ("table.batched", timing.batched_ns),
        ("table.done", timing.done_ns),
    ]
    before = timing.arrival_ns
    rows = []
    for key, at_ns in moments:
        since, step = (at_ns - timing.arrival_ns) / 1e3, (at_ns - before) / 1e3
        rows.append((text(key), f"{since:.0f}", f"{step:.0f}"))
        before = at_ns
    return Table([text("table.moment"), text("table.since"), text("table.step")], rows)
