"""What a cell ends in: a figure in the front end, and a stable line of text everywhere.

With no front end (a terminal, nbval, a screen reader) only the text is there, so it says what
the picture says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from heterolab.errors import InputError
from heterolab.lab.messages import text
from heterolab.view.still import svg
from heterolab.view.timeline import timeline
from heterolab.view.words import describe


class Shown(ipywidgets.VBox):  # type: ignore[misc]
    """A figure that is displayed, and that reads as `line`."""

    def __init__(self, figure: go.Figure, line: str, still: str = "") -> None:
        self.figure, self.line, self.still = figure, line, still
        super().__init__([go.FigureWidget(figure)])

    def __repr__(self) -> str:
        return self.line

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**options)
        bundle["text/plain"] = repr(self)  # whole: it stands for the picture
        if self.still:
            bundle["image/svg+xml"] = self.still
        return bundle


def show(shown: Any, title: str = "", **options: Any) -> Shown:
    """The timeline of a run or trace (or a list of them, on one scale), or a plotly figure.

    `options` go to :func:`heterolab.timeline`.
    """
    if isinstance(shown, go.Figure):
        return Shown(shown, _line(title, (shown.layout.meta or {}).get("alt", "")))
    figure = timeline(shown, title=title, **options)
    if isinstance(shown, list | tuple):
        told = "".join(f"\n  {describe(one).alt}" for one in shown)
        return Shown(figure, _line(title, told))
    return Shown(figure, _line(title, describe(shown).alt), svg(shown))


def _line(title: str, told: str) -> str:
    return f"[{text('show.figure')}] " + ": ".join(part for part in (title, told) if part)


class Table:
    """Rows of text and numbers, aligned; reads the same everywhere."""

    def __init__(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.head = tuple(head)
        self.rows = tuple(tuple(row) for row in rows)
        for row in self.rows:
            if len(row) != len(self.head):
                raise InputError(f"Table: the row {row!r} has {len(row)} cells, the head {len(self.head)}.")

    def __repr__(self) -> str:
        cells = [self.head, *(tuple(map(_cell, row)) for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.head))]
        lines = [
            "  ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        ]
        return "\n".join(line.rstrip() for line in [lines[0], "-" * len(lines[0]), *lines[1:]])


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def curve(
    lines: dict[str, dict[int, float]],
    *,
    x: str,
    y: str,
    title: str,
    dashed: str = "",
) -> Shown:
    """Curves over a logarithmic x axis, one a name; the one called `dashed` is a limit.

    Parameters
    ----------
    lines
        By name, a mapping from x to y.
    """
    figure = go.Figure()
    for name, points in lines.items():
        style = {"dash": "dash", "color": "#000000"} if name == dashed else {}
        mode = "lines" if name == dashed else "lines+markers"
        figure.add_trace(
            go.Scatter(x=list(points), y=list(points.values()), name=name, mode=mode, line=style)
        )
    ticks = sorted({n for points in lines.values() for n in points})
    figure.update_layout(
        title=title,
        height=380,
        xaxis={"title": x, "type": "log", "tickvals": ticks, "ticktext": [str(n) for n in ticks]},
        yaxis={"title": y, "rangemode": "tozero"},
        plot_bgcolor="#FFFFFF",
    )
    told = "; ".join(
        f"{name}: " + ", ".join(f"{n} → {value:.2f}" for n, value in points.items())
        for name, points in lines.items()
    )
    return Shown(figure, f"[{text('show.figure')}] {title}. {told}")
