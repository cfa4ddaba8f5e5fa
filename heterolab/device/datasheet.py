"""Profiles of GPUs that nobody measured: from the maker's datasheet, and stamped so.

A datasheet says how fast a GPU can be at best. How near to that programs come, and what the
software around it costs, is taken over from a machine that was measured: each of its times is
scaled by the ratio of the two datasheets. Run ``python -m heterolab.device.datasheet`` after
the measured profile has changed; a test compares the files in ``profiles/`` with it.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from heterolab.device.profile import BUILT_IN, Table

MEASURED = "h200"


@dataclass(frozen=True)
class Sheet:
    """What the maker states. Rates in TFLOP/s without sparsity, memory in GB/s, link in GB/s
    of one direction that a copy can reach."""

    name: str
    date: str
    source: str
    sms: int
    threads_per_sm: int
    blocks_per_sm: int
    memory_bytes: int
    memory_gb_s: float
    link_gb_s: float
    tflops: dict[str, float]


H200 = Sheet(
    name="NVIDIA H200",
    date="2024",
    source="NVIDIA H200 datasheet: 4.8 TB/s, fp32 67, tensor fp16 and bf16 990 TFLOP/s; PCIe 5 x16",
    sms=132,
    threads_per_sm=2048,
    blocks_per_sm=32,
    memory_bytes=141_000_000_000,
    memory_gb_s=4800,
    link_gb_s=55,
    tflops={"float32": 67, "float16": 990, "bfloat16": 990, "int32": 33.5},
)

SHEETS = {
    "a100": Sheet(
        name="NVIDIA A100 80GB",
        date="2021",
        source="NVIDIA A100 datasheet: 2.0 TB/s, fp32 19.5, tensor fp16 and bf16 312 TFLOP/s; PCIe 4 x16",
        sms=108,
        threads_per_sm=2048,
        blocks_per_sm=32,
        memory_bytes=80_000_000_000,
        memory_gb_s=2000,
        link_gb_s=25,
        tflops={"float32": 19.5, "float16": 312, "bfloat16": 312, "int32": 19.5},
    ),
    "t4": Sheet(
        name="NVIDIA T4",
        date="2018",
        source="NVIDIA T4 datasheet: 320 GB/s, fp32 8.1, tensor fp16 65 TFLOP/s; PCIe 3 x16, about 12 GB/s",
        sms=40,
        threads_per_sm=1024,
        blocks_per_sm=16,
        memory_bytes=16_000_000_000,
        memory_gb_s=320,
        link_gb_s=12,
        tflops={"float32": 8.1, "float16": 65, "int32": 8.1},
    ),
    "l4": Sheet(
        name="NVIDIA L4",
        date="2023",
        source="NVIDIA L4 datasheet: 300 GB/s, fp32 30.3, tensor fp16 and bf16 242 TFLOP/s with sparsity, "
        "half of it without; PCIe 4 x16. 58 SMs: what that fp32 rate comes to at its clock of 2.04 GHz; "
        "int32 at half of fp32, and 48 MB of L2, as in NVIDIA's Ada whitepaper",
        sms=58,
        threads_per_sm=1536,
        blocks_per_sm=24,
        memory_bytes=24_000_000_000,
        memory_gb_s=300,
        link_gb_s=25,
        tflops={"float32": 30.3, "float16": 121, "bfloat16": 121, "int32": 15.1},
    ),
    "rtx4090": Sheet(
        name="NVIDIA GeForce RTX 4090",
        date="2022",
        source="NVIDIA Ada whitepaper: 128 SMs, 72 MB of L2, 1008 GB/s, fp32 82.6, int32 41.3, tensor fp16 "
        "and bf16 165.2 TFLOP/s without sparsity, adding up in fp32 as torch does (fp16 adding up in "
        "fp16: 330.3); PCIe 4 x16",
        sms=128,
        threads_per_sm=1536,
        blocks_per_sm=24,
        memory_bytes=24_000_000_000,
        memory_gb_s=1008,
        link_gb_s=25,
        tflops={"float32": 82.6, "float16": 165.2, "bfloat16": 165.2, "int32": 41.3},
    ),
}


def derive(measured: dict[str, Any], sheet: Sheet, reference: Sheet = H200) -> dict[str, Any]:
    """The profile of the GPU of `sheet`, from a measured one and that one's own sheet."""
    profile = copy.deepcopy(measured)
    memory = reference.memory_gb_s / sheet.memory_gb_s
    link = reference.link_gb_s / sheet.link_gb_s
    note = f"{sheet.source}. Scaled from the measured {reference.name} by the ratio of the datasheets."

    profile["name"] = sheet.name
    profile.pop("managed", None)  # how a driver answers page faults is on no sheet
    profile["provenance"] = {"kind": "datasheet estimate", "date": sheet.date, "driver": "", "method": note}
    profile["limits"]["memory_bytes"] = sheet.memory_bytes
    for direction in ("h2d", "d2h"):
        scale(profile["copies"][direction], link)
    scale(profile["copies"]["inside"], memory)
    scale(profile["mapped"], link)
    add_slower_link(profile["pageable"]["d2h"], measured["copies"]["d2h"], profile["copies"]["d2h"])

    compute = profile["compute"]
    compute |= {
        "sms": sheet.sms,
        "threads_per_sm": sheet.threads_per_sm,
        "blocks_per_sm": sheet.blocks_per_sm,
    }
    compute["flops_per_ns"] = {
        dtype: round(rate * sheet.tflops[dtype] / reference.tflops[dtype], 1)
        for dtype, rate in compute["flops_per_ns"].items()
        if dtype in sheet.tflops
    }
    scale(compute["memory"], memory)
    profile["kernels"] = _kernels(profile["kernels"], sheet, reference)
    for section in ("copies", "pageable", "mapped", "compute"):
        profile[section]["source"] = note
    for kernel in profile["kernels"].values():
        kernel["source"] = note
    for section in ("host", "seam", "waiting", "workers", "gaps"):
        if profile.get(section):
            profile[section]["source"] = f"as measured with the {reference.name}: the software's"
    for cost in profile["cpu_costs"].values():
        cost["source"] = f"as measured on the {reference.name}'s host"
    return profile


def _kernels(measured: dict[str, Any], sheet: Sheet, reference: Sheet) -> dict[str, Any]:
    """Kernels known by name: matrix products scale with arithmetic, others with memory. One in
    a type that the GPU has no rate for (``gemm.bfloat16``) is left out."""
    kernels = {}
    for name, kernel in measured.items():
        dtype = dtype_of(name, reference.tflops)
        if dtype in sheet.tflops:
            fast, slow = (
                (reference.tflops[dtype], sheet.tflops[dtype])
                if by_arithmetic(name)
                else (reference.memory_gb_s, sheet.memory_gb_s)
            )
            scale(kernel, fast / slow)
            kernels[name] = kernel
    return kernels


def by_arithmetic(kernel: str) -> bool:
    """Whether a kernel known by name is limited by arithmetic: it is mostly matrix products."""
    return kernel.startswith(("gemm", "encoder.forward"))


def dtype_of(kernel: str, rates: Container[str]) -> str:
    """The type that a kernel known by name computes in: the end of its name, or float32."""
    suffix = kernel.rpartition(".")[2]
    return suffix if suffix in rates else "float32"


def scale(table: dict[str, Any], ratio: float) -> None:
    """Make what grows with size `ratio` times slower; the start of the table stays."""
    first = table["ns"][0]
    table["ns"] = [round(first + (ns - first) * ratio, 1) for ns in table["ns"]]


def add_slower_link(held: dict[str, Any], measured: dict[str, Any], scaled: dict[str, Any]) -> None:
    """A host that is held until the bytes have arrived waits for the slower link as well."""
    before = Table(tuple(measured["sizes"]), tuple(measured["ns"]))
    after = Table(tuple(scaled["sizes"]), tuple(scaled["ns"]))
    pairs = zip(held["sizes"], held["ns"], strict=True)
    held["ns"] = [round(ns + after.at(size) - before.at(size), 1) for size, ns in pairs]


def dumps(profile: dict[str, Any]) -> str:
    """A profile as JSON that one can read: what fits a line is on one line."""
    return _lines(profile, 0) + "\n"


def _lines(value: Any, indent: int) -> str:
    flat = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict) or len(flat) + indent < 100:
        return flat
    pad = " " * (indent + 2)
    entries = (f"{pad}{json.dumps(key)}: {_lines(entry, indent + 2)}" for key, entry in value.items())
    return "{\n" + ",\n".join(entries) + "\n" + " " * indent + "}"


def main() -> None:
    """Write the profiles anew that are made from the measured one."""
    from heterolab.device.imagined import one_memory

    measured = json.loads((BUILT_IN / f"{MEASURED}.json").read_text(encoding="utf-8"))
    made = {name: derive(measured, sheet) for name, sheet in SHEETS.items()}
    made["one_memory"] = dict(one_memory().raw)
    for name, profile in made.items():
        (BUILT_IN / f"{name}.json").write_text(dumps(profile), encoding="utf-8")


if __name__ == "__main__":
    main()
