"""Machines that nobody has built: a profile with something changed, stamped *imagined*.

Start from a machine whose costs are known, say what is different, and open the result::

    npu = hl.imagined(
        "an NPU",
        base="h200",
        copies={"channels": 1, "both_speed": 0.5},  # one queue for copies, in and out in turn
        compute={"kernels": 1, "flops_per_ns": {"int8": 400_000}},
        faster={"link": 0.25, "arithmetic": 2},
    )
    npu.save("npu.json")
    dev = hl.open_device("sim:npu.json")

``profiles/README.md`` explains every field. What is not named keeps the base's value, so a
prediction for such a machine is as good as the assumption that the rest stays the same.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from heterolab.device import profile as profiles
from heterolab.device.datasheet import MEASURED, add_slower_link, by_arithmetic, dtype_of, scale
from heterolab.device.profile import DeviceProfile, Provenance, Table
from heterolab.errors import ProfileError

Json = dict[str, Any]

#: The kinds of section that a profile's file has: those with fields (and the class that says which),
#: those whose entries have names of their own, and those that are one table.
_KINDS = {
    field.name: getattr(profiles, str(field.type).partition(" ")[0], None) for field in fields(DeviceProfile)
}
_NO_SECTION = (Provenance, Table)
SECTIONS = {name: kind for name, kind in _KINDS.items() if is_dataclass(kind) and kind not in _NO_SECTION}
NAMED = ("cpu_costs", "kernels")
TABLES = tuple(name for name, kind in _KINDS.items() if kind is Table)
#: What :func:`imagined` can make faster as a whole, beside the arithmetic of one type.
PARTS = ("link", "memory", "arithmetic", "host")
#: What belongs to the numbers as they were measured, and not to others.
MEASURED_ONLY = ("p10", "p90", "measured")


def imagined(
    name: str,
    base: str | Path | DeviceProfile = MEASURED,
    *,
    faster: Mapping[str, float] | None = None,
    because: str = "",
    **changes: Any,
) -> DeviceProfile:
    """A profile like `base`, with changes.

    Parameters
    ----------
    name
        What the machine is called, wherever its results are shown.
    base
        A built-in profile's name, a JSON file, or a profile.
    faster
        Parts that are so many times as fast (0.5: half as fast). ``link``: copies and reads over
        the link. ``memory``: the device's own memory. ``arithmetic``: all matrix products and
        arithmetic rates; one type's, by its name: ``float16``. ``host``: the host's calls, its
        waiting and its stages. What does not depend on the size (the start of a copy, the
        launches of a small kernel) stays as it is, but for ``host``.
    because
        What the machine is meant to be; it becomes the profile's ``provenance.method``.
    **changes
        By section of the file, its fields with other values: ``limits={"streams": 4}``. None takes
        away what a machine need not have: ``pageable=None``, ``mapped=None``. They are made after
        `faster`.

    Raises
    ------
    ProfileError
        A section or field does not exist (the message names the nearest that does), or a value
        cannot be used.
    """
    known = base if isinstance(base, DeviceProfile) else DeviceProfile.load(base)
    raw: Json = copy.deepcopy(dict(known.raw))
    if not raw:
        raise ProfileError(f"{known.name} was made in code; give its name or its file as base=.")
    raw.pop("notes", None)  # they tell how the base was measured
    for part, factor in (faster or {}).items():
        _make_faster(raw, part, factor)
    for section, change in changes.items():
        _change(raw, section, change)
    told = [*(f"{part} × {factor:g}" for part, factor in (faster or {}).items()), *changes]
    raw["name"] = name
    raw["provenance"] = {
        "kind": "imagined",
        "date": "",
        "driver": "",
        "method": because or f"the {known.name} ({known.stamp}), changed: {', '.join(told) or 'nothing'}",
    }
    return DeviceProfile.from_json(raw, f"imagined({name!r})")


def one_memory(base: str | Path | DeviceProfile = MEASURED) -> DeviceProfile:
    """The built-in ``one_memory``: CPU and GPU share a memory as fast as the GPU's own was.

    There is no link. A copy is one within that memory, whatever kind the host's buffer is of,
    and a kernel reads mapped host memory as if it were the device's. Two copies at once share it.
    """
    known = base if isinstance(base, DeviceProfile) else DeviceProfile.load(base)
    inside = copy.deepcopy(known.raw["copies"]["inside"])
    inside["ns"][0] = min(inside["ns"][0], known.raw["copies"]["h2d"]["ns"][0])
    return imagined(
        "one memory for CPU and GPU",
        known,
        because=f"the {known.name} ({known.stamp}) without a link: its memory serves the CPU as well. "
        "Copies take as long as within that memory, pageable ones hold nobody, mapped memory is the "
        "device's own. All else is as it was, the host's calls included.",
        limits={"pinned_bytes": known.limits.memory_bytes},
        copies={"h2d": inside, "d2h": inside, "both_speed": 0.5, "both_large_speed": 0.5},
        pageable=None,
        mapped=None,
        managed={"fault_ns": 0, "bytes_per_ns": 1e9},  # nothing moves
    )


# -- changes by name ---------------------------------------------------------------------


def _change(raw: Json, section: str, change: Any) -> None:
    """Change one section of a profile's file."""
    _must_be_known(section, [*SECTIONS, *NAMED, *TABLES], "a profile has no section")
    if change is None:
        raw[section] = None
        return
    if not isinstance(change, Mapping):
        raise ProfileError(f"{section}={change!r} must be the section's fields, as in {section}={{...}}.")
    if section in SECTIONS:
        names = [spec.name for spec in fields(SECTIONS[section])]
        for field in change:
            _must_be_known(field, names, f"{section} has no field")
    elif section in NAMED:
        for entry, value in change.items():
            whole = isinstance(value, Mapping) and {"sizes", "ns"} <= value.keys()
            if not whole:  # a new one needs its table
                _must_be_known(entry, list(raw.get(section) or {}), f"{section} has no entry")
    raw[section] = _merged(raw.get(section) or {}, change)
    if section not in NAMED:
        raw[section]["source"] = "imagined"


def _merged(old: Json, change: Mapping[str, Any]) -> Json:
    """`old` with the values of `change`; what was measured with the old values goes."""
    merged = {key: value for key, value in old.items() if key not in MEASURED_ONLY}
    for key, value in change.items():
        before = merged.get(key)
        nested = isinstance(value, Mapping) and isinstance(before, dict)
        merged[key] = _merged(before, value) if nested else copy.deepcopy(value)  # type: ignore[arg-type]
    if "ns" in change and "source" in merged:
        merged["source"] = "imagined"
    return merged


def _must_be_known(name: str, known: list[str], what: str) -> None:
    if name not in known:
        near = get_close_matches(name, known, 1, 0.4)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ProfileError(f"{what} {name!r}. {hint}There are: {', '.join(known)}.")


# -- changes of a whole part -------------------------------------------------------------


def _make_faster(raw: Json, part: str, factor: float) -> None:
    rates = raw["compute"]["flops_per_ns"]
    _must_be_known(part, [*PARTS, *rates], "faster= has no part")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < float("inf"):
        raise ProfileError(f"faster={{{part!r}: {factor!r}}}: give a number above 0; 2 is twice as fast.")
    if part == "link":
        _make_link_faster(raw, factor)
    elif part == "memory":
        scale(raw["copies"]["inside"], 1 / factor)
        scale(raw["compute"]["memory"], 1 / factor)
        _make_kernels_faster(raw, [name for name in raw["kernels"] if not by_arithmetic(name)], factor)
    elif part == "host":
        _make_host_faster(raw, factor)
    else:
        types = list(rates) if part == "arithmetic" else [part]
        for dtype in types:
            rates[dtype] *= factor
        mine = [n for n in raw["kernels"] if by_arithmetic(n) and dtype_of(n, rates) in types]
        _make_kernels_faster(raw, mine, factor)


def _make_link_faster(raw: Json, factor: float) -> None:
    before = copy.deepcopy(raw["copies"]["d2h"])
    for direction in ("h2d", "d2h"):
        scale(raw["copies"][direction], 1 / factor)
    raw["copies"]["source"] = "imagined"
    if raw.get("mapped"):
        scale(raw["mapped"], 1 / factor)
        raw["mapped"]["source"] = "imagined"
    if raw.get("managed"):
        raw["managed"]["bytes_per_ns"] *= factor
        raw["managed"]["source"] = "imagined"
    if raw.get("pageable"):
        add_slower_link(raw["pageable"]["d2h"], before, raw["copies"]["d2h"])
        raw["pageable"]["source"] = "imagined"


def _make_kernels_faster(raw: Json, names: list[str], factor: float) -> None:
    raw["compute"]["source"] = "imagined"
    for name in names:
        kernel = raw["kernels"][name] = _merged(raw["kernels"][name], {})
        scale(kernel, 1 / factor)
        kernel["source"] = "imagined"


def _make_host_faster(raw: Json, factor: float) -> None:
    """All of the host's times: they are the fields of its sections whose names end in ``_ns``."""
    for section in ("host", "seam", "waiting", "workers"):
        if raw.get(section):
            quicker = {k: v / factor for k, v in raw[section].items() if k.endswith("_ns") and v is not None}
            raw[section] = _merged(raw[section], quicker) | {"source": "imagined"}
    for name, cost in raw["cpu_costs"].items():
        raw["cpu_costs"][name] = _merged(cost, {"ns": [ns / factor for ns in cost["ns"]]})
    for name, kernel in raw["kernels"].items():
        quicker = {
            key: _divided(kernel[key], factor) for key in ("host_ns", "cold_host_ns") if kernel.get(key)
        }
        raw["kernels"][name] = _merged(kernel, quicker)


def _divided(value: Any, factor: float) -> Any:
    return [one / factor for one in value] if isinstance(value, list) else value / factor
