"""What tracing costs: python labs/tracing_cost.py [--device cuda] [--rounds 9] [--out FILE.json]

The eager encoder at batch 32 (some hundred launches a pass, and the host is what limits it) and the
pipeline around it, with no device spans, with CUDA events, with exact spans (CUPTI) and, where torch
sees the GPU, inside torch.profiler. A ratio is the median over rounds of "traced over the untraced
one next to it". CUPTI serves one client a process and leaves nothing behind only once it is closed,
so each measurement opens its own device; and torch.profiler, which takes CUPTI for itself, comes
last. "Untraced, before CUPTI was ever loaded" shows whether a closed CUPTI is as good as none.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import heterolab as hl
from heterolab.device.base import Device
from heterolab.device.cores import FastCores
from heterolab.errors import HeteroLabError
from heterolab.pipeline.pipeline import Pipeline
from heterolab.trace import metrics
from heterolab.workload import questions

BATCH, PASSES, REQUESTS = 32, 40, 1024
KNOBS: dict[str, Any] = {"batch": BATCH, "streams": 2, "memory": "pinned", "workers": 2, "chunk": 32}
#: Label → the device's source of spans.
SOURCES = {"no spans": "off", "CUDA events": "events", "CUPTI, exact": "cupti"}
PROFILER, BEFORE, BASE = "torch.profiler (CUDA)", "no spans, before CUPTI", "no spans"
WHATS = ("encoder", "pipeline")


def encoder_rate(dev: Device, pipe: Pipeline) -> float:
    """Texts per second of the bare forward pass: launches one behind another, then one wait."""
    model = pipe.model
    rows = [model.tokenize([text])[0] for text in questions()[:BATCH]]
    ids = np.zeros((BATCH, max(map(len, rows))), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    forward = pipe.payload.kernel(model.on(dev))
    stream = dev.streams(1)[0]
    here = dev.buffer(ids.shape, "int32", "pinned")
    here.write()[...] = ids
    there = dev.buffer(ids.shape, "int32")
    hidden, lengths = dev.buffer((*ids.shape, model.dim)), dev.buffer(BATCH, "int32")
    stream.copy(there, here)
    stream.launch(forward, [there], [hidden, lengths])
    dev.synchronize()
    dev.collect()
    begun = dev.host.now()
    for _ in range(PASSES):
        stream.launch(forward, [there], [hidden, lengths])
    dev.synchronize()
    return BATCH * PASSES / (dev.host.now() - begun) * 1e9


def pipeline_rate(dev: Device, pipe: Pipeline) -> float:
    """Requests per second through all five stages, saturated."""
    return metrics.throughput_per_s(pipe.run(hl.closed_loop(n=REQUESTS, in_flight=8 * BATCH, seed=0), on=dev))


def measure(name: str, spans: str, within: AbstractContextManager[Any]) -> dict[str, Any]:
    """One measurement of each on a device of its own, and how long reading the spans took."""
    dev = hl.open_device(name, spans=spans)
    pipe = hl.Pipeline(hl.models.encoder(), **KNOBS)
    with within:
        found: dict[str, Any] = {"encoder": encoder_rate(dev, pipe)}
        begun = dev.host.now()
        dev.collect()
        found["reading_ms"] = (dev.host.now() - begun) / 1e6
        found["pipeline"] = pipeline_rate(dev, pipe)
    found |= {"notes": list(dev.host.recorder.notes), "meta": dev.meta(), "name": dev.name}
    dev.close()
    return found


@contextmanager
def profiled() -> Iterator[None]:
    """Inside torch.profiler, which records the GPU's work and nothing else."""
    torch = importlib.import_module("torch")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        yield


def torch_sees_the_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def summary(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


def rounds(variants: dict[str, Callable[[], dict[str, Any]]], count: int) -> dict[str, list[dict[str, Any]]]:
    """`count` rounds, each variant once a round and in turn from the front and from the back;
    one more round before them warms up. Each measurement keeps to the cores that are fast then
    (see heterolab/device/cores.py)."""
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in variants}
    with FastCores() as cores:
        for turn in range(count + 1):
            for label in list(variants) if turn % 2 else list(reversed(variants)):
                cores.choose()
                one = variants[label]()
                if turn:
                    found[label].append(one)
    return found


def row(found: list[dict[str, Any]], base: list[dict[str, Any]]) -> dict[str, Any]:
    """A variant's figures, and over its untraced neighbours."""
    made: dict[str, Any] = {}
    for what in WHATS:
        rates = [one[what] for one in found]
        made[what] = {"per_s": summary(rates)}
        if len(base) == len(found):
            made[what]["over_no_spans"] = summary(list(np.divide(rates, [one[what] for one in base])))
    made["reading_ms"] = summary([one["reading_ms"] for one in found])
    made["notes"] = sorted({note for one in found for note in one["notes"]})
    return made


def report(device: str, count: int) -> dict[str, Any]:
    """All measurements, with their provenance."""

    def on(spans: str, within: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Callable[[], Any]:
        return lambda: measure(device, spans, within())

    before = rounds({BEFORE: on("off")}, max(count // 3, 1))
    found = rounds({label: on(spans) for label, spans in SOURCES.items()}, count)
    rows = {BEFORE: row(before[BEFORE], [])}
    rows |= {label: row(ones, found[BASE]) for label, ones in found.items()}
    meta, name = found["CUPTI, exact"][0]["meta"], found["CUPTI, exact"][0]["name"]
    why_not = "torch is not there, or sees no GPU"
    if torch_sees_the_gpu():
        try:
            last = rounds({BASE: on("off"), PROFILER: on("off", profiled)}, max(count // 3, 1))
            rows[PROFILER] = row(last[PROFILER], last[BASE])
            why_not = ""
        except (HeteroLabError, RuntimeError) as error:
            why_not = str(error)
    return {
        "what": f"eager encoder (CuPy) at batch {BATCH}: {PASSES} passes; pipeline: {REQUESTS} requests",
        "device": name,
        "date": datetime.now(UTC).date().isoformat(),
        "meta": meta,
        "heterolab": hl.__version__,
        "knobs": KNOBS,
        "rounds": count,
        "rows": rows,
        "no_torch_profiler": why_not,
    }


def table(made: dict[str, Any]) -> str:
    """A report as a table in Markdown."""
    lines = [
        f"{made['what']}; {made['device']}, {made['date']}, measured, {made['rounds']} interleaved rounds:",
        "",
        "| traced with | encoder, texts/s | over no spans | pipeline, requests/s | over no spans |",
        "| --- | --- | --- | --- | --- |",
    ]
    for label, figures in made["rows"].items():
        cells = [label]
        for what in WHATS:
            rate, ratio = figures[what]["per_s"], figures[what].get("over_no_spans")
            cells.append("{median:,.0f} ({p10:,.0f}–{p90:,.0f})".format_map(rate))
            cells.append("× {median:.3f} ({p10:.3f}–{p90:.3f})".format_map(ratio) if ratio else "")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "In brackets the 10th and 90th percentile of single rounds."]
    if made["no_torch_profiler"]:
        lines.append(f"No torch.profiler: {made['no_torch_profiler']}.")
    for label, figures in made["rows"].items():
        lines += [f"{label}: {note}." for note in figures["notes"]]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="write the report here, as JSON")
    options = parser.parse_args()
    made = report(options.device, options.rounds)
    if options.out:
        options.out.write_text(json.dumps(made, indent=1) + "\n")
    print(table(made))


if __name__ == "__main__":
    main()
