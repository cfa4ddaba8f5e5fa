"""Fit a simulated GPU's physics to measured programs, and report on programs it never saw.

The programs are dealt into three parts by a hash of their names (:func:`parts`). A fit sees two
of them, its report is about the third. It begins at :func:`~heterolab.device.neutral.neutral`,
numbers that have seen no program, and goes on in this order:

1. *Durations* of copies and kernels that ran with nothing beside them, from the traced runs:
   smooth tables over size.
2. *Calls* of the host, from the untraced passes, see ``hostcalls.py``.
3. *Holds*: how long a copy from or to pageable memory held the host.
4. *What no span shows alone* (pauses between engines, the start of an op, the return from a
   synchronise, two directions at once): coordinate descent on the makespans with the host's
   recorded times fed in, so that no noise of the host leaks into constants of the device.

What the parts cannot show: the *form* of the model, and settings such as the tables' stiffness,
were chosen with all the programs in view. Only the constants are new to the third part.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from heterolab.device.curves import fit_curve
from heterolab.device.hostcalls import descend, fit_calls, rounded
from heterolab.device.neutral import (
    LARGE_PRODUCTS,
    PAGEABLE,
    PAGEABLE_SHAPES,
    PRODUCT_SHAPES,
    SIZES_COPY,
    SIZES_GEMM,
    SIZES_PAGEABLE,
    SIZES_VADD,
    Json,
    Pairs,
    Shape,
    as_json,
    copy_shape,
    neutral,
    put_vector_add,
    vector_add_shape,
)
from heterolab.device.profile import DeviceProfile
from heterolab.device.programs import Program
from heterolab.device.replay import Player
from heterolab.device.score import kind_of

#: One measurement of a table: (size, ns, weight).
Point = tuple[float, float, float]

PARTS = 3
#: A program that is further off than this pulls at a constant no harder than this.
CAP = 0.10
#: What a program repeats counts at most so often in a table.
OFTEN = 4
#: Fewer measurements than this say too little: the neutral constant stays.
FEW = 4
#: Vector adds up to this size last as long as their data's way from memory or the L2 cache.
SMALL_VADD = 2**19


def parts(programs: Sequence[Program], deal: int = 0) -> list[list[Program]]:
    """The programs in :data:`PARTS` parts, each with its share of every family, dealt by a hash of
    their ids alone; `deal` is the number of the deal."""

    def lot(program: Program) -> tuple[str, str]:
        return program.family, hashlib.sha256(f"{deal}:{program.id}".encode()).hexdigest()

    drawn = sorted(programs, key=lot)
    mine = [{id(program) for program in drawn[part::PARTS]} for part in range(PARTS)]
    return [[p for p in programs if id(p) in those] for those in mine]


def fit(programs: Sequence[Program], base: Json) -> Json:
    """The profile `base` with its physics fitted to `programs`."""
    data = neutral(base)
    fit_durations(data, programs)
    fit_chunk(data, programs)
    fit_calls(data, programs)
    fit_holds(data, programs)
    fit_pauses(data, programs)
    fit_holds(data, programs)
    _say_so(data, len(programs))
    return data


def _say_so(data: Json, count: int) -> None:
    """Where the numbers come from, in each section's ``source``."""
    by = f"fitted to {count} measured stream programs (heterolab bench fit)"
    data["host"]["source"] = f"{by}: recorded calls by kind, medians of the passes; start and sync: makespans"
    data["copies"]["source"] = (
        f"{by}: h2d, d2h: traced spans, pinned, alone; both_speed, mapped_share: makespans under the "
        "recorded host; both_large: single measurement; inside: 3.13 TB/s as vector add reads and writes"
    )
    data["pageable"]["source"] = f"{by}: recorded calls; beyond their sizes single measurements"
    data["gaps"]["source"] = f"{by}: makespans under the recorded host"
    data["compute"]["source"] = (
        f"{by}: memory: vector add, traced spans; fixed: spin kernels; sms, threads, blocks: the maker; "
        "flops: single measurements of matrix products; int32: measured, rounds"
    )
    data["kernels"]["vector_add"]["source"] = f"{by}: traced spans, alone"
    for dtype in PRODUCT_SHAPES:
        data["kernels"][f"gemm.{dtype}"]["source"] = f"{by}: traced spans, alone; the largest: single ones"


# -- durations ---------------------------------------------------------------------------


def durations(programs: Sequence[Program]) -> dict[str, list[Point]]:
    """Ops that ran with nothing beside them, by kind. A size counts once a program, or as often
    as it ran there up to :data:`OFTEN`."""
    seen: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for program in programs:
        spans = program.traced.spans if program.traced else {}
        for i, (start, end) in spans.items():
            op = program.ops[i]
            beside = any(a < end and b > start for j, (a, b) in spans.items() if j != i)
            one_wave = op.get("blocks", 0) <= 132
            if not beside and one_wave:
                size = next(op[key] for key in ("bytes", "n", "m", "ns") if key in op)
                seen[program.id, kind_of(op), float(size)].append((end - start) * 1000)
    return _once(seen)


def _once(seen: dict[tuple[str, str, float], list[float]]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for (_, kind, size), values in seen.items():
        found[kind].append((size, median(values), min(len(values), OFTEN)))
    return found


def fit_durations(data: Json, programs: Sequence[Program]) -> None:
    """Tables of copies, vector adds, products and mapped reads; a kernel's fixed cost."""
    alone = durations(programs)
    for direction in ("h2d", "d2h"):
        data["copies"][direction] = _table(alone[f"{direction} pinned"], SIZES_COPY, copy_shape)
    if alone["spin"]:
        data["compute"]["fixed_ns"] = rounded(median(ns - block for block, ns, _ in alone["spin"]))
    put_vector_add(data, _vector_add(alone["vadd"]))
    for dtype, shape in PRODUCT_SHAPES.items():
        points = [*alone[f"gemm {dtype}"], *_beyond(alone[f"gemm {dtype}"], LARGE_PRODUCTS[dtype])]
        data["kernels"][f"gemm.{dtype}"] |= _table(points, SIZES_GEMM, shape)
    mapped = alone["vadd mapped"]
    if len(mapped) >= FEW:
        latency, per_byte = robust_line([4 * n for n, *_ in mapped], [ns for _, ns, _ in mapped])
        data["mapped"] = {"sizes": [0, 2**26], "ns": [rounded(latency), round(latency + per_byte * 2**26)]}


def _table(points: Sequence[Point], knots: Sequence[float], shape: Shape, **how: Any) -> Json:
    sizes, values, weights = np.array(points, float).reshape(-1, 3).T
    return as_json(fit_curve(sizes, values, knots, shape, weights, **how))


def _vector_add(points: Sequence[Point]) -> Json:
    """Small ones are faster when their data is in the L2 cache, as in a loop over the same
    buffers; no size tells which. So follow the fast ones there, and stiffly, the middle above."""
    small = np.array([size <= SMALL_VADD for size, *_ in points], bool)
    knots_small = np.array([size <= SMALL_VADD for size in SIZES_VADD[1:]])
    return _table(
        points,
        SIZES_VADD,
        vector_add_shape,
        stiffness=np.where(knots_small, 3.0, 0.1),
        quantile=np.where(small, 0.1, 0.5),
    )


def _beyond(points: Sequence[Point], single: Pairs) -> list[Point]:
    """Single measurements stand where the programs have none: outside their sizes."""
    sizes = [size for size, *_ in points] or [np.inf]
    return [(size, ns, 1.0) for size, ns in single if not min(sizes) <= size <= max(sizes)]


def robust_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the line with the least sum of relative deviations."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    weight = 1 / ys
    line = np.zeros(2)
    for _ in range(30):
        root = np.sqrt(weight)
        line = np.linalg.lstsq(np.stack((root, root * xs), 1), root * ys, rcond=None)[0]
        weight = 1 / (ys * np.maximum(np.abs(line[0] + line[1] * xs - ys), 1e-3 * ys))
    return float(line[0]), float(line[1])


# -- how long pageable copies hold the host -------------------------------------------------


def fit_chunk(data: Json, programs: Sequence[Program]) -> None:
    """How much of a large copy from pageable memory is staged before its first piece goes over
    the link: from where in the traced call the span on the device begins."""
    staged = []
    for program in programs:
        if program.traced is None:
            continue
        for i, (start, _) in program.traced.spans.items():
            op = program.ops[i]
            if op["op"] == "h2d" and op["host"] == "pageable" and op["bytes"] > 2 * 2**20:
                entered, left = program.traced.host_us[i]
                staged.append(op["bytes"] * (start - entered) / (left - entered))
    if len(staged) >= FEW:
        data["pageable"]["chunk_bytes"] = int(rounded(median(staged)))


def fit_holds(data: Json, programs: Sequence[Program]) -> None:
    """The tables of pageable copies, from how long the recorded calls held the host.

    A call that first waits for its stream holds the host longer than the table says; by how
    much, the simulator knows. So each measurement is corrected by what it predicts.
    """
    profile = DeviceProfile.from_json(data)
    if profile.pageable is None or profile.pageable.h2d is None:
        return
    player = Player(profile)
    tables = {"h2d": profile.pageable.h2d, "d2h": profile.pageable.d2h}
    seen: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for program in programs:
        held = [i for i, op in enumerate(program.ops) if op.get("host") == "pageable"]
        for one in program.passes if held else ():
            replay = player.replay(program, one.host_us)
            for i in held:
                op = program.ops[i]
                before = (one.host_us[i - 1][1], replay.exits_us[i - 1]) if i else (0.0, 0.0)
                measured, predicted = (one.host_us[i][1] - before[0], replay.exits_us[i] - before[1])
                table_us = tables[op["op"]].at(op["bytes"]) / 1000
                if predicted < 2 * table_us + 10 and (ours := table_us + measured - predicted) > 1:
                    seen[program.id, op["op"], float(op["bytes"])].append(ours * 1000)
    found = _once(seen)
    for way, shape in PAGEABLE_SHAPES.items():
        points = [*found[way], *_beyond(found[way], PAGEABLE[way])]
        data["pageable"][way] = _table(points, SIZES_PAGEABLE, shape)


# -- what no span shows alone ----------------------------------------------------------------


#: Constants that are one: a pause between two engines is a wait for the same kind of poll.
CONSTANTS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("gaps", "copy_kernel_ns"), ("gaps", "kernel_copy_ns"), ("gaps", "turn_ns")),
    (("gaps", "event_ns"),),
    (("gaps", "kernel_kernel_ns"),),
    (("gaps", "copy_copy_ns"),),
    (("gaps", "legacy_ns"),),
    (("host", "start_ns"),),
    (("host", "sync_ns"),),
    (("host", "sync_idle_ns"),),
    (("copies", "both_speed"),),
    (("copies", "mapped_share"),),
)

SHARES = ("both_speed", "mapped_share")


def recorded_loss(data: Json, programs: Sequence[Program]) -> float:
    """Mean over programs and passes of the makespan's relative error under the recorded host,
    each at most :data:`CAP`."""
    player = Player(DeviceProfile.from_json(data))
    errors = [
        abs(player.wall_us(program, one.host_us) / one.host_run_wall_us - 1)
        for program in programs
        for one in program.passes
    ]
    return float(np.mean(np.minimum(errors, CAP)))


def fit_pauses(data: Json, programs: Sequence[Program]) -> None:
    """The constants in :data:`CONSTANTS`, by coordinate descent on :func:`recorded_loss`."""

    def put(values: Sequence[float]) -> float:
        for paths, value in zip(CONSTANTS, values, strict=True):
            for section, name in paths:
                data[section][name] = min(value, 1.0) if name in SHARES else value
        return recorded_loss(data, programs)

    found, _ = descend([data[section][name] for ((section, name), *_) in CONSTANTS], put)
    put(found)
