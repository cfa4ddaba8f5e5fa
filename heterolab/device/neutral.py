"""Where a fit of an H200 begins: what one knows before any program has run.

Round numbers from the maker, and single measurements of one thing at a time in tight loops.
None of them has seen a stream program, so that a fit to some of those says something about the
others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from heterolab.device.curves import octaves
from heterolab.device.profile import Table

Json = dict[str, Any]
#: Size → ns: what a cost looks like, before its table is fitted.
Shape = Callable[[float], float]
#: (size, ns) of single measurements.
Pairs = Sequence[tuple[float, float]]

SIZES_COPY = octaves(256, 2**28)
SIZES_PAGEABLE = octaves(1024, 2**28)
SIZES_VADD = octaves(1024, 2**28)
SIZES_GEMM = octaves(128, 65536, 4)  # it grows with m³, a table with m: four knots an octave


def copy_shape(nbytes: float) -> float:
    """A copy on the link: a latency, and 55.3 GB/s, the difference of 256 and 64 MiB."""
    return 1000 + nbytes / 55.3


def pageable_shape(latency_ns: float) -> Shape:
    """A copy through the host's own memory, about 9 GB/s."""
    return lambda nbytes: latency_ns + nbytes / 9


def vector_add_shape(n: float) -> float:
    """A launch, and 12 bytes an element at 3.3 TB/s (float32, 256 Mi elements)."""
    return 1000 + 12 * n / 3300


def product_shape(flops_per_ns: float) -> Shape:
    """An m × m × m product at the rate of a large one."""
    return lambda m: 3000 + 2 * m**3 / flops_per_ns


PRODUCT_SHAPES = {
    "float32": product_shape(50_600),
    "float16": product_shape(765_000),
    "bfloat16": product_shape(799_000),
}
#: Products so large that their launch is nothing beside them: (m, ns).
LARGE_PRODUCTS: dict[str, Pairs] = {
    "float32": [(4096, 2.736e6), (8192, 2.1746e7)],
    "float16": [(4096, 2.001e5), (8192, 1.4368e6)],
    "bfloat16": [(4096, 1.8778e5), (8192, 1.3767e6)],
}
#: How long a copy from or to pageable memory holds the host: (bytes, ns). Between these sizes a
#: loop over the same bytes says little: it finds them in the cores' caches, a program does not.
PAGEABLE: dict[str, Pairs] = {
    "h2d": [(1024, 3069.0), (4096, 3572.0), (2**26, 11025637.0), (2**28, 41338935.0)],
    "d2h": [(1024, 8563.0), (4096, 9024.0), (2**26, 7185363.0), (2**28, 32541330.0)],
}
PAGEABLE_SHAPES = {"h2d": pageable_shape(4000), "d2h": pageable_shape(8000)}

_HOST = {
    "launch_ns": 5400,
    "copy_ns": 2800,
    "record_ns": 1150,
    "wait_ns": 1150,
    "between_ns": 200,
    "sync_ns": 3000,
    "sync_idle_ns": 6000,
    "start_ns": 3000,
    "submit_share": 0.9,
    # No measurement in a loop is cold: how long caches keep is a guess, that it costs nothing too.
    "cold_launch_ns": 0,
    "cold_copy_ns": 0,
    "cold_event_ns": 0,
    "cold_work_ns": 100_000,
    "cold_start_ns": 100_000,
    "cold_bytes": 1_000_000,
    "cold_bytes_factor": 0,
}
#: The pause between two timed events.
_PAUSE_NS = 1300
#: A product's call through torch, as an add's (10.6 µs) and a little more.
_PRODUCT_CALL_NS = 12_000


def neutral(base: Json) -> Json:
    """The profile `base` with its physics replaced by what one knows of an H200 before any
    program has run; what else is in it stays."""
    data = copy.deepcopy(base)
    data["host"] |= _HOST
    data["copies"] |= {
        "h2d": tabled(SIZES_COPY, copy_shape),
        "d2h": tabled(SIZES_COPY, copy_shape),
        "both_speed": 0.83,  # 256 MiB each way: 5.93 ms beside 4.93 alone
        "both_large_bytes": 2**26,
        "both_large_speed": 0.83,
        "mapped_share": 0.5,
    }
    data["pageable"] |= {way: tabled(SIZES_PAGEABLE, shape) for way, shape in PAGEABLE_SHAPES.items()}
    data["pageable"]["chunk_bytes"] = 2**20
    data["mapped"] = tabled([0, 2**26], lambda nbytes: 2000 + nbytes / 51.3)
    for pause in ("copy_kernel", "kernel_copy", "kernel_kernel", "copy_copy", "turn", "event", "legacy"):
        data["gaps"][f"{pause}_ns"] = _PAUSE_NS
    data["compute"]["fixed_ns"] = 500
    put_vector_add(data, tabled(SIZES_VADD, vector_add_shape))
    for dtype, shape in PRODUCT_SHAPES.items():
        call = {"host_ns": _PRODUCT_CALL_NS, "cold_host_ns": 0}
        data["kernels"][f"gemm.{dtype}"] |= tabled(SIZES_GEMM, shape) | call
    return data


def tabled(sizes: Sequence[float], shape: Shape) -> Json:
    """`shape` at these sizes, as a profile's table."""
    return {"sizes": list(sizes), "ns": [round(shape(size), 1) for size in sizes]}


def as_json(table: Table) -> Json:
    """A table as a profile's file holds it."""
    return {"sizes": list(table.sizes), "ns": list(table.ns)}


def put_vector_add(data: Json, table: Json) -> None:
    """Vector add by its name, and the same memory traffic of a kernel without an entry."""
    data["kernels"]["vector_add"] |= table
    fixed = data["compute"]["fixed_ns"]
    memory = [round(max(ns - fixed, 1.0), 1) for ns in table["ns"]]
    data["compute"]["memory"] = {"sizes": [12 * n for n in table["sizes"]], "ns": memory}
