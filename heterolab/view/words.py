"""A run in words: figures with their units, one line of diagnosis, five sentences.

Everything that a picture shows is here as text too: for a screen reader, a terminal, and a
notebook that runs without a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from heterolab.errors import HeteroLabError
from heterolab.trace import metrics
from heterolab.trace.trace import DEVICE_KINDS, Trace
from heterolab.view.catalogue import text
from heterolab.view.colours import COLOURS

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run

    Shown = Run | Trace

#: From so much of the time on, a lane is what limits; below the other, none is.
LIMITS, WAITS = 0.8, 0.5

#: The lanes and groups that have a name in words.
LANES = (*metrics.GROUPS, "host", "h2d", "d2h")

Rows = list[tuple[str, str]]


def trace_of(shown: Shown) -> Trace:
    """The trace of a run, or the trace itself."""
    return shown if isinstance(shown, Trace) else shown.trace


# -- numbers with units ------------------------------------------------------------------


def duration(ns: float) -> str:
    """Nanoseconds as a person would say them, three digits: ``12.3 µs``, ``1.2 s``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(ns) >= size * 0.9995:
            return f"{digits(ns / size)} {unit}"
    return f"{ns:.0f} ns"


def digits(value: float) -> str:
    """Three significant digits, without an exponent."""
    places = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.{places}f}"


def share(part_ns: float, whole_ns: float) -> str:
    """A part as per cent of the whole."""
    return f"{100 * part_ns / whole_ns:.0f} %" if whole_ns else "–"


def size(count: int) -> str:
    """Bytes in binary units."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{digits(value) if unit != 'B' else count} {unit}"


def lane_name(lane: str) -> str:
    """A lane in words; workers, and lanes that this version does not know, keep their own name."""
    return text(f"lane.{lane}") if lane in LANES else lane


def kind_name(kind: str) -> str:
    """A span's kind in words; one that this version does not know keeps its own name."""
    return text(f"kind.{kind}") if kind in COLOURS else kind


def sentence(words: str) -> str:
    """`words` with a full stop, unless they end a sentence already."""
    words = words.strip()
    return words if not words or words[-1] in ".!?…" else f"{words}."


def error_in_words(error: BaseException) -> str:
    """An error as sentences, with its notes: they say which kernel failed, and where. Our own
    errors speak for themselves; of others the type is told."""
    told = str(error) if isinstance(error, HeteroLabError) else f"{type(error).__name__}: {error}"
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    return " ".join(sentence(part.rstrip(": ")) for part in (told, *notes))


def cause_name(cause: str) -> str:
    """A cause of :func:`heterolab.trace.metrics.gpu_idle_by_cause` in words."""
    if cause.startswith(metrics.CPU_WORK):
        return text("cause.cpu", name=cause.removeprefix(metrics.CPU_WORK))
    return text(f"cause.{cause}")


# -- what to say -------------------------------------------------------------------------


def figures(shown: Shown) -> Rows:
    """The figures that matter, as (name, value with unit), the stamp last."""
    trace = trace_of(shown)
    rows = [] if isinstance(shown, Trace) else _request_figures(shown)
    wall = trace.wall_ns
    busy = {group: share(metrics.busy_ns(trace, group), wall) for group in metrics.GROUPS}
    card = metrics.balance_card(shown)
    per = {group: duration(ms * 1e6) for group, ms in card.as_dict().items()}
    causes = [
        text("figure.idle_value", cause=cause_name(cause), share=share(ns, wall))
        for cause, ns in list(metrics.gpu_idle_by_cause(trace).items())[:3]
        if ns >= wall / 200  # else it would read "0 %"
    ]
    limits = text("figure.limits_value", lane=lane_name(card.lane), share=share(card.share, 1))
    rows += [
        (text("figure.wall"), duration(wall)),
        (text("figure.busy"), text("figure.busy_value", **busy)),
        (text("figure.overlap"), share(metrics.overlap_ns(trace, "link", "gpu"), wall)),
        (text("figure.idle"), ", ".join(causes) or "–"),
        (
            text("figure.card_run" if isinstance(shown, Trace) else "figure.card"),
            text("figure.card_value", **per),
        ),
        (text("figure.limits"), limits),
    ]
    return rows


def _request_figures(run: Run) -> Rows:
    """The figures that only a run of requests has."""
    rows = [
        (
            text("figure.throughput"),
            text("figure.throughput_value", value=digits(metrics.throughput_per_s(run))),
        )
    ]
    if run.answers:
        mean, waiting = duration(run.latencies_ns.mean()), duration(metrics.queue_delay_ns(run).mean())
        rows.append((text("figure.latency"), text("figure.latency_value", mean=mean, waiting=waiting)))
        found = metrics.latency_percentiles(run.latencies_ns, (50, 99))
        p50, p99 = (duration(found.values_ns[q]) for q in (50, 99))
        key = "figure.too_few" if 99 in found.too_few else "figure.percentiles_value"
        rows.append((text("figure.percentiles"), text(key, p50=p50, p99=p99, samples=found.samples)))
    sizes = metrics.batch_sizes(run)
    if len(sizes):
        told = {"count": len(sizes), "mean": digits(sizes.mean()), "largest": sizes.max()}
        rows.append((text("figure.batches"), text("figure.batches_value", **told)))
    lost = {"rejected": len(run.rejected), "failed": len(run.failed), "unserved": len(run.unserved)}
    if any(lost.values()):
        rows.append((text("figure.not_answered"), text("figure.not_answered_value", **lost)))
    if any(not answer.trained for answer in run.answers):
        rows.append((text("figure.untrained"), text("figure.untrained_value")))
    if run.hook_errors:
        rows.append((text("figure.hooks"), " ".join(run.hook_errors)))
    return rows


def diagnosis(shown: Shown) -> str:
    """What limits, in one line."""
    trace = trace_of(shown)
    if not trace.wall_ns:
        return text("diagnosis.nothing")
    card = metrics.balance_card(shown)
    told = {"lane": lane_name(card.lane), "share": share(card.share, 1), "group": text(f"lane.{card.limits}")}
    if not card.share:
        return text("describe.no_work")
    causes = metrics.gpu_idle_by_cause(trace)
    if card.share >= LIMITS or not causes:
        return text("diagnosis.limited", **told)
    key = "diagnosis.waits" if card.share < WAITS else "diagnosis.mixed"
    return text(key, cause=cause_name(next(iter(causes))), **told)


def sentences(shown: Shown) -> list[str]:
    """What the timeline shows, in five sentences."""
    trace = trace_of(shown)
    wall = trace.wall_ns
    if not wall:
        return [text("diagnosis.nothing")]
    told = {"stamp": trace.stamp, "wall": duration(wall)}
    if isinstance(shown, Trace):
        count = len(trace.kind(*DEVICE_KINDS))
        key = {0: "describe.trace_none", 1: "describe.trace_one"}.get(count, "describe.trace")
        first = text(key, count=count, **told)
    else:
        throughput = digits(metrics.throughput_per_s(shown))
        first = text("describe.run", answers=len(shown.answers), throughput=throughput, **told)
    busy = {group: share(metrics.busy_ns(trace, group), wall) for group in metrics.GROUPS}
    both = {group: share(metrics.overlap_ns(trace, group, "gpu"), wall) for group in ("link", "cpu")}
    causes = metrics.gpu_idle_by_cause(trace)
    idle = text("describe.never_idle")
    if causes:
        part = share(sum(causes.values()), wall)
        idle = text("describe.idle", idle=part, cause=cause_name(next(iter(causes))))
    card = metrics.balance_card(trace)
    least_ns = metrics.lanes_bound_ns(trace)
    bound = text("describe.bound", lane=lane_name(card.lane), time=duration(least_ns))
    if not least_ns:
        bound = text("describe.no_work")
    return [first, text("describe.busy", **busy), text("describe.overlap", **both), idle, bound]


@dataclass(frozen=True, repr=False)
class Description:
    """A timeline in words: five sentences and a table.

    Attributes
    ----------
    sentences
        What one should see.
    rows
        The figures, as (name, value).
    """

    sentences: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]

    @property
    def alt(self) -> str:
        """The sentences as one text: what stands for the picture where it cannot be seen."""
        return " ".join(self.sentences)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.rows), default=0)
        return "\n".join([*self.sentences, "", *(f"{name:<{width}}  {value}" for name, value in self.rows)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.alt)}</p>{table(self.rows)}"


def describe(shown: Shown) -> Description:
    """The timeline of a run or trace as five sentences and a table.

    >>> print(describe(run))  # doctest: +SKIP
    """
    return Description(tuple(sentences(shown)), tuple(figures(shown)))


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of text in columns: the first to the left, the others to the right."""
    lines = [head, *rows]
    widths = [max(len(row[column]) for row in lines) for column in range(len(head))]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in lines
    ]


def table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    """An HTML table; every cell is escaped, since names and texts come from anybody."""
    lines = ["<table class='heterolab' style='line-height: 1.5'>"]
    if head:
        cells = (f"<th scope='col' style='text-align: left'>{escape(cell)}</th>" for cell in head)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return "\n".join([*lines, "</table>"])
