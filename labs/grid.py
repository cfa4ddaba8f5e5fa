"""Predicted against measured over one full grid: python labs/grid.py --profile my-h200.json

Lab 05's pipeline at every combination of batch, streams, memory, workers and payload, on this
machine's GPU, and beside each point what the simulator says. A host's speed wanders, so the
grid is run in several passes and a point is the median of them; the costs of the host's own
work are taken from passes of calibration in between (see heterolab/device/calibrate/insitu.py),
so that both sides have seen the same minutes. And each run keeps to the cores that are fast at
that moment: on a rented machine they differ by a factor of two (see heterolab/device/cores.py).

Written to labs/recordings/grid.json, and the profile with those costs to --refreshed; with
--readme the file's figures are put into the README, and nothing is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import heterolab as hl
from heterolab.device.base import Device
from heterolab.device.profile import DeviceProfile
from heterolab.trace import metrics

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- grid: written by labs/grid.py -->\n", "<!-- /grid -->"
OUT = Path(__file__).parent / "recordings" / "grid.json"

KNOBS: dict[str, tuple[Any, ...]] = {
    "payload": ("ids", "embeddings", "images_uint8", "images_float32"),
    "batch": (4, 16, 64),
    "streams": (1, 2),
    "memory": ("pageable", "pinned", "mapped"),
    "workers": (1, 2),
}
#: What one may change to be faster; the payload is the work itself.
SETTINGS = ("batch", "streams", "memory", "workers")
#: A predicted best change counts as right where its measured result is this close to the best.
NEARLY_BEST = 0.95

Point = dict[str, Any]


def points() -> list[Point]:
    """Every combination of the knobs."""
    return [dict(zip(KNOBS, values, strict=True)) for values in product(*KNOBS.values())]


def serve(dev: Device, point: Point) -> dict[str, float]:
    """One closed-loop run, saturated: throughput (requests/s) and 90th percentile latency (ns)."""
    batch, slots = point["batch"], 2 * point["streams"]
    load = hl.closed_loop(n=max(16 * batch, 192), in_flight=2 * batch * slots, seed=0)
    pipeline = hl.Pipeline(hl.models.encoder(), chunk=min(batch, 32), ring=2, **point)
    run = pipeline.run(load, on=dev)
    assert len(run.answers) == len(load), run
    return {
        "throughput_per_s": metrics.throughput_per_s(run),
        "p90_ns": float(np.percentile(run.latencies_ns, 90)),
        "answers": len(run.answers),
    }


def predict(profile: str | DeviceProfile, point: Point) -> dict[str, float]:
    """What the simulator says of a point."""
    from heterolab.device.sim import SimDevice

    return serve(SimDevice.open(profile, values=False), point)


def measure(
    dev: Device, passes: int, between: Callable[[], object], settle: Callable[[], object]
) -> list[list[dict[str, float]]]:
    """By point, the results of each pass; `between` is called before each pass and at the end,
    `settle` before each run."""
    found: list[list[dict[str, float]]] = [[] for _ in points()]
    for turn in range(passes + 1):
        between()
        order = list(enumerate(points()))
        for i, point in order if turn % 2 else reversed(order):
            settle()
            result = serve(dev, point)
            if turn:  # the first pass warms up
                found[i].append(result)
        gc.collect()
    between()
    return found


def rows(measured: list[list[dict[str, float]]], predicted: list[dict[str, float]]) -> list[dict[str, Any]]:
    """One row a point: medians, spreads and the prediction."""
    table = []
    for point, results, guess in zip(points(), measured, predicted, strict=True):
        row: dict[str, Any] = {"point": point}
        for what in ("throughput_per_s", "p90_ns"):
            values = [result[what] for result in results]
            row[what] = {
                "median": round(median(values), 1),
                "low": round(min(values), 1),
                "high": round(max(values), 1),
                "predicted": round(guess[what], 1),
            }
        table.append(row)
    return table


def changes(point: Point) -> list[Point]:
    """Every other point that differs from it in one setting."""
    return [{**point, name: value} for name in SETTINGS for value in KNOBS[name] if value != point[name]]


def summary(table: list[dict[str, Any]]) -> dict[str, float]:
    """The errors over the grid, and how often the predicted best single change is (nearly) the best."""

    def errors(what: str) -> list[float]:
        return [abs(row[what]["predicted"] / row[what]["median"] - 1) for row in table]

    by_point = {json.dumps(row["point"]): row["throughput_per_s"] for row in table}
    right = 0
    for row in table:
        options = [by_point[json.dumps(option)] for option in changes(row["point"])]
        chosen = max(options, key=lambda option: option["predicted"])
        right += chosen["median"] >= NEARLY_BEST * max(option["median"] for option in options)
    return {
        "throughput_error_median": round(median(errors("throughput_per_s")), 4),
        "throughput_error_p90": round(float(np.percentile(errors("throughput_per_s"), 90)), 4),
        "p90_error_median": round(median(errors("p90_ns")), 4),
        "best_change_right": round(right / len(table), 4),
        "repeat_spread_median": round(
            median(row["throughput_per_s"]["high"] / row["throughput_per_s"]["low"] - 1 for row in table), 4
        ),
    }


def table_of(report: dict[str, Any]) -> str:
    """The README's table of a report: by payload, and over all."""
    names = {
        "ids": "token ids",
        "embeddings": "embeddings",
        "images_uint8": "pictures, uint8",
        "images_float32": "pictures, float32",
    }
    lines = [
        f"Lab 05's pipeline over a grid of {len(report['rows'])} points (batch {_list('batch')} × streams "
        f"{_list('streams')} × memory {_list('memory')} × workers {_list('workers')} × payload), measured on "
        f"an {report['device']} ({report['date']}, median of {report['passes']} passes), against the "
        "simulator with this machine's profile:",
        "",
        "| payload | requests/s measured | throughput, median error | p90 latency, median error "
        "| predicted best change is the best, or within 5 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, words in [*names.items(), ("", "**all**")]:
        chosen = [row for row in report["rows"] if what in ("", row["point"]["payload"])]
        found = summary(chosen)
        rates = [row["throughput_per_s"]["median"] for row in chosen]
        lines.append(
            f"| {words} | {min(rates):,.0f} to {max(rates):,.0f} | {found['throughput_error_median']:.0%} | "
            f"{found['p90_error_median']:.0%} | {found['best_change_right']:.0%} |"
        )
    spread = summary(report["rows"])["repeat_spread_median"]
    lines += ["", f"The measurement's own passes lie {spread:.0%} apart (median of slowest to fastest)."]
    return "\n".join(lines) + "\n"


def _list(knob: str) -> str:
    return "/".join(str(value) for value in KNOBS[knob])


def written(readme: str, report: dict[str, Any]) -> str:
    """The README with the report's table in its place."""
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + table_of(report) + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", type=Path, help="a profile of this machine, measured just before")
    parser.add_argument("--refreshed", type=Path, default=Path("refreshed.json"))
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--readme", action="store_true", help="only put the figures into the README")
    options = parser.parse_args()
    if options.readme:
        README.write_text(written(README.read_text(), json.loads(options.out.read_text())))
        return
    from heterolab.device.calibrate import Effort, insitu, write
    from heterolab.device.cores import FastCores

    dev = hl.open_device(options.device)
    effort = Effort.quick() if dev.source == "cpu-clock" else Effort.full()
    cores = FastCores()
    calibration = insitu.InRuns(dev, hl.models.encoder(), effort, cores)
    measured = measure(dev, options.passes, calibration.watch, cores.choose)
    cores.release()
    profile = insitu.refreshed(json.loads(options.profile.read_text()), calibration.costs())
    write(profile, options.refreshed)
    predicted = [predict(DeviceProfile.from_json(profile), point) for point in points()]
    report = {
        "device": dev.name,
        "source": dev.source,
        "date": datetime.now(UTC).date().isoformat(),
        "meta": dev.meta(),
        "heterolab": hl.__version__,
        "passes": options.passes,
        "cores": cores.summary(),
        "profile": profile["provenance"],
        "rows": rows(measured, predicted),
    }
    report["summary"] = summary(report["rows"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    print(table_of(report))
    print(json.dumps(report["summary"], indent=1))


if __name__ == "__main__":
    main()
