"""What all measurements share: how long to measure, and what becomes of the samples.

One rule shapes them all: calls are timed among other calls, never in a tight loop of one. The
same call costs a program half as much again, since its code and data are not in the caches.
Every figure is a median, with the 10th and 90th percentile beside it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heterolab.device.base import Array, CudaSource, Device, Kernel, Stream, Wait, Work
from heterolab.trace.trace import API, DEVICE_KINDS, SYNC, Span

Json = dict[str, Any]

SPREAD = (50, 10, 90)  # percentiles


@dataclass(frozen=True)
class Effort:
    """How long to measure: repeats of everything, and the sizes."""

    repeats: int
    copy_bytes: tuple[int, ...]
    forward: tuple[tuple[int, int], ...]  # (batch, tokens)
    images: tuple[int, ...]
    stage_seconds: float  # at most, a stage and size
    batches: tuple[int, ...] = (1, 4, 16)  # of the pipelines that are watched
    batches_each: int = 3
    calls_each: int = 3  # requests at least, where the device is not this CPU

    @classmethod
    def quick(cls) -> Effort:
        """For a CPU that plays the device: about ten seconds."""
        shapes = ((1, 8), (1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (16, 32), (32, 32))
        return cls(7, (1 << 10, 1 << 16, 1 << 20, 1 << 23), shapes, (1, 4, 16), 0.25)

    @classmethod
    def full(cls) -> Effort:
        """For a GPU: about a minute."""
        batches, tokens = (1, 4, 8, 16, 32, 64, 128), (8, 16, 32, 64, 128)
        by_tokens = {b * t: (b, t) for b in batches for t in tokens if t in (16, 32) or b in (1, 128)}
        shapes = tuple(by_tokens[n] for n in sorted(by_tokens))
        sizes = tuple(1 << power for power in range(10, 27, 2))
        return cls(30, sizes, shapes, (1, 4, 8, 16, 32, 64), 1.0, (1, 4, 16, 64), 8, 24)


def median(samples: Sequence[float]) -> float:
    return float(np.median(samples))


def spread(samples: Sequence[float]) -> Json:
    """Median, 10th and 90th percentile and number of samples."""
    middle, low, high = (round(float(v), 1) for v in np.percentile(samples, SPREAD))
    return {"median": middle, "p10": low, "p90": high, "samples": len(samples)}


def table(samples: dict[int, list[float]]) -> Json:
    """A profile's table from samples by size, the spread beside it."""
    sizes = sorted(samples)
    rows = [spread(samples[size]) for size in sizes]
    return {
        "sizes": sizes,
        "ns": [row["median"] for row in rows],
        "p10": [row["p10"] for row in rows],
        "p90": [row["p90"] for row in rows],
    }


def spin(ns: int, blocks: int = 1, threads: int = 1) -> Kernel:
    """A kernel whose blocks take `ns` each and do nothing: for measuring what comes after it."""

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        time.sleep(ns * 1e-9)

    code = r"""
extern "C" __global__
void spin(long long ns)
{
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < ns);
}
"""
    work = Work(block_ns=ns, blocks=blocks, threads=threads)
    cuda = CudaSource(
        code, "spin", lambda reads, writes: (np.int64(ns),), lambda reads, writes: (blocks, threads)
    )
    return Kernel("spin", run, lambda reads, writes: work, cuda)


class Recorded:
    """The spans that a piece of code leaves: ``with Recorded(device) as spans: …``."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.spans: list[Span] = []

    def __enter__(self) -> Recorded:
        self.device.synchronize()
        self.device.collect()
        self._first = len(self.device.host.recorder.spans)
        return self

    def __exit__(self, *error: object) -> None:
        self.device.synchronize()
        self.device.collect()
        self.spans = self.device.host.recorder.since(self._first)

    def on_device(self) -> dict[int, Span]:
        """By op number: an op of many kernels, told one by one, from its first to its last."""
        whole: dict[int, Span] = {}
        for span in self.spans:
            if span.kind in DEVICE_KINDS:
                known = whole.setdefault(span.op, span)
                start, end = min(known.start_ns, span.start_ns), max(known.end_ns, span.end_ns)
                whole[span.op] = known._replace(start_ns=start, end_ns=end)
        return whole

    def calls(self, name: str) -> list[Span]:
        return [s for s in self.spans if s.kind in (API, SYNC) and s.name == name]


def wait_for(device: Device, event: Wait) -> None:
    while not event.done:
        device.host.wait_any([event])
    event.result()


def event_lateness(device: Device, stream: Stream, ns: int = 500_000) -> float:
    """From the end of a kernel of `ns` to the host's going on after waiting for its event."""
    op = stream.launch(spin(ns))
    event = stream.record()
    wait_for(device, event)
    woken = device.host.now()
    device.collect()
    recent = device.host.recorder.since(max(len(device.host.recorder.spans) - 32, 0))
    (span,) = [s for s in recent if s.op == op and s.kind in DEVICE_KINDS]
    return woken - span.end_ns
