"""The measuring method itself: a simulated machine, measured, gives back its own constants.

The measurements use what any device has (streams, events, a clock, spans), so what they find on a
machine whose truth is known says what they are worth on one whose truth is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heterolab as hl
from heterolab.device.calibrate import calls, compute, engines, gpu
from heterolab.device.calibrate.bench import SeamBench
from heterolab.device.calibrate.noise import Noise
from heterolab.device.calibrate.parts import Parts, quiet
from heterolab.device.calibrate.rig import Rig
from heterolab.device.profile import DeviceProfile, Table
from heterolab.device.programs import load_programs
from heterolab.device.replay import Player
from heterolab.device.sim import SimDevice
from heterolab.errors import InputError

PROGRAMS = Path(__file__).parent.parent / "data/h200-open.json.gz"


def bare(profile: DeviceProfile) -> DeviceProfile:
    """`profile` with calls that cost the same however they are made."""
    return replace(profile, seam=None)


def rig_of(profile: DeviceProfile, jitter: float = 0.0, exact: bool = True) -> Rig:
    """A simulated device to be measured; without jitter one pass of one sample says all."""
    seeds = iter(range(1000))

    def opened() -> SimDevice:
        return SimDevice.open(profile, races="off", values=False, jitter=jitter, seed=next(seeds))

    own = profile.compute
    attributes = {name: getattr(own, name) for name in ("sms", "threads_per_sm", "blocks_per_sm", "kernels")}
    attributes["concurrent_managed_access"] = profile.managed is not None
    noise, repeats = (Noise(3), 4) if jitter else (Noise(1), 1)
    rig = Rig(SeamBench(opened()), opened, attributes, noise, repeats)
    if not exact:
        rig.exact = False
    return rig


def recovered(profile: DeviceProfile, rig: Rig) -> DeviceProfile:
    """The profile that measuring the simulated `profile` gives."""
    parts = Parts(quiet, gpu.PLAN)
    types = [dtype for dtype in compute.TYPES if f"gemm.{dtype}" in profile.kernels]
    measured = gpu.measure(rig, parts, types)
    assert not parts.failed
    found = gpu.sections(rig, measured, profile.host.cores, parts.failed)
    assert not parts.failed
    kernels = {**profile.raw["kernels"], **found.pop("kernels")}
    return DeviceProfile.from_json({**profile.raw, "seam": None, **found, "kernels": kernels})


def deviations(truth: Table, found: Table, first: float, last: float) -> float:
    """The largest relative deviation of two tables between two sizes."""
    return max(abs(found.at(n) / truth.at(n) - 1) for n in np.geomspace(first, last, 200))


@pytest.fixture(scope="module")
def h200() -> DeviceProfile:
    return bare(DeviceProfile.load("h200"))


@pytest.fixture(scope="module")
def found(h200: DeviceProfile) -> DeviceProfile:
    return recovered(h200, rig_of(h200))


# -- constants come back ------------------------------------------------------------------

#: Numbers of a profile that are measured, and how far off they may come back. How many bytes staged
#: make calls cold hides behind how many of them a measurement stages.
BACK = {
    "host": {
        **dict.fromkeys(("launch_ns", "copy_ns", "record_ns", "wait_ns", "between_ns"), 0.001),
        **dict.fromkeys(("sync_ns", "sync_idle_ns", "start_ns"), 0.001),
        **dict.fromkeys(("cold_launch_ns", "cold_copy_ns", "cold_event_ns", "cold_work_ns"), 0.02),
        "cold_start_ns": 0.03,
        "cold_bytes": 0.15,
        "cold_bytes_factor": 0.05,
    },
    "copies": {"both_speed": 0.01, "both_large_speed": 0.01, "mapped_share": 0.01, "channels": 0.0},
    "pageable": {"chunk_bytes": 0.01},
    "gaps": dict.fromkeys(
        ("copy_kernel_ns", "kernel_copy_ns", "kernel_kernel_ns", "copy_copy_ns", "turn_ns", "event_ns"),
        0.01,
    )
    | {"legacy_ns": 0.01},
    "compute": {"fixed_ns": 0.01},
    "managed": {"group_bytes": 0.0, "fault_ns": 0.01, "bytes_per_ns": 0.01},
}


@pytest.mark.parametrize("section", BACK)
def test_a_simulated_gpus_constants_come_back(h200, found, section: str) -> None:
    for name, within in BACK[section].items():
        truth, back = getattr(getattr(h200, section), name), getattr(getattr(found, section), name)
        assert back == pytest.approx(truth, rel=within), f"{section}.{name}"


TABLES: dict[str, Callable[[DeviceProfile], Table | None]] = {
    "h2d": lambda p: p.copies.h2d,
    "d2h": lambda p: p.copies.d2h,
    "inside": lambda p: p.copies.inside,
    "pageable h2d": lambda p: p.pageable and p.pageable.h2d,
    "pageable d2h": lambda p: p.pageable and p.pageable.d2h,
    "mapped": lambda p: p.mapped,
    "vector add": lambda p: p.kernels["vector_add"].time,
    "memory": lambda p: p.compute.memory,
    "fp32 products": lambda p: p.kernels["gemm.float32"].time,
    "bf16 products": lambda p: p.kernels["gemm.bfloat16"].time,
}


@pytest.mark.parametrize("name", TABLES)
def test_a_simulated_gpus_tables_come_back(h200, found, name: str) -> None:
    truth, back = TABLES[name](h200), TABLES[name](found)
    assert truth is not None
    assert back is not None
    first, last = (128, 8192) if "products" in name else (4096, 1 << 28)
    assert deviations(truth, back, first, last) < 0.03


def test_a_host_that_faults_is_measured(h200, found) -> None:
    """The H200's own way back is not known: the simulator takes it as the way there."""
    assert found.managed.host_fault_ns == pytest.approx(h200.managed.fault_ns, rel=0.01)


def test_integer_arithmetic_and_the_hosts_calls_for_products_come_back(h200, found) -> None:
    assert found.flops_per_ns("int32") == pytest.approx(h200.flops_per_ns("int32"), rel=0.01)
    for dtype in compute.TYPES:
        truth, back = h200.kernels[f"gemm.{dtype}"], found.kernels[f"gemm.{dtype}"]
        assert truth.host is not None
        assert back.host is not None
        assert back.host.at(512) == pytest.approx(truth.host.at(512), rel=0.01)
        assert back.cold_host_ns == pytest.approx(truth.cold_host_ns, rel=0.02)


# -- what is measured predicts what the machine does ---------------------------------------


def apart(one: DeviceProfile, other: DeviceProfile) -> list[float]:
    """By how much the predictions for the measured programs differ, relative."""
    players = Player(one), Player(other)
    walls = [[player.wall_us(program) for player in players] for program in load_programs(PROGRAMS)]
    return [abs(b / a - 1) for a, b in walls]


def test_programs_run_on_the_measured_machine_as_on_the_true_one(h200, found) -> None:
    errors = apart(h200, found)
    assert np.median(errors) < 0.001
    assert max(errors) < 0.03


def test_without_exact_spans_chains_say_enough(h200) -> None:
    """CUDA events cannot tell an op from the pause before it: the two are then charged as one."""
    found = recovered(h200, rig_of(h200, exact=False))
    assert found.gaps.kernel_kernel_ns == found.gaps.copy_copy_ns == 0
    assert found.compute.fixed_ns == pytest.approx(h200.compute.fixed_ns + h200.gaps.kernel_kernel_ns)
    assert "no exact spans" in found.gaps.source
    assert found.host.start_ns == found.host.sync_ns
    errors = apart(h200, found)
    assert np.median(errors) < 0.01
    assert max(errors) < 0.05


def test_a_machine_that_scatters_is_measured_all_the_same(h200) -> None:
    """Every cost, the host's and the device's, deviates by 3 % at random."""
    errors = apart(h200, recovered(h200, rig_of(h200, jitter=0.03)))
    assert np.median(errors) < 0.01
    assert np.quantile(errors, 0.9) < 0.05


OTHER = {
    "a T4": lambda: DeviceProfile.load("t4"),
    "two channels, slow both ways, slow link": lambda: hl.imagined(
        "another GPU",
        base="h200",
        copies={"channels": 2, "both_speed": 0.6, "both_large_speed": 0.5, "mapped_share": 0.7},
        gaps={"kernel_copy_ns": 1500, "copy_kernel_ns": 9000, "event_ns": 4000, "legacy_ns": 2000},
        compute={"sms": 20, "blocks_per_sm": 8},
        faster={"link": 0.2},
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_the_method_is_not_made_for_one_machine(name: str) -> None:
    truth = bare(OTHER[name]())
    back = recovered(truth, rig_of(truth))
    for section in ("gaps", "copies"):
        for field, within in BACK[section].items():
            expected = getattr(getattr(truth, section), field)
            assert getattr(getattr(back, section), field) == pytest.approx(expected, rel=max(within, 0.02))
    assert deviations(truth.copies.h2d, back.copies.h2d, 4096, 1 << 28) < 0.03
    assert deviations(truth.kernels["vector_add"].time, back.kernels["vector_add"].time, 1024, 1 << 26) < 0.03


def test_a_machine_without_channels_has_as_many_as_streams(h200) -> None:
    free = replace(h200, copies=replace(h200.copies, channels=64))
    assert engines.channels(rig_of(free))["channels"] == free.limits.streams


def test_waves_that_the_attributes_do_not_predict_are_told(h200) -> None:
    rig = rig_of(h200)
    told = compute.waves(rig)
    assert told["disagree"] == []
    assert told["two halves side by side"]
    assert told["waves of 20 streams with a block each"] == 1
    one_at_once = replace(h200, compute=replace(h200.compute, kernels=1))
    told = compute.waves(rig_of(one_at_once))
    assert not told["two halves side by side"]
    assert told["waves of 20 streams with a block each"] == 20
    rig.attributes["sms"] -= 32
    told = compute.waves(rig)["disagree"]
    assert told
    section = compute.compute_section(
        rig.attributes,
        compute.fixed(rig),
        compute.vector_adds(rig),
        None,
        None,
        compute.waves(rig),
    )
    assert "measured waves differ" in section["source"]


# -- parts that fail -----------------------------------------------------------------------


def test_a_part_that_fails_takes_only_its_sections(h200, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(rig: Rig) -> Any:
        raise InputError("no mapped memory here")

    monkeypatch.setitem(gpu.TIMED, "reads over the link", broken)
    rig, parts = rig_of(h200), Parts(quiet, gpu.PLAN)
    found = gpu.sections(rig, gpu.measure(rig, parts, ["float32"]), 16, parts.failed)
    assert parts.failed == {"reads over the link": "InputError: no mapped memory here"}
    assert "mapped" not in found
    assert {"host", "copies", "pageable", "gaps", "compute", "kernels"} <= set(found)


def test_a_section_that_cannot_be_made_takes_no_other(h200, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("no pause at all")

    monkeypatch.setattr(engines, "gaps_section", broken)
    rig, parts = rig_of(h200), Parts(quiet, gpu.PLAN)
    found = gpu.sections(rig, gpu.measure(rig, parts, ["float32"]), 16, parts.failed)
    assert parts.failed == {"section gaps": "ZeroDivisionError: no pause at all"}
    assert "gaps" not in found
    assert "copies" in found


def test_cold_calls_are_fitted_where_nothing_is_cold() -> None:
    flat = {"median": 1000.0}
    sizes = {str(ns): flat for ns in calls.WORK_NS}
    names = ("copy", "launch", "record", "wait")
    fitted = calls.fit_cold({
        "warm": dict.fromkeys(names, flat),
        "work": dict.fromkeys(names, sizes),
        "staged": {name: {str(n): flat for n in calls.STAGED} for name in names},
        "first": flat,
    })
    assert set(fitted["cold"].values()) == {0.0}
    assert fitted["cold_start_ns"] == fitted["cold_bytes_factor"] == 0
    assert fitted["cold_work_ns"] > 0
    assert fitted["cold_bytes"] > 0
