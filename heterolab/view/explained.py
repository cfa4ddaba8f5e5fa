"""Why is the GPU idle here? Every gap with its cause, and the critical path, in words and drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from heterolab.errors import InputError
from heterolab.trace import metrics
from heterolab.trace.critical import Step, totals
from heterolab.trace.explain import Findings, Gap, find, summed
from heterolab.trace.trace import NONE, Span
from heterolab.view.catalogue import text
from heterolab.view.words import cause_name, columns, duration, lane_name, share, table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from heterolab.view.words import Shown

#: So many gaps are told in full, so many causes a GPU and kinds of step of the path are listed.
LONGEST, CAUSE_LINES, PATH_LINES = 5, 8, 8
#: A gap names so many spans as its evidence.
MOST_EVIDENCE = 2


@dataclass(frozen=True, repr=False)
class Explanation:
    """Why the GPU was idle, gap by gap; :func:`explain` makes one.

    It prints as text, shows itself as tables in a notebook, and :meth:`figure` draws it.

    Attributes
    ----------
    found
        See :class:`heterolab.trace.explain.Findings`.
    """

    found: Findings

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Every idle gap of every GPU, cut where its cause changes, by GPU and time."""
        return self.found.gaps

    @property
    def by_cause(self) -> dict[str, int]:
        """Idle nanoseconds by cause, the largest first; all GPUs added up."""
        return self.found.by_cause()

    @property
    def critical_path(self) -> tuple[Step, ...]:
        """What the run's length is made of: steps from its start to its end, without holes."""
        return self.found.path

    def longest(self, count: int = LONGEST) -> list[Gap]:
        """The `count` longest gaps."""
        return sorted(self.gaps, key=lambda gap: (-gap.took_ns, gap.device, gap.start_ns))[:count]

    def at(self, ns: int, device: int | None = None) -> Gap | None:
        """The gap of a GPU (default: the first) at a moment; None where it was at work then."""
        device = self.gpu(device)
        return next((g for g in self.gaps if g.device == device and g.start_ns <= ns < g.end_ns), None)

    def figure(self, *, device: int | None = None) -> go.Figure:
        """The timeline, with the gaps of a GPU (default: the first) in the colour of their cause in a
        row of their own, and the critical path as a line."""
        from heterolab.view.explained_picture import draw  # it needs the plotting library

        return draw(self, device)

    # -- words -----------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """How long each GPU was idle, in a line."""
        wall = self.found.trace.wall_ns
        if not self.found.devices:
            return text("explain.no_device")
        lines = []
        for device in self.found.devices:
            idle = sum(self.found.by_cause(device).values())
            told = {"idle": duration(idle), "wall": duration(wall), "share": share(idle, wall)}
            lines.append(text("explain.title", gpu=self.gpu_name(device), **told))
        return " ".join(lines)

    @property
    def rows(self) -> list[tuple[str, str, str, str]]:
        """(cause, time, share of the run, gaps) by GPU, the heaviest cause first."""
        return [row for device in self.found.devices for row in self._cause_rows(device)]

    def _cause_rows(self, device: int) -> list[tuple[str, str, str, str]]:
        wall, sums = self.found.trace.wall_ns, self.found.by_cause(device)
        counts = Counter(gap.cause for gap in self.gaps if gap.device == device)

        def row(name: str, causes: Sequence[str]) -> tuple[str, str, str, str]:
            if len(self.found.devices) > 1:
                name = text("explain.of_gpu", gpu=self.gpu_name(device), cause=name)
            ns = sum(sums[cause] for cause in causes)
            return name, duration(ns), share(ns, wall), str(sum(counts[cause] for cause in causes))

        rows = [row(cause_name(cause), [cause]) for cause in list(sums)[:CAUSE_LINES]]
        if rest := list(sums)[CAUSE_LINES:]:
            rows.append(row(text("explain.other_causes", count=len(rest)), rest))
        return rows

    @property
    def path_rows(self) -> list[tuple[str, str, str]]:
        """(what, time, share of the run) of the critical path, the heaviest first."""
        wall, sums = self.found.trace.wall_ns, list(totals(self.critical_path).items())
        rows = [(step_name(*key), duration(ns), share(ns, wall)) for key, ns in sums[:PATH_LINES]]
        if rest := sums[PATH_LINES:]:
            ns = sum(ns for _, ns in rest)
            rows.append((text("explain.path_rest", count=len(rest)), duration(ns), share(ns, wall)))
        return rows

    @property
    def notes(self) -> list[str]:
        """What the causes leave out or cannot know, a sentence or two each."""
        notes = [text(f"explain.doubt_{doubt}") for doubt in self.found.doubts]
        missing = summed((gap.missing, gap.took_ns) for gap in self.gaps if gap.missing)
        for what, ns in missing.items():
            notes.append(text(f"explain.missing_{what}", time=duration(ns)))
        return notes

    @property
    def alt(self) -> str:
        """What stands for the picture where it cannot be seen."""
        told = "; ".join(f"{cause} {time}" for cause, time, *_ in self.rows[:LONGEST])
        path = "; ".join(f"{what} {time}" for what, time, _ in self.path_rows[:LONGEST])
        return " ".join([
            f"{self.found.trace.stamp}.",
            self.title,
            text("explain.alt_causes", causes=told or "–"),
            text("explain.alt_path", steps=path or "–"),
        ])

    def gpu(self, device: int | None) -> int:
        """The index of a GPU: of the one asked for, else of the first."""
        known = self.found.devices
        if device is not None and device not in known:
            names = ", ".join(map(str, known)) or "none"
            raise InputError(f"device={device!r} did nothing in this trace. Those that did: {names}.")
        return device if device is not None else known[0] if known else 0

    def gpu_name(self, device: int) -> str:
        """A GPU in words: with its number where there are several."""
        several = len(self.found.devices) > 1
        return text("explain.gpu_number", number=device) if several else text("lane.gpu")

    def sentence(self, gap: Gap) -> str:
        """A gap, its cause and its evidence in words."""
        return f"{where(gap, self.gpu_name(gap.device))} {why(gap)}"

    def __str__(self) -> str:
        if not self.found.trace.wall_ns:
            return text("diagnosis.nothing")
        return "\n".join([
            self.found.trace.stamp,
            self.title,
            "",
            *columns(_cause_head(), self.rows),
            "",
            text("explain.longest"),
            *(f"- {self.sentence(gap)}" for gap in self.longest()),
            "",
            *columns(_path_head(), self.path_rows),
            *(["", *self.notes] if self.notes else []),
        ])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.found.trace.wall_ns:
            return f"<p>{escape(text('diagnosis.nothing'))}</p>"
        told = "".join(f"<li>{escape(self.sentence(gap))}</li>" for gap in self.longest())
        notes = "".join(f"<p role='note'>{escape(note)}</p>" for note in self.notes)
        return "".join([
            f"<p><b>{escape(self.found.trace.stamp)}</b></p><p>{escape(self.title)}</p>",
            table(self.rows, _cause_head()),
            f"<p>{escape(text('explain.longest'))}</p><ul>{told}</ul>",
            table(self.path_rows, _path_head()),
            notes,
        ])


def explain(shown: Shown) -> Explanation:
    """Why was the GPU idle? Every gap of every GPU gets one cause, with its evidence.

    Parameters
    ----------
    shown
        A Run or a Trace of any source. What a trace does not tell is never guessed: the cause is
        then ``unknown``, and the explanation says what is missing.

    Returns
    -------
    Explanation
        Print it; ``.gaps``, ``.by_cause``, ``.critical_path``, ``.figure()``. The causes of a GPU
        add up to its idle time exactly. They are listed in ``heterolab/trace/idle.py``.

    >>> print(hl.explain(run))  # doctest: +SKIP
    """
    return Explanation(find(shown))


# -- a gap in words ------------------------------------------------------------------------------


def where(gap: Gap, gpu: str) -> str:
    """When, how long, and before what."""
    told = {"start": duration(gap.start_ns), "end": duration(gap.end_ns), "took": duration(gap.took_ns)}
    if gap.op == NONE:
        return text("explain.gap_end", gpu=gpu, **told)
    what = op_name(gap.kernel, gap.op, gap.batch)
    return text("explain.gap", gpu=gpu, what=what, **told)


def why(gap: Gap) -> str:
    """The cause, with its evidence."""
    key = "cpu" if gap.cause.startswith(metrics.CPU_WORK) else gap.cause
    if gap.missing:
        key = f"unknown_{gap.missing}"
    named = evidence(gap)
    told = text(f"explain.why_{key}", name=gap.cause.removeprefix(metrics.CPU_WORK))
    return f"{told} {text('explain.evidence', spans=named)}" if named and not gap.missing else told


def evidence(gap: Gap) -> str:
    """The spans that are the cause, with how long each was in the gap."""
    named = [
        text("explain.span", what=span_name(span), part=duration(ns))
        for span, ns in gap.evidence[:MOST_EVIDENCE]
    ]
    if rest := gap.evidence[MOST_EVIDENCE:]:
        named.append(text("explain.more", count=len(rest), part=duration(sum(ns for _, ns in rest))))
    return "; ".join(named)


def span_name(span: Span) -> str:
    """A span with its number, batch and lane."""
    name = op_name(span.name, span.op, span.batch)
    return text("explain.on_lane", what=name, lane=lane_name(span.lane))


def op_name(name: str, op: int, batch: int) -> str:
    """An op with its number and its batch."""
    told = {"name": name, "op": op}
    if batch == NONE:
        return text("explain.op", **told)
    return text("explain.op_batch", batch=batch, **told)


def step_name(lane: str, name: str, cause: str) -> str:
    """A line of the critical path: work on a lane, or why that lane waited."""
    what = text("explain.waits_for", cause=cause_name(cause)) if cause else name
    if cause == metrics.UNRECORDED:
        what = text("explain.between")
    return f"{lane_name(lane)}: {what}"


def _cause_head() -> tuple[str, ...]:
    return tuple(text(f"explain.head_{name}") for name in ("cause", "time", "share", "pieces"))


def _path_head() -> tuple[str, ...]:
    return tuple(text(f"explain.head_{name}") for name in ("path", "time", "share"))


__all__ = ["Explanation", "explain"]
