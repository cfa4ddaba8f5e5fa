"""Measured on the device: copies, pauses between ops, and kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from heterolab.device.base import Array, Buffer, Device, Kernel, Memory, Stream, Work
from heterolab.device.calibrate.figures import (
    Effort,
    Json,
    Recorded,
    median,
    spin,
    spread,
    table,
)
from heterolab.device.calibrate.lock import gil_share
from heterolab.pipeline.kernels import empty, rounds, vector_add
from heterolab.trace.trace import D2H, H2D, Span


def copies(device: Device, effort: Effort) -> Json:
    """Copies alone, by size, direction and memory kind: on the engine, and the host's time in the call."""
    stream = device.stream()
    engine: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for nbytes in effort.copy_bytes:
        there, also = device.buffer(nbytes, "uint8"), device.buffer(nbytes, "uint8")
        for memory in (Memory.PINNED, Memory.PAGEABLE):
            here = device.buffer(nbytes, "uint8", memory)
            here.write()[:] = 1
            for dst, src, kind in ((there, here, H2D), (here, there, D2H)):
                for span, call in _alone(device, stream, dst, src, effort.repeats):
                    engine[f"{kind} {memory.value}"][nbytes].append(span.end_ns - span.start_ns)
                    held = call.end_ns - (call.start_ns if kind == H2D else span.start_ns)
                    engine[f"{kind} {memory.value} held"][nbytes].append(max(held, 0))
        for span, _ in _alone(device, stream, also, there, effort.repeats):
            engine["inside"][nbytes].append(span.end_ns - span.start_ns)
    return {name: table(samples) for name, samples in engine.items()}


def _alone(device: Device, stream: Stream, dst: Buffer, src: Buffer, repeats: int) -> list[tuple[Span, Span]]:
    """(device span, call span) of copies with nothing else under way; the first is dropped."""
    with Recorded(device) as recorded:
        ops = []
        for _ in range(repeats + 1):
            ops.append(stream.copy(dst, src))
            stream.synchronize()
    spans, calls = recorded.on_device(), {s.op: s for s in recorded.calls("copy")}
    return [(spans[op], calls[op]) for op in ops[1:]]


def both_directions(device: Device, effort: Effort) -> float:
    """The speed of each direction while both are busy, relative to alone."""
    nbytes = effort.copy_bytes[-1]
    up, down = device.stream(), device.stream()
    one, two = device.buffer(nbytes, "uint8"), device.buffer(nbytes, "uint8")
    here, back = (device.buffer(nbytes, "uint8", "pinned") for _ in range(2))
    alone = [s.end_ns - s.start_ns for s, _ in _alone(device, up, one, here, effort.repeats)]
    with Recorded(device) as recorded:
        for _ in range(effort.repeats):
            up.launch(spin(200_000))  # both start together behind it
            down.wait(up.record())
            up.copy(one, here)
            down.copy(back, two)
            device.synchronize()
    beside = [s.end_ns - s.start_ns for s in recorded.on_device().values() if s.kind == H2D]
    return float(np.clip(median(alone) / median(beside), 0.05, 1.0))


def gaps(device: Device, effort: Effort) -> Json:
    """The shortest pause between two ops of one stream, by what they are, and through an event."""
    stream, other, nothing = device.stream(), device.stream(), empty()
    here, there = device.buffer(4096, "uint8", "pinned"), device.buffer(4096, "uint8")
    steps: dict[str, Callable[[Stream], int]] = {
        "copy": lambda s: s.copy(there, here),
        "back": lambda s: s.copy(here, there),
        "kernel": lambda s: s.launch(nothing),
    }
    pairs = {
        "copy_kernel": ("copy", "kernel"),
        "kernel_copy": ("kernel", "copy"),
        "kernel_kernel": ("kernel", "kernel"),
        "copy_copy": ("copy", "copy"),
        "turn": ("copy", "back"),
    }
    found: dict[str, list[float]] = defaultdict(list)
    with Recorded(device) as recorded:
        issued: list[tuple[str, int, int]] = []
        for _ in range(effort.repeats * 2):
            for name, (first, then) in pairs.items():
                stream.launch(spin(500_000))  # while it runs, the pair is enqueued
                issued.append((name, steps[first](stream), steps[then](stream)))
                stream.synchronize()
            stream.launch(spin(500_000))
            before = stream.launch(nothing)
            other.wait(stream.record())
            issued.append(("event", before, other.launch(nothing)))
            other.synchronize()
    spans = recorded.on_device()
    for name, before, after in issued:
        found[name].append(max(spans[after].start_ns - spans[before].end_ns, 0))
    return {name: spread(samples) for name, samples in found.items()}


PASSES = 3


def encoder_kernels(device: Device, model: Any, effort: Effort) -> Json:
    """Every kernel of the pipeline by its size: alone on the device, and the host's time for it.

    On a GPU a forward pass is hundreds of launches, and the GPU waits for them; so each is
    enqueued behind a kernel that spins until all of its launches have been made.
    """
    made = model.on(device)
    runs: dict[str, list[tuple[Kernel, list[Buffer], list[Buffer]]]] = defaultdict(list)
    dim = model.dim
    for batch, tokens in effort.forward:
        hidden, lengths = device.buffer((batch, tokens, dim)), device.buffer(batch, "int32")
        vectors = device.buffer((batch, dim))
        ids = _filled(device, np.full((batch, tokens), 2023, np.int32))
        words = _filled(device, np.ones((batch, tokens, dim), np.float32))
        results = (
            (made.top_k(3), device.buffer((batch, 2, 3))),
            (made.logits, device.buffer((batch, 49_152))),
        )
        for kernel, reads, writes in (
            (made.from_ids, [ids], [hidden, lengths]),
            (made.from_embeddings, [words], [hidden, lengths]),
            (made.pool, [hidden, lengths], [vectors]),
            *((kernel, [vectors], [result]) for kernel, result in results),
        ):
            runs[kernel.name].append((kernel, reads, writes))
    for batch in effort.images:
        hidden, lengths = device.buffer((batch, 196, dim)), device.buffer(batch, "int32")
        pixels = _filled(device, np.ones((batch, 3, 224, 224), np.float32))
        runs[made.from_images.name].append((made.from_images, [pixels], [hidden, lengths]))
    return {name: _kernel_table(device, several, effort) for name, several in runs.items()}


def _filled(device: Device, values: Any) -> Buffer:
    """A device buffer with `values`."""
    here = device.buffer(values.shape, values.dtype, "pinned")
    here.write()[...] = values
    there = device.buffer(values.shape, values.dtype)
    device.default_stream.copy(there, here)
    device.default_stream.synchronize()
    return there


def _kernel_table(
    device: Device, several: list[tuple[Kernel, list[Buffer], list[Buffer]]], effort: Effort
) -> Json:
    stream = device.stream()
    on_device: dict[int, list[float]] = defaultdict(list)
    on_host: dict[int, list[float]] = defaultdict(list)
    for run in several:  # the first use of a shape compiles kernels and makes pools
        stream.launch(*run)
        stream.synchronize()
    with Recorded(device) as recorded:
        issued: list[tuple[int, int]] = []
        # Some in a row, as a run of a pipeline does it (the weights are then partly in a cache),
        # and in passes, so that a disturbance does not hit all samples of one size.
        for _ in range(PASSES):
            for run in several:
                issued += _in_a_row(device, stream, run, effort)
    spans, calls = recorded.on_device(), {s.op: s for s in recorded.calls("launch")}
    for size, op in issued:
        on_device[size].append(spans[op].end_ns - spans[op].start_ns)
        on_host[size].append(calls[op].end_ns - calls[op].start_ns)
    host = table(on_host)
    return table(on_device) | {
        "host_ns": host["ns"],
        "source": "measured: alone on the device, all its launches enqueued before it began",
    }


def _in_a_row(
    device: Device, stream: Stream, run: tuple[Kernel, list[Buffer], list[Buffer]], effort: Effort
) -> list[tuple[int, int]]:
    """(size, op) of one kernel launched again and again; the first is not counted."""
    kernel, reads, writes = run
    size = kernel.work(reads, writes).size
    ops: list[int] = []
    end = device.host.now() + effort.stage_seconds * 1e9 / PASSES
    ahead = spin(100_000)
    while len(ops) <= 1 + effort.repeats // (2 * PASSES) and (len(ops) < 2 or device.host.now() < end):
        if device.source != "cpu-clock":
            stream.launch(ahead)
        start = device.host.now()
        ops.append(stream.launch(kernel, reads, writes))
        if len(ops) == 1:  # long enough for all launches, the next time
            ahead = spin(round(1.5 * (device.host.now() - start)) + 50_000)
        stream.synchronize()
    return [(size, op) for op in ops[1:]]


def kernel_gil_share(device: Device, model: Any) -> float:
    """The share of a forward pass in NumPy that holds the interpreter lock."""
    kernel = model.on(device).from_ids
    ids = np.full((8, 16), 2023, np.int32)
    hidden, lengths = np.empty((8, 16, model.dim), np.float32), np.empty(8, np.int32)
    shares = [gil_share(lambda: kernel.run(np, [ids], [hidden, lengths]), seconds=0.2) for _ in range(3)]
    return median(shares)


def arithmetic(device: Device, effort: Effort) -> Json:
    """What any kernel costs: a fixed part, arithmetic by type, memory traffic by bytes."""
    stream, n = device.stream(), 512
    fixed = _durations(device, stream, empty(), [], [], effort.repeats * 3)

    def matmul(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        xp.matmul(reads[0], reads[1], out=writes[0])

    square = Kernel("matmul", matmul, lambda reads, writes: Work(flops=2 * n**3))
    a, b, c = (_filled(device, np.ones((n, n), np.float32)) for _ in range(3))
    floats = _durations(device, stream, square, [a, b], [c], effort.repeats)
    # On a GPU enough rounds that starting the kernel does not count.
    steps, count = 16 if device.source == "cpu-clock" else 4096, 1 << 20
    x, y = (_filled(device, np.ones(count, np.uint32)) for _ in range(2))
    integers = _durations(device, stream, rounds(steps), [x], [y], effort.repeats)
    memory: dict[int, list[float]] = {}
    for elements in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
        u, v, w = (device.buffer(elements) for _ in range(3))
        taken = _durations(device, stream, vector_add(), [u, v], [w], effort.repeats)
        memory[12 * elements] = [max(ns - median(fixed), 1.0) for ns in taken]
    return {
        "fixed": spread(fixed),
        "flops_per_ns": {
            "float32": round(2 * n**3 / median(floats), 3),
            "int32": round(2 * steps * count / median(integers), 3),
        },
        "memory": table(memory),
    }


def _durations(
    device: Device, stream: Stream, kernel: Kernel, reads: list[Buffer], writes: list[Buffer], repeats: int
) -> list[float]:
    with Recorded(device) as recorded:
        ops = []
        for _ in range(repeats + 1):
            ops.append(stream.launch(kernel, reads, writes))
            stream.synchronize()
    spans = recorded.on_device()
    return [spans[op].end_ns - spans[op].start_ns for op in ops[1:]]
