"""Every idle gap of every GPU with its cause and its evidence, and the critical path.

Words and pictures of this are in ``heterolab/view/explained.py``; what decides the causes is in
``idle.py``, and the path in ``critical.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from heterolab.trace import critical, idle
from heterolab.trace.critical import Step
from heterolab.trace.metrics import UNKNOWN
from heterolab.trace.queue import Queue
from heterolab.trace.trace import DEVICE_KINDS, HOST_KINDS, NONE, WAIT, Span, Trace

if TYPE_CHECKING:
    from heterolab.pipeline.run import Run

#: What a trace can lack, so that a cause is unknown: the times of its requests, its host's spans, or
#: why the device did not start an op that nothing is known to have held up.
NO_REQUESTS, NO_HOST, NO_REASON = "requests", "host", "reason"
#: What can be said against the whole: CUDA events hide the pauses inside a composite op.
HIDDEN_PAUSES = "events"


@dataclass(frozen=True)
class Gap:
    """A time in which a GPU was idle, for one cause.

    Attributes
    ----------
    device
        Index of the GPU in the run.
    start_ns, end_ns
        When. A gap with several causes is cut where the cause changes.
    cause
        One of those in :mod:`heterolab.trace.idle`.
    op, kernel, batch
        The op that ended the whole gap, its name and its batch; -1 and empty at the run's end.
    evidence
        The spans that are the cause, each with the nanoseconds of it that lie in this gap, the
        longest first. Empty where the cause is that nothing happened.
    whole_ns
        How long the GPU was idle at a stretch, with the neighbouring causes.
    missing
        Of an unknown cause, what the trace lacks: ``requests``, ``host`` or ``reason``; else empty.
    """

    device: int
    start_ns: int
    end_ns: int
    cause: str
    op: int
    kernel: str
    batch: int
    evidence: tuple[tuple[Span, int], ...]
    whole_ns: int
    missing: str = ""

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Findings:
    """What :func:`find` found.

    Attributes
    ----------
    trace
        The trace, without what ran before the run began (a warm-up).
    gaps
        By device and time.
    path
        The critical path: from the first start to the last end, without holes.
    doubts
        ``events`` where CUDA events hide pauses.
    """

    trace: Trace
    gaps: tuple[Gap, ...]
    path: tuple[Step, ...]
    doubts: tuple[str, ...]

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs that occur."""
        return devices(self.trace)

    def by_cause(self, device: int | None = None) -> dict[str, int]:
        """Nanoseconds by cause, the largest first: of one GPU, or of all of them added up. Those of
        a GPU sum exactly to the time in which it was idle."""
        return summed((gap.cause, gap.took_ns) for gap in self.gaps if device in (None, gap.device))


def find(shown: Run | Trace) -> Findings:
    """Explain a run, or a trace of any source: simulated, measured or replayed."""
    trace = shown if isinstance(shown, Trace) else shown.trace
    trace = trace.where(trace["op"] >= 0)
    queue = Queue.of(trace)
    spans, no_host = list(trace), not np.isin(trace["kind"], HOST_KINDS).any()
    gaps = [
        _gap(piece, device, spans, no_host)
        for device in devices(trace)
        for piece in idle.pieces(trace, device, queue)
    ]
    return Findings(trace, tuple(gaps), critical.critical_path(trace, queue), _doubts(trace))


def devices(trace: Trace) -> tuple[int, ...]:
    """The GPUs that did something."""
    return tuple(np.unique(trace["device"][np.isin(trace["kind"], DEVICE_KINDS)]).tolist())


def summed(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Nanoseconds by name, the largest first."""
    sums: dict[str, int] = {}
    for name, ns in parts:
        sums[name] = sums.get(name, 0) + ns
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def _gap(piece: idle.Piece, device: int, spans: list[Span], no_host: bool) -> Gap:
    following = spans[piece.following] if piece.following >= 0 else None
    evidence = tuple((spans[place], ns) for place, ns in piece.blamed)
    missing = ""
    if piece.cause == UNKNOWN:
        asleep = bool(evidence) and evidence[0][0].kind == WAIT
        missing = NO_HOST if no_host else NO_REQUESTS if asleep else NO_REASON
    return Gap(
        device,
        piece.start_ns,
        piece.end_ns,
        piece.cause,
        following.op if following else NONE,
        following.name if following else "",
        following.batch if following else NONE,
        evidence,
        piece.gap_end_ns - piece.gap_start_ns,
        missing,
    )


def _doubts(trace: Trace) -> tuple[str, ...]:
    return (HIDDEN_PAUSES,) if trace.source == "cuda-events" else ()
