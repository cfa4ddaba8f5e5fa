"""A run as one HTML file that works without a network: the timeline, its words, the requests."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from heterolab.trace.trace import Trace
from heterolab.view.catalogue import text
from heterolab.view.words import describe, duration, table, trace_of

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run
    from heterolab.view.words import Shown

#: More rows than this make a page that nobody reads.
MOST_REQUESTS = 500

_STYLE = """
body { font-family: system-ui, sans-serif; margin: 2rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { border-bottom: 1px solid #ddd; padding: 0.2rem 0.8rem; text-align: left; vertical-align: top; }
"""


def page(shown: Shown, picture: str, title: str) -> str:
    """The page; `picture` is the timeline's HTML."""
    told = describe(shown)
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(trace_of(shown).stamp)}</p>",
        f'<div role="img" aria-label="{escape(told.alt)}">{picture}</div>',
        f"<p>{escape(told.alt)}</p>",
        f"<h2>{escape(text('html.figures'))}</h2>",
        table(told.rows),
    ]
    if not isinstance(shown, Trace):
        body.append(_requests(shown))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>{''.join(body)}</body></html>\n"
    )


def _requests(run: Run) -> str:
    """What was asked and answered, or why not."""
    latency = {a.id: duration(ns) for a, ns in zip(run.answers, run.latencies_ns.tolist(), strict=True)}
    rows = [
        (str(a.id), a.question, a.answer, f"{a.confidence:.2f}", latency[a.id])
        for a in run.answers[:MOST_REQUESTS]
    ]
    refused = [(o.id, o.reason) for o in run.rejected] + [(o.id, o.reason) for o in run.failed]
    rows += [(str(id), "–", reason, "–", "–") for id, reason in refused[:MOST_REQUESTS]]
    head = [text(f"html.{name}") for name in ("request", "question", "answer", "confidence", "latency")]
    more = len(run.outputs) - len(rows)
    rest = f"<p>{escape(text('html.more', count=more))}</p>" if more else ""
    return f"<h2>{escape(text('html.requests'))}</h2>{table(rows, head)}{rest}"
