"""Measure what the README states: python labs/measure.py [--device cuda] [--rounds 15]

The pipeline's throughput by payload and memory kind, on this machine's GPU. Settings take turns
within one run, since a host's speed wanders, and a ratio is the median of the ratios of
neighbours. Written to labs/recordings/measured.json; with
--readme that file's figures are put into the README, and nothing is measured.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import heterolab as hl
from heterolab.device.base import Device
from heterolab.device.cores import FastCores
from heterolab.pipeline.run import Run
from heterolab.trace import metrics
from heterolab.trace.trace import Trace

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- measured: written by labs/measure.py -->\n", "<!-- /measured -->"
OUT = Path(__file__).parent / "recordings" / "measured.json"
PAYLOADS = {"ids": 1024, "images_uint8": 1024, "images_float32": 512}
RETURNS = {"logits": 512}
MEMORY = ("pageable", "pinned", "mapped")
KNOBS: dict[str, Any] = {"batch": 32, "streams": 2, "workers": 2, "chunk": 32}


def settings() -> dict[str, tuple[int, dict[str, Any]]]:
    """By name: how many requests, and the pipeline's knobs."""
    chosen: dict[str, tuple[int, dict[str, Any]]] = {}
    for memory in MEMORY:
        for payload, n in PAYLOADS.items():
            chosen[f"{payload} {memory}"] = n, {**KNOBS, "payload": payload, "memory": memory}
        for returns, n in RETURNS.items():
            chosen[f"{returns} {memory}"] = n, {**KNOBS, "returns": returns, "memory": memory}
    return chosen


def serve(dev: Device, n: int, knobs: dict[str, Any]) -> Run:
    """One closed-loop run, saturated."""
    load = hl.closed_loop(n=n, in_flight=8 * KNOBS["batch"], seed=0)
    return hl.Pipeline(hl.models.encoder(), **knobs).run(load, on=dev)


def summary(values: list[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"median": round(float(middle), 4), "p10": round(float(low), 4), "p90": round(float(high), 4)}


def measure(dev: Device, rounds: int) -> dict[str, Any]:
    """Throughputs (requests/s), GPU shares, and ratios to pageable memory."""
    chosen = settings()
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    busy: dict[str, list[float]] = {name: [] for name in chosen}
    cores = FastCores()  # each run keeps to the cores that are fast then, see device/cores.py
    for turn in range(rounds + 1):
        order = list(chosen) if turn % 2 else list(reversed(chosen))
        for name in order:
            cores.choose()
            run = serve(dev, *chosen[name])
            if turn:  # the first turn warms up
                rates[name].append(metrics.throughput_per_s(run))
                busy[name].append(metrics.busy_ns(run.trace, "gpu") / run.trace.wall_ns)
    cores.release()
    rows = {}
    for name in chosen:
        what = name.split()[0]
        rows[name] = {
            "throughput_per_s": summary(rates[name]),
            "gpu_busy": summary(busy[name]),
            "over_pageable": summary(list(np.divide(rates[name], rates[f"{what} pageable"]))),
        }
    return rows


def table(report: dict[str, Any]) -> str:
    """The README's table of a report."""
    names = {
        "ids": "token ids in, best answers back",
        "images_uint8": "pictures in, uint8",
        "images_float32": "pictures in, float32",
        "logits": "token ids in, logits back",
    }
    knobs = ", ".join(f"{name}={value}" for name, value in report["knobs"].items())
    lines = [
        f"Requests per second through the five stages on an {report['device']} ({report['date']}; {knobs}; "
        f"eager CuPy; median of {report['rounds']} interleaved rounds):",
        "",
        "| over the link | pageable | pinned | pinned over pageable | GPU lane taken |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, words in names.items():
        pageable, pinned = report["rows"][f"{what} pageable"], report["rows"][f"{what} pinned"]
        gain = "× {median:.2f} ({p10:.2f}–{p90:.2f})".format_map(pinned["over_pageable"])
        lines.append(
            f"| {words} | {pageable['throughput_per_s']['median']:,.0f} | "
            f"{pinned['throughput_per_s']['median']:,.0f} | {gain} | "
            f"{pinned['gpu_busy']['median']:.0%} |"
        )
    lines += [
        "",
        "In brackets the 10th and 90th percentile of single rounds: a host's speed wanders. "
        f"{_lane(report['source'])} What the simulator predicts is in the next table.",
        "",
        *_lab_03(),
    ]
    return "\n".join(lines) + "\n"


def _lane(source: str) -> str:
    """What a busy GPU lane means where spans come from `source`."""
    if source == "cupti":
        return "The GPU lane is taken while a kernel runs (exact spans)."
    return (
        "The GPU lane counts as taken from a pass's first kernel to its last, waiting for launches included."
    )


def _lab_03() -> list[str]:
    """What lab 03's recordings say, in one sentence."""

    def wall_ns(name: str) -> int:
        return Trace.load(OUT.parent / f"03-{name}.json.gz").wall_ns

    second = wall_ns("pinned-1") / wall_ns("pinned-2")
    pinning = wall_ns("pageable-1") / wall_ns("pinned-1")
    counts = (2, 4, 8, 16, 32, 256)
    gains = ", ".join(f"× {wall_ns('chunks-1') / wall_ns(f'chunks-{n}'):.2f}" for n in counts)
    return [
        f"Lab 03 on the same GPU: pinning makes the article's program × {pinning:.1f} as fast, its second "
        f"stream × {second:.2f}. The balanced job on four streams, over one piece on one stream, both "
        f"pinned: {gains} in {', '.join(map(str, counts))} chunks. The simulator against 63 programs "
        "measured on it: "
        "`heterolab bench simulator tests/data/h200-open.json.gz`.",
    ]


def written(readme: str, report: dict[str, Any]) -> str:
    """The README with the report's table in its place."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + table(report) + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--readme", action="store_true", help="only put the figures into the README")
    options = parser.parse_args()
    if options.readme:
        README.write_text(written(README.read_text(), json.loads(options.out.read_text())))
        return
    dev = hl.open_device(options.device)
    report = {
        "device": dev.name,
        "source": dev.source,
        "date": datetime.now(UTC).date().isoformat(),
        "meta": dev.meta(),
        "heterolab": hl.__version__,
        "knobs": KNOBS,
        "rounds": options.rounds,
        "rows": measure(dev, options.rounds),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, row in report["rows"].items():
        rate, ratio = row["throughput_per_s"]["median"], row["over_pageable"]["median"]
        print(f"{name:<24} {rate:8.0f}/s  ×{ratio:.3f} pageable")


if __name__ == "__main__":
    main()
