"""The timeline as a still picture (SVG): what a page shows where no widget can run."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

import numpy as np

from heterolab.trace import metrics
from heterolab.view.colours import COLOURS, drawn_as
from heterolab.view.words import describe, duration, lane_name, trace_of

if TYPE_CHECKING:
    from heterolab.trace.trace import Trace
    from heterolab.view.words import Shown

WIDTH, LEFT, TOP, LANE = 900, 60, 24, 34


def svg(shown: Shown) -> str:
    """Three lanes, the stamp, the sentences as alternative text. Same trace, same text."""
    trace = trace_of(shown)
    height = TOP + 3 * LANE + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label={quoteattr(describe(shown).alt)} font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="#FFFFFF"/>',
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(trace.stamp)}</text>',
    ]
    for row, group in enumerate(metrics.GROUPS):
        y = TOP + row * LANE
        parts.append(f'<text x="4" y="{y + LANE // 2 + 4}">{escape(lane_name(group))}</text>')
        for kind in COLOURS:
            parts += _bars(trace, group, kind, y)
    parts.append(
        f'<text x="{WIDTH - 4}" y="{height - 6}" text-anchor="end">{escape(duration(trace.end_ns))}</text>'
    )
    return "".join([*parts, "</svg>"])


def _bars(trace: Trace, group: str, kind: str, y: int) -> list[str]:
    """Spans of a kind in a lane, joined where they would touch at this width."""
    mask = metrics.on_lane(trace, group) & (drawn_as(trace["kind"]) == kind)
    scale = (WIDTH - LEFT - 4) / max(trace.end_ns, 1)
    start = np.floor(trace["start_ns"][mask] * scale).astype(np.int64)
    end = np.maximum(np.ceil(trace["end_ns"][mask] * scale).astype(np.int64), start + 1)
    return [
        f'<rect x="{LEFT + a}" y="{y + 2}" width="{b - a}" height="{LANE - 4}" fill="{COLOURS[kind]}"/>'
        for a, b in metrics.union(start, end).tolist()
    ]
