"""Traces and runs made by hand, hostile names included."""

from heterolab.pipeline.pipeline import Settings
from heterolab.pipeline.postprocess import Answer
from heterolab.pipeline.preprocess import Rejected
from heterolab.pipeline.run import Run, Timing
from heterolab.trace.trace import NO_STREAM, NONE, Span, Trace

EVIL = "<img src=x onerror=alert(1)>&\"'"


def trace(scale: int = 1000, name: str = "encode", device: str = "a GPU on paper") -> Trace:
    """Two batches: preprocess, pad, copy in, kernel, copy out; the second copy in under a kernel."""

    def host(kind: str, start: int, end: int, what: str, op: int, lane: str = "host") -> Span:
        return Span(op, kind, what, lane, NO_STREAM, NONE, start * scale, start * scale, end * scale)

    def gpu(
        kind: str, lane: str, stream: int, start: int, end: int, op: int, batch: int, size: int = 0
    ) -> Span:
        what = name if kind == "kernel" else "copy"
        after = op - 1 if kind == "kernel" else NONE
        times = ((start - 1) * scale, start * scale, end * scale)
        return Span(op, kind, what, lane, stream, 0, *times, size, batch, after)

    spans = [
        host("cpu", 0, 3, "preprocess", 0, "worker 0"),
        host("wait", 0, 3, "wait", 1),
        host("cpu", 3, 4, "pad", 2),
        host("api", 4, 5, "copy", 3),
        gpu("h2d", "h2d", 0, 5, 8, 3, 0, 4096),
        gpu("kernel", "gpu", 0, 8, 14, 4, 0),
        gpu("h2d", "h2d", 1, 9, 12, 5, 1, 4096),
        gpu("kernel", "gpu", 1, 12, 18, 6, 1),
        gpu("d2h", "d2h", 0, 14, 15, 7, 0, 64),
        gpu("d2h", "d2h", 1, 18, 20, 8, 1, 64),
    ]
    return Trace.from_spans(spans, "simulated", device)


def run(trace_: Trace | None = None, question: str = "what?", answer: str = "that") -> Run:
    """Two answers and a refusal over :func:`trace`."""
    answers = [Answer(i, "s", question, answer, 0.5, (1,), trained=i == 0) for i in range(2)]
    outputs = {0: answers[0], 1: answers[1], 2: Rejected(2, f"no: {question}")}
    timings = {0: Timing(0, 3000, 4000, 15_000, 0), 1: Timing(1000, 3000, 4000, 20_000, 1)}
    return Run(Settings(batch=2), outputs, timings | {2: Timing(0, done_ns=3000)}, trace_ or trace())
