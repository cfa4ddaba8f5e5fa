"""A trace as Chrome trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from heterolab.trace.trace import API, DEFAULT_STREAM, KERNEL, NONE, Span, Trace


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """The trace as Chrome's events: a "thread" a lane (a stream, for kernels), ``ts`` in µs.

    The call that issued an op and the op itself are joined by a flow arrow.
    """
    threads = {row: number for number, row in enumerate(sorted({_row(span) for span in trace}))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": trace.stamp}},
        *(
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": row}}
            for row, tid in threads.items()
        ),
    ]
    calls = {span.op for span in trace if span.kind == API}
    for span in trace:
        tid = threads[_row(span)]
        place = {"pid": 0, "tid": tid, "ts": span.start_ns / 1e3}
        events.append({
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "dur": (span.end_ns - span.start_ns) / 1e3,
            "args": {
                name: getattr(span, name)
                for name in ("op", "batch", "bytes", "after")
                if getattr(span, name) not in (NONE, 0) or name == "op"
            },
            **place,
        })
        if span.op in calls:
            begins = span.kind == API
            arrow = {"ph": "s"} if begins else {"ph": "f", "bp": "e"}
            events.append({"name": "issued", "cat": "issue", "id": span.op, **arrow, **place})
    return events


def save_chrome(trace: Trace, path: str | Path) -> Path:
    """Write the trace for Perfetto; gzipped when the name ends in ``.gz``. Same trace, same bytes."""
    path = Path(path)
    document = {"traceEvents": chrome_events(trace), "displayTimeUnit": "ns"}
    data = json.dumps(document, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def _row(span: Span) -> str:
    """The name of the track that a span is drawn on."""
    if span.kind != KERNEL:
        return span.lane
    return "default stream" if span.stream == DEFAULT_STREAM else f"stream {span.stream}"
