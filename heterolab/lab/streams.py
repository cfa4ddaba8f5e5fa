"""Lab 03's job: copy in, compute, copy out. How to make one, record it and judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.device.base import Buffer, Device, Kernel, Memory, Stream
from heterolab.errors import InputError
from heterolab.pipeline.kernels import empty, rounds, vector_add
from heterolab.trace import metrics
from heterolab.trace.trace import Trace

MIB = 2**20

#: How much a job moves in each direction. A CPU that plays the device copies with the cores
#: that also compute, so a smaller job shows the same there in less time.
SIZE_MIB, CPU_SIZE_MIB = 64, 32

#: Elements that are compared at a time.
PIECE = 1 << 20

#: More rounds than any machine needs to keep as long as a copy.
MOST_ROUNDS = 1 << 17

Program = Callable[..., Any]


def job_mib(dev: Device) -> int:
    """MiB that a job of this lab moves in each direction on `dev`."""
    return CPU_SIZE_MIB if dev.source == "cpu-clock" else SIZE_MIB


@dataclass(eq=False, repr=False)
class Job:
    """Copy `h_in` to the device, run `kernel` on it in place, copy the result to `h_out`.

    Attributes
    ----------
    h_in, h_out
        Host buffers, uint32, shape (n,).
    d
        The device's buffer, same shape; the kernel reads it and writes it.
    kernel
        ``launch(job.kernel, reads=[part of d], writes=[the same part])``.
    """

    h_in: Buffer
    d: Buffer
    h_out: Buffer
    kernel: Kernel

    def __repr__(self) -> str:
        size = f"{self.nbytes / MIB:g} MiB"
        return f"<job: {size} in, {self.kernel.name}, {size} out; host memory: {self.h_in.memory.value}>"

    @property
    def nbytes(self) -> int:
        """Bytes in one direction."""
        return self.h_in.nbytes

    def parts(self, chunks: int) -> list[slice]:
        """`chunks` slices that cover the job, in order, as equal as can be."""
        if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= len(self.d):
            raise InputError(f"parts({chunks!r}): give a whole number of chunks, 1 to {len(self.d)}.")
        edges = [len(self.d) * i // chunks for i in range(chunks + 1)]
        return [slice(a, b) for a, b in pairwise(edges)]

    def with_kernel(self, kernel: Kernel) -> Job:
        """The same job with other work to do, on the same buffers."""
        return replace(self, kernel=kernel)

    def expected(self, part: slice) -> NDArray[np.uint32]:
        """NumPy's answer for a part."""
        values: NDArray[np.uint32] = self.h_in.read()[part].copy()
        self.kernel.run(np, [values], [values])
        return values

    def right(self) -> bool:
        """Whether `h_out` holds NumPy's answer."""
        return self.first_wrong() is None

    def first_wrong(self) -> int | None:
        """The first element of `h_out` that differs from NumPy's answer; None if all are right."""
        got = self.h_out.read()
        for part in self.parts(max(1, len(self.d) // PIECE)):  # in pieces: less memory at a time
            wrong = (got[part] != self.expected(part)).nonzero()[0]
            if len(wrong):
                return int(part.start + wrong[0])
        return None

    def clear(self) -> None:
        """Forget the last result, so that a program that does nothing is not right."""
        self.h_out.write()[...] = 0


def job(dev: Device, kernel: Kernel, memory: str = "pinned", mib: float | None = None) -> Job:
    """A copy–compute–copy job on `dev`, with its host buffers in `memory`."""
    n = int((mib or job_mib(dev)) * MIB) // 4
    kind = Memory.of(memory)
    h_in, h_out = (dev.buffer(n, "uint32", kind, name=name) for name in ("h_in", "h_out"))
    h_in.write()[...] = np.arange(1, n + 1, dtype=np.uint32)
    return Job(h_in, dev.buffer(n, "uint32", name="d"), h_out, kernel)


@dataclass(eq=False)
class Pair:
    """One of the seed's two tasks: ``d_c = d_a + d_b`` after `h_a` was copied to `d_a`."""

    h_a: Buffer
    d_a: Buffer
    d_b: Buffer
    d_c: Buffer


def pairs(dev: Device, memory: str) -> list[Pair]:
    """The two tasks of the article's program, float32, with `h_a` in `memory`."""
    n = job_mib(dev) * MIB // 4
    made, d_b = [], dev.buffer(n, "float32", name="d_b")
    for _ in range(2):
        h_a = dev.buffer(n, "float32", memory, name="h_a")
        h_a.write()[...] = 1.0
        d_a, d_c = (dev.buffer(n, "float32", name=name) for name in ("d_a", "d_c"))
        made.append(Pair(h_a, d_a, d_b, d_c))
    return made


@dataclass(eq=False)
class Sum:
    """The article's task, whole: ``h_c = h_a + h_b``, by way of the device."""

    h_a: Buffer
    h_b: Buffer
    h_c: Buffer
    d_a: Buffer
    d_b: Buffer
    d_c: Buffer

    def right(self) -> bool:
        """Whether `h_c` holds the sum."""
        return bool(np.array_equal(self.h_c.read(), self.h_a.read() + self.h_b.read()))


def sums(dev: Device, n: int = 1 << 20) -> list[Sum]:
    """Two such tasks of `n` float32, their host buffers pinned."""
    made = []
    for number in range(2):
        host = [dev.buffer(n, "float32", "pinned", name=name) for name in ("h_a", "h_b", "h_c")]
        host[0].write()[...] = np.arange(n, dtype=np.float32)
        host[1].write()[...] = 10.0 + number
        made.append(Sum(*host, *(dev.buffer(n, "float32", name=name) for name in ("d_a", "d_b", "d_c"))))
    return made


# -- run and record ------------------------------------------------------------------------


def record(dev: Device, program: Program, *args: Any) -> Trace:
    """Run ``program(dev, *args)``, wait for the device, and give the trace of just that."""
    dev.synchronize()
    dev.collect()
    recorder = dev.host.recorder
    spans, notes, op, now = len(recorder.spans), len(recorder.notes), recorder.ops, dev.host.now()
    program(dev, *args)
    dev.synchronize()
    dev.collect()
    lacks = recorder.notes[notes:]
    meta = dev.meta() | ({"incomplete": lacks} if lacks else {})
    return Trace.from_spans(recorder.since(spans), dev.source, dev.name, meta, origin_ns=now, first_op=op)


def timed(dev: Device, program: Program, *args: Any) -> Trace:
    """The trace of a typical run: after a warm-up, the median of three by wall time.

    A simulated run repeats exactly, so there one is enough.
    """
    if dev.source == "simulated":
        return record(dev, program, *args)
    record(dev, program, *args)
    runs = [record(dev, program, *args) for _ in range(3)]
    return sorted(runs, key=lambda trace: trace.wall_ns)[1]


def queues(dev: Device, count: int, non_blocking: bool = True) -> list[Stream]:
    """`count` streams of `dev`, the same ones each time; blocking ones wait for the default stream."""
    return dev.streams(count, non_blocking)


def in_chunks(dev: Device, job: Job, chunks: int, queues: Sequence[Stream]) -> None:
    """The job in `chunks` parts, dealt out to the streams like cards."""
    for i, part in enumerate(job.parts(chunks)):
        queue = queues[i % len(queues)]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(job.kernel, reads=[job.d[part]], writes=[job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    dev.synchronize()


def serial(dev: Device, job: Job) -> None:
    """The same work in one piece on one stream: what every speed-up here is measured against."""
    in_chunks(dev, job, 1, queues(dev, 1))


def two_tasks(dev: Device, tasks: list[Pair], queues: Sequence[Stream]) -> None:
    """The article's program: copy and add, twice, on one stream or on two."""
    for i, task in enumerate(tasks):
        queue = queues[i % len(queues)]
        queue.copy(task.d_a, task.h_a)
        queue.launch(vector_add(), reads=[task.d_a, task.d_b], writes=[task.d_c])
    dev.synchronize()


# -- what a trace says ----------------------------------------------------------------------


def lane_ns(trace: Trace) -> dict[str, int]:
    """Nanoseconds of work by lane of the device: ``h2d``, ``gpu``, ``d2h``."""
    return {lane: metrics.busy_ns(trace, lane) for lane in ("h2d", "gpu", "d2h")}


def moved(trace: Trace, kind: str) -> int:
    """Bytes moved or touched by the spans of one kind."""
    return int(trace.kind(kind)["bytes"].sum())


def bound_ns(lanes: dict[str, int], chunks: int) -> float:
    """The least time of a job in `chunks` parts: the first part passes through all lanes, then
    the longest lane works through the rest."""
    return (sum(lanes.values()) + (chunks - 1) * max(lanes.values())) / chunks


def speed_up_bound(chunks: int) -> float:
    """The same as a speed-up, with three equal lanes: 3n / (n + 2)."""
    return 3 * chunks / (chunks + 2)


def balanced_rounds(dev: Device) -> int:
    """The k for which ``rounds(k)`` takes as long as one copy of the job, measured on `dev`."""
    probe = job(dev, empty())
    lanes = lane_ns(timed(dev, serial, probe))
    target = (lanes["h2d"] + lanes["d2h"]) / 2

    def kernel_ns(k: int) -> int:
        part = slice(0, len(probe.d))

        def launch(dev: Device) -> None:
            dev.default_stream.launch(rounds(k), reads=[probe.d[part]], writes=[probe.d[part]])

        return lane_ns(timed(dev, launch))["gpu"]

    if kernel_ns(MOST_ROUNDS // 4) < 4 * kernel_ns(1):
        return 1  # this device's kernel does not grow with k: a CPU jumps to the result
    k = 1
    while kernel_ns(2 * k) < target and 2 * k < MOST_ROUNDS:
        k *= 2
    low, high = kernel_ns(k), kernel_ns(2 * k)
    if high <= low:
        return k  # its memory limits it: more rounds take no longer yet
    return round(k + k * max(target - low, 0) / (high - low))
