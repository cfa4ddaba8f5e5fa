"""Kernels: what any of them costs, memory and arithmetic rates, and how they share the device."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from heterolab.device.base import Array, Kernel
from heterolab.device.calibrate.calls import WORK_NS, cold_calls
from heterolab.device.calibrate.engines import octaves
from heterolab.device.calibrate.figures import Json, median, spin
from heterolab.device.calibrate.noise import table_of
from heterolab.device.calibrate.rig import Arena, Rig, Step
from heterolab.device.curves import fit_curve
from heterolab.device.curves import octaves as knots_between
from heterolab.device.replay import gemm
from heterolab.pipeline.kernels import empty, rounds, vector_add

#: Blocks of the kernels that show how a grid shares the device take so long.
BLOCK_NS = 50_000
#: Products of m × m matrices.
PRODUCT_SIZES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
#: The product whose call is timed: the call does not depend on it.
CALLED = 512
#: Products longer than this on the device are measured no larger.
LONGEST_NS = 30_000_000
TYPES = ("float32", "float16", "bfloat16")
INTEGER_ROUNDS, INTEGER_COUNT = 4096, 1 << 20


def fixed(rig: Rig) -> Json:
    """The time of a kernel that does nothing: alone, and what a spinning one takes too much.

    The smaller of the two counts: the spin looks at a clock that some GPUs advance once a µs only.
    """

    def make(arena: Arena, ns: int) -> Step:
        kernel = spin(ns) if ns else empty()
        return lambda stream: stream.launch(kernel)

    rows = rig.durations("kernels that do nothing", [0, BLOCK_NS], make)
    alone, spun = rows[0]["median"], rows[BLOCK_NS]["median"] - BLOCK_NS
    least = min(value for value in (alone, spun) if value > 0)
    return {"fixed_ns": round(least, 1), "measured": {"empty": rows[0], "spin": rows[BLOCK_NS]}}


def vector_adds(rig: Rig) -> Json:
    """Vector add over its number of elements: in the L2 cache, and beyond."""
    add = vector_add()

    def make(arena: Arena, count: int) -> Step:
        a, b, c = (arena.floats(count, which) for which in range(3))
        return lambda stream: stream.launch(add, [a, b], [c])

    rows = rig.durations("vector add", octaves(1 << 10, rig.arena.most_elements), make)
    return table_of(rows, rig.noise, "vector add")


def memory_table(adds: Json, fixed_ns: float) -> Json:
    """bytes → ns of memory traffic, from vector adds less the time of any kernel."""
    return {
        "sizes": [12 * size for size in adds["sizes"]],
        "ns": [round(max(ns - fixed_ns, 1.0), 1) for ns in adds["ns"]],
    }


def integers(rig: Rig) -> Json:
    """The rate of 32-bit integer arithmetic, in operations a ns: by how much a kernel of many rounds
    on each number outlasts one of half as many."""

    def make(arena: Arena, steps: int) -> Step:
        kernel = rounds(steps)
        x, y = (arena.array(INTEGER_COUNT, "uint32", which) for which in range(2))
        return lambda stream: stream.launch(kernel, [x], [y])

    rows = rig.durations("integer arithmetic", [INTEGER_ROUNDS // 2, INTEGER_ROUNDS], make)
    half, whole = (rows[steps]["median"] for steps in (INTEGER_ROUNDS // 2, INTEGER_ROUNDS))
    rate = INTEGER_ROUNDS * INTEGER_COUNT / max(whole - half, 1.0)
    return {"rate": round(rate, 1), "measured": {str(steps): row for steps, row in rows.items()}}


# -- matrix products ---------------------------------------------------------------------------


def product(m: int, dtype: str) -> Kernel:
    """An m × m × m matrix product as torch does it, or CuPy where there is no torch.

    The operands are buffers of `dtype`, bfloat16 as uint16.
    """
    tensors: dict[tuple[int, ...], Any] = {}
    streams: dict[int, Any] = {}
    torch = importlib.import_module("torch") if torch_there() else None

    def run(xp: Any, reads: Sequence[Array], writes: Sequence[Array]) -> None:
        if torch is not None:
            arrays = (*reads, *writes)
            key = tuple(array.data.ptr for array in arrays)
            if key not in tensors:
                made = [torch.as_tensor(array, device="cuda") for array in arrays]
                tensors[key] = [t.view(torch.bfloat16) for t in made] if dtype == "bfloat16" else made
            a, b, c = tensors[key]
            pointer = xp.cuda.get_current_stream().ptr
            if pointer not in streams:
                streams[pointer] = torch.cuda.ExternalStream(pointer)
            with torch.cuda.stream(streams[pointer]):
                torch.matmul(a, b, out=c)
        else:
            xp.matmul(reads[0], reads[1], out=writes[0])

    return Kernel(f"gemm.{dtype}", run, lambda reads, writes: gemm(m, dtype))


@cache
def torch_there() -> bool:
    """Whether there is a torch that can use this GPU."""
    if importlib.util.find_spec("torch") is None:
        return False
    return bool(importlib.import_module("torch").cuda.is_available())


def product_sizes(arena: Arena) -> list[int]:
    """The products whose three matrices take at most an eighth of the device's memory."""
    return [m for m in PRODUCT_SIZES if 3 * 4 * m * m * 8 <= arena.device.limits.memory_bytes]


def _operands(arena: Arena, m: int, dtype: str) -> tuple[list[Any], list[Any]]:
    kept = "int16" if dtype == "bfloat16" else dtype
    most = product_sizes(arena)[-1]
    a, b, c = (arena.noise(most * most, kept, which).view(m, m) for which in range(3))
    return [a, b], [c]


def products(rig: Rig, types: Sequence[str]) -> dict[str, Json]:
    """Tables of matrix products by type, and their rates: {type: table and ``rate``}.

    A product's time grows with m³, a table in straight lines: between the measured sizes it follows
    a constant part and arithmetic at the rate of the largest one.
    """
    out = {}
    for dtype in types:
        sizes = product_sizes(rig.arena)

        def make(arena: Arena, m: int, dtype: str = dtype) -> Step:
            kernel, (reads, writes) = product(m, dtype), _operands(arena, m, dtype)
            return lambda stream: stream.launch(kernel, reads, writes)

        while len(sizes) > 6 and rig.roughly(make, sizes[-1]) > LONGEST_NS:
            sizes.pop()
        rows = rig.durations(f"products {dtype}", sizes, make)
        # A library has many kernels for it: the next larger product may get a faster one.
        ns = [rows[m]["median"] for m in sizes]
        rate = 2 * sizes[-1] ** 3 / ns[-1]
        start = max(ns[0] - 2 * sizes[0] ** 3 / rate, 1.0)

        def shape(m: float, start: float = start, rate: float = rate) -> float:
            return start + 2 * m**3 / rate

        table = fit_curve(sizes, ns, knots_between(sizes[0], 65536, 4), shape)
        out[dtype] = {
            "sizes": list(table.sizes),
            "ns": list(table.ns),
            "measured": {str(m): row for m, row in rows.items()},
            "rate": round(rate, 1),
            "source": f"measured: {'torch' if torch_there() else 'matmul'}, alone, from {sizes[0]} to "
            f"{sizes[-1]}; between and beyond by m³",
        }
    return out


def product_calls(rig: Rig, types: Sequence[str]) -> dict[str, Json]:
    """How long the host is held for a product of each type: ``warm``, and after work (``cold``)."""
    calls, m = {}, min(CALLED, product_sizes(rig.arena)[-1])
    for dtype in types:
        kernel, (reads, writes) = product(m, dtype), _operands(rig.arena, m, dtype)
        calls[dtype] = lambda lane, k=kernel, r=reads, w=writes: lane.launch(k, r, w)
    found = cold_calls(rig, calls)
    last = str(WORK_NS[-1])
    return {dtype: {"warm": found["warm"][dtype], "cold": found["work"][dtype][last]} for dtype in types}


def cold_product(calls: Json, work_ns: float) -> Json:
    """A product's ``host_ns`` and ``cold_host_ns``, from :func:`product_calls` and the scale on which
    the host's work makes calls cold (``host.cold_work_ns``)."""
    warm, share = calls["warm"]["median"], 1 - np.exp(-WORK_NS[-1] / work_ns)
    dearer = max(calls["cold"]["median"] - warm, 0.0) / float(share)
    return {"host_ns": warm, "cold_host_ns": round(dearer, 1), "calls": calls}


# -- sharing the device ------------------------------------------------------------------------


def waves(rig: Rig) -> Json:
    """Whether grids run in the waves that the device's attributes predict.

    For grids that fit once, with one block more, twice and three times: by how many block times
    they take longer than one block. And two grids of half the device side by side, and as many streams
    as there are here with a block each.
    """
    lane, other = rig.lanes[:2]
    found: dict[str, Json] = {}
    wrong = []
    one = _length(rig, [(lane, spin(BLOCK_NS))])
    for threads in (64, 256, 1024):
        room = capacity(rig.attributes, threads)
        for blocks in (room, room + 1, 2 * room, 3 * room):
            took = _length(rig, [(lane, spin(BLOCK_NS, blocks, threads))])
            measured, predicted = 1 + round((took - one) / BLOCK_NS), -(-blocks // room)
            found[f"{blocks} × {threads}"] = {"waves": measured, "predicted": predicted}
            if measured != predicted:
                wrong.append(f"{blocks} × {threads}: {measured} waves, not {predicted}")
    half = spin(BLOCK_NS, max(capacity(rig.attributes, 1024) // 2, 1), 1024)
    both = _length(rig, [(lane, half), (other, half)])
    many = _length(rig, [(each, spin(BLOCK_NS)) for each in rig.lanes])
    return {
        "grids": found,
        "two halves side by side": both < one + BLOCK_NS / 2,
        f"waves of {len(rig.lanes)} streams with a block each": 1 + round((many - one) / BLOCK_NS),
        "disagree": wrong,
    }


def capacity(attributes: Json, threads: int) -> int:
    """Blocks of `threads` that the device holds at once."""
    per_sm = min(attributes["threads_per_sm"] // threads, attributes["blocks_per_sm"])
    return int(attributes["sms"] * max(1, per_sm))


def _length(rig: Rig, launches: Sequence[tuple[Any, Kernel]]) -> float:
    """The time of the launches behind a spin, less that of the spin."""
    first = rig.lanes[0]

    def go() -> None:
        event = first.record()
        for lane, kernel in launches:
            if lane is not first:
                lane.wait(event)
            lane.launch(kernel)

    hold = rig.hold_ns(go)
    taken = [rig.wall(first, hold, go) - rig.wall(first, hold, first.record) for _ in range(3)]
    return median(taken)


def compute_section(
    attributes: Json, quiet: Json, adds: Json, made: Json | None, whole: Json | None, checked: Json | None
) -> Json:
    """The profile's ``compute``, from what the device says of itself, :func:`fixed`,
    :func:`vector_adds`, :func:`products`, :func:`integers` and :func:`waves`; the last three may be
    missing."""
    rates = {dtype: row["rate"] for dtype, row in (made or {}).items()}
    if whole is not None:
        rates["int32"] = whole["rate"]
    agree = "" if checked is None else ", which measured waves bear out"
    if checked and checked["disagree"]:
        agree = f"; measured waves differ: {'; '.join(checked['disagree'][:3])}"
    return {
        **{name: attributes[name] for name in ("sms", "threads_per_sm", "blocks_per_sm", "kernels")},
        "fixed_ns": quiet["fixed_ns"],
        "flops_per_ns": rates,
        "memory": memory_table(adds, quiet["fixed_ns"]),
        "measured": {"nothing": quiet["measured"], "int32": whole and whole["measured"]},
        "source": "measured: empty and spinning kernels, vector add, the largest products, rounds; "
        f"processors, threads, blocks: the device's attributes{agree}; kernels at once: CUDA's documentation",
    }
