"""Where a panel draws: a figure in the front end whose content can be changed."""

from __future__ import annotations

import plotly.graph_objects as go


class Picture:
    """Where the timeline is drawn. To put another kind of view here (a canvas), give it a
    `widget` and a `show(figure)`."""

    def __init__(self, figure: go.Figure) -> None:
        self.widget = go.FigureWidget(figure)

    def show(self, figure: go.Figure) -> None:
        """Draw `figure` in place of what is there. All timelines have the same plotly traces (so
        have all comparisons), and only their data and the layout's changing parts travel."""
        with self.widget.batch_update():
            for old, new in zip(self.widget.data, figure.data, strict=True):
                old.x, old.y = new.x, new.y
                old.text, old.showlegend = new.text, new.showlegend
            for part in ("title", "annotations", "shapes", "height", "margin", "xaxis", "yaxis"):
                self.widget.layout[part] = figure.layout[part]
