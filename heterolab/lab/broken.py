"""Lab 03, exercise 2: four programs that do not overlap, as the student first meets them.

Each makes its job, deals it out in chunks, and returns it. The notebook holds the same text: a
test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heterolab.device.base import Device, Kernel, Stream
from heterolab.lab import streams
from heterolab.lab.streams import Job

CHUNKS = 8
CAUSES = ("pageable", "default stream", "sync", "one chunk", "cannot")


def program_a(dev: Device, kernel: Kernel, queues: Sequence[Stream]) -> Job:
    job = streams.job(dev, kernel, memory="pageable")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


def program_b(dev: Device, kernel: Kernel, queues: Sequence[Stream]) -> Job:
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        dev.default_stream.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


def program_c(dev: Device, kernel: Kernel, queues: Sequence[Stream]) -> Job:
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
        queue.synchronize()
    return job


def program_d(dev: Device, kernel: Kernel, queues: Sequence[Stream]) -> Job:
    job = streams.job(dev, kernel, memory="pinned")
    for i, part in enumerate(job.parts(8)):
        queue = queues[i % 4]
        queue.copy(job.d[part], job.h_in[part])
        queue.launch(kernel, [job.d[part]], [job.d[part]])
        queue.copy(job.h_out[part], job.d[part])
    return job


@dataclass(frozen=True)
class Broken:
    """A program, what is wrong with it, how many times the balanced work it gets, and whether
    its streams leave the default stream alone."""

    program: Callable[..., Job]
    cause: str
    work: int = 1
    non_blocking: bool = True


PROGRAMS = {
    "a": Broken(program_a, "pageable"),
    "b": Broken(program_b, "default stream", non_blocking=False),
    "c": Broken(program_c, "sync"),
    "d": Broken(program_d, "cannot", work=10),
}
