"""Traces made by hand, and any trace at all."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from heterolab.trace.trace import NO_STREAM, NONE, Span, Trace

LANE = {"cpu": "host", "api": "host", "sync": "host", "wait": "host", "kernel": "gpu"}
HOST = ("cpu", "api", "sync", "wait")


def span(
    kind: str,
    start: int,
    end: int,
    name: str = "",
    *,
    op: int,
    queued: int | None = None,
    lane: str = "",
    stream: int = 0,
    device: int = 0,
    batch: int = NONE,
    after: int = NONE,
) -> Span:
    """A span; a host's `op` for an ``api`` span is that of the op that it issues."""
    queued = start if queued is None else queued
    calls = kind == "api"
    on_device = kind not in HOST
    calls = calls or kind == "sync"
    stream = stream if on_device or calls else NO_STREAM
    device = device if on_device or calls else NONE
    lane = lane or LANE.get(kind, kind)
    return Span(op, kind, name or kind, lane, stream, device, queued, start, end, 0, batch, after)


SETTINGS = {
    "batch": 8, "streams": 2, "memory": "pinned", "max_delay_ms": 0.0001, "workers": 1, "chunk": 16,
    "payload": "ids", "returns": "topk", "length_aware": True, "ring": 2,
}  # fmt: skip


def trace_of(*spans: Span, source: str = "simulated", **meta: Any) -> Trace:
    return Trace.from_spans(spans, source, "a GPU on paper", meta)


def served(
    *spans: Span,
    requests: list[tuple[int, int, int, int, int]],
    load: str = "poisson(rate=1)",
    source: str = "simulated",
    **settings: Any,
) -> Trace:
    """A trace of a pipeline; a request is (arrival, prepared, batched, done, batch), -1: never."""
    names = ("arrival_ns", "prepared_ns", "batched_ns", "done_ns", "batch")
    columns = {name: [row[i] for row in requests] for i, name in enumerate(names)}
    return trace_of(*spans, source=source, settings=SETTINGS | settings, load=load, requests=columns)


@st.composite
def any_trace(draw: st.DrawFn) -> Trace:
    """Spans that overlap as they like, on two devices and three streams, with or without requests."""
    spans = []
    for op in range(draw(st.integers(1, 14))):
        kind = draw(st.sampled_from(["cpu", "api", "sync", "wait", "h2d", "d2h", "kernel", "kernel"]))
        start = draw(st.integers(0, 40))
        spans.append(
            span(
                kind,
                start,
                start + draw(st.integers(0, 15)),
                draw(st.sampled_from(["copy", "launch", "wait", "record", "admit", "batch", "enqueue"])),
                op=draw(st.sampled_from([op, max(op - 1, 0)])),
                queued=draw(st.integers(0, start)),
                lane=draw(st.sampled_from(["host", "worker 0", "worker 1"])) if kind == "cpu" else "",
                stream=draw(st.integers(-1, 2)),
                device=draw(st.integers(0, 1)),
                batch=draw(st.integers(-1, 2)),
                after=draw(st.sampled_from([NONE, NONE, *range(op + 1)])),
            )
        )
    source = draw(st.sampled_from(["simulated", "cupti", "cuda-events"]))
    if draw(st.booleans()):
        return trace_of(*spans, source=source)
    moment = st.integers(-1, 50)
    rows = draw(st.lists(st.tuples(moment, moment, moment, moment, st.integers(-1, 2)), max_size=5))
    load = draw(st.sampled_from(["poisson(rate=1)", "closed_loop(n=1)"]))
    return served(*spans, requests=rows, load=load, source=source, streams=draw(st.integers(1, 2)), ring=1)
