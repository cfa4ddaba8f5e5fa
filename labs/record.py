"""Record lab traces on this machine's GPU: python labs/record.py [--device cuda] [NAME ...]

Each recording is a trace in labs/recordings/NAME.json.gz with its provenance: device, driver,
versions, what was run. The labs show it, stamped *replayed*, beside what runs in the notebook.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import heterolab as hl
from heterolab.device.base import Device
from heterolab.lab import streams
from heterolab.pipeline.kernels import rounds
from heterolab.trace.trace import Trace
from heterolab.workload import questions

RECORDINGS = Path(__file__).parent / "recordings"
CHUNKS = (1, 2, 4, 8, 16, 32, 64, 256)


def two_tasks(dev: Device, memory: str, count: int) -> Trace:
    """The article's program."""
    tasks = streams.pairs(dev, memory)
    return streams.timed(dev, streams.two_tasks, tasks, streams.queues(dev, count))


def chunks(dev: Device, count: int) -> Trace:
    """The balanced job in chunks on four streams (in one piece: on one)."""
    job = streams.job(dev, rounds(streams.balanced_rounds(dev)))
    return streams.timed(dev, streams.in_chunks, job, count, streams.queues(dev, 4 if count > 1 else 1))


def pipeline(dev: Device, **settings: str) -> Trace:
    """Lab 05's pipeline, saturated; the second run, since the first one warms up."""
    load = hl.closed_loop(n=128, in_flight=128, texts=questions()[:32])
    pipe = hl.Pipeline(hl.models.encoder(), batch=32, chunk=32, **settings)
    pipe.run(load, on=dev)
    return pipe.run(load, on=dev).trace


PROGRAMS: dict[str, Callable[[Device], Trace]] = {
    **{
        f"03-{memory}-{count}": partial(two_tasks, memory=memory, count=count)
        for memory in ("pageable", "pinned")
        for count in (1, 2)
    },
    **{f"03-chunks-{count}": partial(chunks, count=count) for count in CHUNKS},
    **{
        f"05-{payload}-{memory}": partial(pipeline, payload=payload, memory=memory)
        for payload in ("ids", "images_uint8", "images_float32")
        for memory in ("pageable", "pinned")
    },
    **{
        f"05-logits-{memory}": partial(pipeline, returns="logits", memory=memory)
        for memory in ("pageable", "pinned")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which ones; all by default: {', '.join(PROGRAMS)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RECORDINGS)
    options = parser.parse_args()
    dev = hl.open_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or PROGRAMS:
        trace = PROGRAMS[name](dev)
        trace = replace(trace, meta={**trace.meta, "recording": name, "heterolab": hl.__version__})
        path = trace.save(options.out / f"{name}.json.gz")
        print(f"{path.name}: {len(trace)} spans, {trace.wall_ns / 1e6:.2f} ms, {trace.stamp}")


if __name__ == "__main__":
    main()
