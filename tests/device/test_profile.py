"""Device profiles: what is in them, and what is said of one that is damaged."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import heterolab as hl
from heterolab.device import datasheet
from heterolab.device.profile import BUILT_IN, DeviceProfile, Table
from heterolab.errors import ProfileError


def raw(name: str = "h200") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((BUILT_IN / f"{name}.json").read_text(encoding="utf-8"))
    return data


def paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every key of a profile's file, as a path."""
    if not isinstance(value, dict):
        return []
    return [p for key, entry in value.items() for p in ((*path, key), *paths(entry, (*path, key)))]


def put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


def take(data: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    data = copy.deepcopy(data)
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return data


#: What a file may leave out.
OPTIONAL = {
    "source",
    "date",
    "driver",
    "method",
    "streams",
    "process_job_ns",
    "pickle_ns_per_byte",
    "host_ns",
    "cold_host_ns",
    "gil",
    "waits",
    "chunk_bytes",
    "on_host_gil",
    "call_gil",
    "concurrent",
}
NEEDED = [
    path
    for path in paths(raw())
    if path[-1] not in OPTIONAL
    and not path[-1].startswith("cold_")
    and path[0] not in ("cpu_costs", "kernels", "notes", "seam")
    and "measured" not in path  # the spread behind a number, for people
    and path[:2] != ("compute", "flops_per_ns")
    and path not in (("pageable", "h2d"), ("managed",))
]


@pytest.mark.parametrize("name", DeviceProfile.names())
def test_every_built_in_profile_loads_and_says_where_it_comes_from(name: str) -> None:
    profile = DeviceProfile.load(name)
    assert profile.provenance.kind in ("measured", "datasheet estimate", "imagined")
    assert profile.provenance.method
    for section in (profile.host, profile.waiting, profile.workers, profile.copies, profile.compute):
        assert section.source, f"{type(section).__name__} does not say where it comes from"
    for costs in (profile.cpu_costs, profile.kernels):
        assert all(cost.source for cost in costs.values())


@pytest.mark.parametrize("path", NEEDED, ids=".".join)
def test_a_missing_number_is_named(path: tuple[str, ...]) -> None:
    with pytest.raises(ProfileError) as error:
        DeviceProfile.from_json(take(raw(), path), "mine.json")
    assert "mine.json" in str(error.value)
    assert ".".join(path) in str(error.value) or path in [("format",), ("version",)]


@pytest.mark.parametrize("value", ["7", None, -1, True, math.nan, math.inf, [], {}], ids=repr)
@pytest.mark.parametrize("path", [("host", "launch_ns"), ("gaps", "turn_ns")], ids=".".join)
def test_what_is_no_cost_is_refused(path: tuple[str, ...], value: object) -> None:
    with pytest.raises(ProfileError, match=rf"mine: {path[0]}\.{path[1]} is .*must be"):
        DeviceProfile.from_json(put(raw(), path, value), "mine")


DIVISORS = [
    *(("host", name) for name in ("cores", "cold_work_ns", "cold_bytes")),
    *(("copies", name) for name in ("both_speed", "both_large_speed", "mapped_share")),
    ("pageable", "chunk_bytes"),
    ("compute", "flops_per_ns", "float32"),
]


@pytest.mark.parametrize("path", DIVISORS, ids=".".join)
def test_what_a_cost_is_divided_by_is_not_zero(path: tuple[str, ...]) -> None:
    with pytest.raises(ProfileError, match=rf"mine: {'.'.join(path)} is 0; it must be more than 0"):
        DeviceProfile.from_json(put(raw(), path, 0), "mine")


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ({"sizes": [1, 2], "ns": [1]}, "as long as its sizes"),
        ({"sizes": [2, 1], "ns": [1, 1]}, "rising order"),
        ({"sizes": [1, 1], "ns": [1, 1]}, "rising order"),
        ({"sizes": [], "ns": []}, "list of numbers"),
        ({"sizes": [1], "ns": ["x"]}, "a number"),
        ({"sizes": [1]}, r"copies\.h2d\.ns"),
        ([1, 2], "JSON object"),
    ],
)
def test_a_damaged_table_is_refused(table: object, reason: str) -> None:
    with pytest.raises(ProfileError, match=reason):
        DeviceProfile.from_json(put(raw(), ("copies", "h2d"), table))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b"null", b"\xff\xfe", b'{"format": "else"}', b"[" * 100_000]
)
def test_a_file_that_is_no_profile(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.json"
    file.write_bytes(content)
    with pytest.raises(ProfileError, match=r"mine\.json"):
        DeviceProfile.load(file)


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"'h300'.*a100, cpu, h200, l4, one_memory, rtx4090, t4"):
        DeviceProfile.load("h300")


def test_a_share_is_at_most_one() -> None:
    with pytest.raises(ProfileError, match=r"cpu_costs\.batch\.gil"):
        DeviceProfile.from_json(put(raw(), ("cpu_costs", "batch", "gil"), 1.5))


def test_a_provenance_is_one_of_three() -> None:
    with pytest.raises(ProfileError, match="guessed"):
        DeviceProfile.from_json(put(raw(), ("provenance", "kind"), "guessed"))


def test_a_cost_that_was_not_measured_names_the_calibration() -> None:
    profile = DeviceProfile.load("h200")
    with pytest.raises(ProfileError, match=r"'parse'.*heterolab calibrate.*cpu_costs\.parse"):
        profile.cpu_cost("parse")
    with pytest.raises(ProfileError, match=r"float8.*heterolab calibrate"):
        profile.flops_per_ns("float8")


def test_a_profile_may_have_no_link() -> None:
    """A CPU that plays the device: no staging, no link, one kernel at once, on the host's cores."""
    data = put(put(raw(), ("pageable",), None), ("mapped",), None)
    profile = DeviceProfile.from_json(put(data, ("compute", "on_host_gil"), 0.3))
    assert profile.pageable is None
    assert profile.mapped is None
    assert profile.compute.on_host_gil == 0.3


tables = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)), min_size=1, max_size=6, unique_by=lambda p: p[0]
).map(lambda points: Table(*zip(*sorted(points), strict=True)))


@given(tables)
def test_a_table_goes_through_its_points(table: Table) -> None:
    for size, ns in zip(table.sizes, table.ns, strict=True):
        assert table.at(size) == pytest.approx(ns, abs=1e-6)
    assert table.at(-1) == table.ns[0], "flat below the first point"


def test_a_table_is_linear_between_and_beyond() -> None:
    table = Table((10, 20, 40), (100, 200, 300))
    assert table.at(15) == 150
    assert table.at(30) == 250
    assert table.at(80) == 500, "goes on with the last slope"


@pytest.mark.parametrize("name", datasheet.SHEETS)
def test_datasheet_profiles_are_made_from_the_measured_one(name: str) -> None:
    """Run ``python -m heterolab.device.datasheet`` after h200.json has changed."""
    derived = datasheet.derive(raw(), datasheet.SHEETS[name])
    assert raw(name) == derived
    assert (BUILT_IN / f"{name}.json").read_text(encoding="utf-8") == datasheet.dumps(derived)


def test_no_datasheet_gpu_is_faster_than_its_datasheet() -> None:
    """A kernel known by name gains at most what the better of the two ratios says."""
    h200 = DeviceProfile.load("h200")
    for name, sheet in datasheet.SHEETS.items():
        other = DeviceProfile.load(name)
        for nbytes in (1 << 10, 1 << 20, 1 << 28):
            assert other.copies.h2d.at(nbytes) >= h200.copies.h2d.at(nbytes)
            assert other.compute.memory.at(nbytes) >= h200.compute.memory.at(nbytes)
        for kernel, cost in other.kernels.items():
            dtype = datasheet.dtype_of(kernel, sheet.tflops)
            ratio = min(1, datasheet.H200.tflops[dtype] / sheet.tflops[dtype])
            assert cost.time.at(1e6) >= 0.999 * ratio * h200.kernels[kernel].time.at(1e6)


@pytest.mark.parametrize("name", [*datasheet.SHEETS, "one_memory"])
def test_what_is_not_measured_says_so_wherever_it_appears(name: str) -> None:
    dev, kind = hl.open_device(f"sim:{name}"), DeviceProfile.load(name).provenance.kind
    assert kind in ("datasheet estimate", "imagined")
    assert f"({kind})" in dev.name
    assert kind in repr(dev)
    run = hl.Pipeline(hl.models.encoder()).run(hl.closed_loop(n=4, in_flight=4), on=dev)
    assert f"({kind})" in run.stamp
    assert run.trace.meta["provenance"]["kind"] == kind
