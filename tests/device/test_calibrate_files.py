"""Calibration as a user meets it: noise refused, parts that fail, files whole or untouched, progress."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest

import heterolab as hl
from heterolab.device import calibrate as calibration
from heterolab.device import cuda
from heterolab.device.calibrate import (
    Effort,
    calibrate_cuda,
    command,
    compute,
    deviceside,
    extras,
    files,
    noise,
    profile_matches,
    rig,
    write,
)
from heterolab.device.calibrate.keeping import judged
from heterolab.device.calibrate.noise import Noise, table_of
from heterolab.device.calibrate.parts import Bar, Parts, PartsFailed, quiet
from heterolab.device.profile import BUILT_IN, DeviceProfile
from heterolab.errors import DeviceUnavailable, InputError, NoisyMeasurement, ProfileError


def raw(name: str = "h200") -> dict[str, Any]:
    data: dict[str, Any] = json.loads((BUILT_IN / f"{name}.json").read_text(encoding="utf-8"))
    return data


# -- noise ---------------------------------------------------------------------------------


def in_turn(*passes: dict[str, float]) -> Callable[[Collection[str] | None], dict[str, list[float]]]:
    """A measurement whose passes give these, one after the other."""
    left = list(passes)

    def measure(keys: Collection[str] | None) -> dict[str, list[float]]:
        asked.append(None if keys is None else sorted(keys))
        return {name: [ns] for name, ns in left.pop(0).items() if keys is None or name in keys}

    asked: list[list[str] | None] = []
    measure.asked = asked  # type: ignore[attr-defined]
    return measure


def test_what_is_steady_is_measured_once() -> None:
    judge, measure = Noise(), in_turn(*[{"a": 10_000.0, "b": 5_000.0}] * 3)
    assert judge.samples("copies", measure)["a"]["passes"] == [10_000.0] * 3
    assert measure.asked == [None] * 3
    judge.refuse()


def test_what_is_noisy_is_measured_again_and_nothing_else() -> None:
    loud = [{"a": 10_000.0, "b": ns} for ns in (5_000.0, 5_100.0, 9_000.0)]
    judge, measure = Noise(), in_turn(*loud, *[{"b": 5_000.0}] * 3)
    found = judge.samples("copies", measure)
    assert measure.asked == [None, None, None, ["b"], ["b"], ["b"]]
    assert found["b"]["median"] == 5_000
    assert found["a"]["median"] == 10_000
    judge.refuse()


def test_what_stays_noisy_is_refused_with_names_shares_reasons_and_the_way_on() -> None:
    loud = [{"a": ns} for ns in (5_000.0, 6_000.0, 8_000.0)]
    judge = Noise()
    judge.samples("copies h2d", in_turn(*loud, *loud))
    with pytest.raises(NoisyMeasurement) as error:
        judge.refuse()
    for part in ("copies h2d, a", "50%", "15% on the device", "power saving", "--accept-noise"):
        assert part in str(error.value)


def test_the_quieter_of_two_noisy_times_is_kept() -> None:
    first, then = ([{"a": ns} for ns in times] for times in ((5e3, 6e3, 9e3), (5e3, 5.5e3, 6.5e3)))
    judge = Noise()
    assert judge.samples("x", in_turn(*first, *then))["a"]["passes"] == [5e3, 5.5e3, 6.5e3]
    assert judge.found == {"x, a": 0.273}


def test_what_clocks_cannot_resolve_is_no_noise() -> None:
    judge = Noise()
    judge.samples("gaps", in_turn(*[{"a": ns} for ns in (100.0, 600.0, 300.0)]))
    judge.refuse()


def test_a_table_rises_and_one_that_does_not_is_implausible() -> None:
    rows = {size: noise.spread([ns]) for size, ns in ((1024, 5_000.0), (4096, 4_800.0), (16384, 9_000.0))}
    judge = Noise()
    assert table_of(rows, judge, "copies h2d")["ns"] == [5_000, 5_000, 9_000]
    judge.refuse()
    rows[4096] = noise.spread([3_000.0])
    assert table_of(rows, judge, "copies h2d")["ns"] == [5_000, 5_000, 9_000]
    with pytest.raises(
        NoisyMeasurement, match=r"copies h2d: 4096 took 3\.0 µs, less than the 5\.0 µs of 1024"
    ):
        judge.refuse()


def runs_with(*preprocess: list[float]) -> dict[str, Any]:
    """Stage costs of real runs whose passes gave these."""
    return {
        "preprocess": {
            "sizes": [1, 16][: len(preprocess)],
            "ns": [float(np.median(passes)) for passes in preprocess],
            "passes": list(preprocess),
        },
        "log_to_disk": {"sizes": [1], "ns": [9e5]},
    }


def test_a_hosts_speed_may_wander_by_half_in_real_runs_and_no_more() -> None:
    judge = Noise()
    assert judge.runs(runs_with([1e5, 1.2e5, 1.5e5])) == {}
    assert judge.runs(runs_with([1e5, 1.2e5, 1.5e5], [1e6, 1.1e6, 2.9e6])) == {
        "preprocess of 16": pytest.approx(1.9 / 1.1)
    }


@pytest.mark.parametrize(("second", "kept", "refused"), [(1.2e6, 1.1e6, False), (3.5e6, 1.1e6, True)])
def test_noisy_real_runs_are_made_again_and_then_refused(
    monkeypatch: pytest.MonkeyPatch, second: float, kept: float, refused: bool
) -> None:
    tries = [runs_with([1e6, 1.1e6, last]) for last in (2.9e6, second)]
    left = list(tries)
    monkeypatch.setattr(calibration, "_host_sections", lambda *given: {"cpu_costs": left.pop(0)})
    judge = Noise()
    found = calibration._steady_host(None, None, SHORT, lambda name: None, judge)
    assert not left
    assert found["cpu_costs"] is tries[0 if refused else 1]
    assert bool(judge.found) is refused
    assert set(judge.found) <= {"real runs, preprocess of 1"}
    assert found["cpu_costs"]["preprocess"]["ns"] == [kept]


def test_noise_that_is_accepted_stands_in_the_provenance() -> None:
    judge, parts = Noise(), Parts(quiet, [])
    judge.found = {"pauses, kernels": 0.4, "copies h2d, 1024": 0.2}
    with pytest.raises(NoisyMeasurement):
        judged(raw(), parts, judge, keep_going=False, accept_noise=False)
    method = judged(raw(), parts, judge, False, True)["provenance"]["method"]
    assert method.endswith(
        "noisy, and accepted: 2 figures whose passes differ, at most by 40% (pauses, kernels)"
    )


# -- parts ---------------------------------------------------------------------------------


def broken() -> None:
    raise RuntimeError("no such thing on this GPU")


def test_a_part_that_fails_is_noted_and_the_next_one_runs() -> None:
    told: list[tuple[str, float, float]] = []
    parts = Parts(lambda *row: told.append(row), ["copies", "vector add", "matrix products"])
    assert parts.run("copies", lambda: 1) == 1
    assert parts.run("vector add", broken) is None
    assert parts.run("matrix products", lambda: 3) == 3
    parts.finish()
    assert parts.failed == {"vector add": "RuntimeError: no such thing on this GPU"}
    assert set(parts.seconds) == {"copies", "vector add", "matrix products"}
    assert [name for name, _, _ in told] == ["copies", "vector add", "matrix products"]
    assert [share for _, share, _ in told] == sorted(share for _, share, _ in told)
    assert told[0][1] == 0
    assert told[0][2] > told[2][2] > 0, "less and less is left"


def test_a_failed_part_is_refused_by_name_with_what_was_measured() -> None:
    parts, whole = Parts(quiet, []), raw()
    parts.run("CUDA graph", broken)
    with pytest.raises(PartsFailed, match=r"CUDA graph \(RuntimeError: no such.*--keep-going") as error:
        judged(whole, parts, Noise(), keep_going=False, accept_noise=False)
    assert error.value.measured is whole
    assert judged(whole, parts, Noise(), keep_going=True, accept_noise=False) is whole


def test_without_a_section_it_is_no_profile_and_the_base_is_named() -> None:
    parts, whole = Parts(quiet, []), raw()
    parts.run("copies", broken)
    del whole["copies"], whole["gaps"]
    with pytest.raises(PartsFailed, match=r"without copies, gaps .*--base"):
        judged(whole, parts, Noise(), keep_going=True, accept_noise=True)


def test_ctrl_c_is_no_failed_part() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    parts = Parts(quiet, [])
    with pytest.raises(KeyboardInterrupt):
        parts.run("copies", interrupted)
    assert not parts.failed


# -- files ---------------------------------------------------------------------------------


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(raw(), tmp_path / "mine.json")
    before = path.read_text()

    def cut(data: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "dumps", cut)
    with pytest.raises(KeyboardInterrupt):
        write(raw(), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path], "nothing half-written lies about"


def test_a_profile_of_another_device_is_not_written_over(tmp_path: Path) -> None:
    path = write(raw("t4"), tmp_path / "mine.json")
    with pytest.raises(InputError, match=r"mine\.json is a profile of NVIDIA T4.*NVIDIA H200.*--force"):
        write(raw(), path)
    assert DeviceProfile.load(path).name == "NVIDIA T4"
    assert DeviceProfile.load(write(raw("t4"), path)).name == "NVIDIA T4", "the same device's is renewed"
    assert DeviceProfile.load(write(raw(), path, force=True)).name == "NVIDIA H200"


def test_what_is_no_profile_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(InputError, match=r"notes\.json exists and is not a whole profile.*--force"):
        write(raw(), path)
    assert path.read_text() == '{"mine": 1}'


@pytest.mark.parametrize(("place", "reason"), [("no/such/mine.json", "no folder"), (".", "is a folder")])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, place: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "calibrate", lambda *given, **named: pytest.fail("it was measured"))
    with pytest.raises(InputError, match=reason):
        command.measure("cpu", tmp_path / place)


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 0.999])
def test_a_half_written_profile_is_named_as_such(tmp_path: Path, share: float) -> None:
    whole = (BUILT_IN / "h200.json").read_text(encoding="utf-8").rstrip()
    path = tmp_path / "mine.json"
    path.write_text(whole[: int(share * len(whole))], encoding="utf-8")
    with pytest.raises(ProfileError, match=r"mine\.json cannot be read as JSON.*heterolab calibrate"):
        DeviceProfile.load(path)


# -- another machine -----------------------------------------------------------------------


def test_a_profile_from_another_machine_is_named() -> None:
    device = hl.open_device("cpu")
    ours = DeviceProfile.from_json({**raw("cpu"), "name": device.name})
    here = DeviceProfile.from_json({
        **ours.raw,
        "host": {**ours.raw["host"], "cores": device.meta()["cores"]},
    })
    assert profile_matches(device, here) == []
    told = " ".join(profile_matches(device, DeviceProfile.load("t4")))
    device.close()
    for part in ("datasheet estimate", "NVIDIA T4", device.name, "16 cores"):
        assert part in told


def test_another_driver_is_named() -> None:
    h200 = DeviceProfile.load("h200")
    assert calibration.differences(h200, "NVIDIA H200", 16, {"driver": "13.0"}) == []
    (told,) = calibration.differences(h200, "NVIDIA H200", 16, {"driver": "12.4"})
    assert "12.4" in told
    assert h200.provenance.driver in told


def test_the_command_compares_a_profile_with_this_machine(tmp_path: Path) -> None:
    told = command.check("cpu", "h200")
    assert "another machine" in told
    assert "NVIDIA H200" in told
    with pytest.raises(InputError, match="tpu"):
        command.check("tpu", "h200")


# -- progress ------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line_that_is_written_over() -> None:
    screen = Terminal()
    bar = Bar(screen)
    bar("copies", 0.25, 31.2)
    bar("vector add", 0.5, 20.0)
    bar.close()
    shown = screen.getvalue()
    assert "\n" not in shown
    assert " 25%  about 31 s left  copies" in shown
    assert "█" * 12 + "░" * 12 in shown


def test_elsewhere_each_part_is_a_line() -> None:
    log = io.StringIO()
    bar = Bar(log)
    bar("copies", 0.25, 31.2)
    bar("vector add", 0.5, 20.0)
    bar.close()
    first, second = log.getvalue().splitlines()
    assert first.endswith("25%  copies")
    assert second.endswith("50%  vector add")


# -- over CUDA's calls -----------------------------------------------------------------------


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A CUDA device made of NumPy: it is about the calls, no number here means anything."""
    cupy = fake_cupy.make()
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    told = {
        extras.SMS: 4,
        extras.THREADS_PER_SM: 2048,
        extras.BLOCKS_PER_SM: 32,
        extras.L2_BYTES: 1 << 20,
        extras.CONCURRENT_MANAGED: 0,
        extras.COPY_ENGINES: 2,
    }
    runtime = cupy.cuda.runtime
    runtime.deviceGetAttribute = lambda which, number: told[which]
    runtime.getDeviceProperties = lambda number: {
        "name": b"Fake GPU",
        "totalGlobalMem": fake_cupy.MEMORY,
        "major": 9,
        "minor": 0,
    }
    cupy.cuda.Memory = lambda nbytes: object()
    stream = cupy.cuda.Stream
    stream.wait_event = lambda self, event: None
    stream.begin_capture = lambda self: None
    stream.end_capture = lambda self: SimpleNamespace(launch=lambda on: None)
    cupy.matmul = lambda a, b, out: np.matmul(a.values, b.values, out=out.values)
    monkeypatch.setattr(rig, "MOST_BYTES", 1 << 21)
    monkeypatch.setattr(rig, "MOST_ELEMENTS", 1 << 14)
    monkeypatch.setattr(compute, "PRODUCT_SIZES", (16, 24, 32))
    monkeypatch.setattr(extras, "host_memory", dict)
    return cupy


SHORT = Effort(1, (1 << 10, 1 << 14), (), (), 0.05)


def host_sections(*given: Any) -> dict[str, Any]:
    """As measured in real runs: none here."""
    names = ("launch", "copy", "record", "wait", "between", "sync", "sync_idle", "start")
    calls = {name: {"median": 1000.0} for name in names}
    inside = {name: {"mean": 2000.0} for name in ("copy in", "copy back", "record")}
    h200 = raw()
    kept = {name: h200[name] for name in ("waiting", "workers", "cpu_costs")}
    return kept | {"calls": calls, "inside": {"launches": {}, "calls": inside}, "locks": {}}


@pytest.fixture
def without_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU runs no model."""
    monkeypatch.setattr(calibration, "_host_sections", host_sections)
    monkeypatch.setattr(deviceside, "encoder_kernels", lambda *given: {})
    monkeypatch.setattr(calibration, "compare_waiting", lambda *given: {})


def test_everything_is_measured_over_cudas_calls(fake_gpu: Any, without_pipeline: None) -> None:
    """With spans from CUDA events, as there is no CUPTI here. Ops take no time: a figure that makes
    no sense may fail its part, a call that does not exist must not."""
    try:
        profile = calibrate_cuda(keep_going=True, accept_noise=True)
    except PartsFailed as error:
        profile = error.measured
    failed = profile["notes"]["failed"]
    assert not [why for why in failed.values() if not why.startswith(("ValueError", "ZeroDivisionError"))]
    assert {"host", "copies", "mapped", "pageable", "waiting", "workers", "seam"} <= set(profile)
    assert profile["name"] == "Fake GPU"
    assert "CUDA events" in profile["provenance"]["method"]
    notes = profile["notes"]
    assert notes["attributes"]["compute_capability"] == "9.0"
    assert set(notes["allocation"]) == {str(1 << 20), str(1 << 24), str(1 << 26)}
    assert notes["CUDA graph"]["launches"] == 100
    assert notes["seconds"]["copies"] > 0
    assert profile["host"]["measured"]["calls"]["launch"]["passes"]


def test_a_base_keeps_the_physics_and_saves_what_failed(
    fake_gpu: Any, without_pipeline: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = raw() | {"name": "Fake GPU"}
    write(base, tmp_path / "base.json")

    def fails(*given: Any) -> Any:
        raise RuntimeError("out of patience")

    monkeypatch.setattr(calibration, "_host_sections", fails)
    profile = calibrate_cuda(str(tmp_path / "base.json"), SHORT, keep_going=True)
    for section in ("copies", "gaps", "pageable", "waiting", "workers", "cpu_costs", "seam"):
        assert profile[section] == base[section]
    assert "out of patience" in " ".join(profile["notes"]["failed"].values())
    with pytest.raises(PartsFailed, match="out of patience"):
        calibrate_cuda(str(tmp_path / "base.json"), SHORT)


def test_what_was_measured_when_parts_failed_lies_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any, **named: Any) -> Any:
        error = PartsFailed("1 of 9 parts could not be measured: copies.")
        error.measured = {"host": {"launch_ns": 1}}
        raise error

    monkeypatch.setattr(command, "calibrate", fails)
    with pytest.raises(PartsFailed, match=r"copies.*mine\.partial\.json"):
        command.measure("cuda", tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.partial.json").read_text()) == {"host": {"launch_ns": 1}}
    assert not (tmp_path / "mine.json").exists()


def test_the_command_says_where_the_profile_is_and_how_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = raw() | {"notes": {"seconds": {"copies": 2.0, "kernels": 9.5}}}
    monkeypatch.setattr(command, "calibrate", lambda *given, **named: made)
    told = command.measure("cuda", tmp_path / "mine.json")
    assert f"sim:{tmp_path / 'mine.json'}" in told
    assert "It took 12 s: kernels 9.5 s; copies 2.0 s." in told
    assert DeviceProfile.load(tmp_path / "mine.json").name == "NVIDIA H200"


def test_a_device_that_may_not_be_written_is_not_measured(
    fake_gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(raw("t4"), tmp_path / "mine.json")
    monkeypatch.setattr(calibration, "_engines", lambda *given: pytest.fail("it was measured"))
    with pytest.raises(InputError, match=r"NVIDIA T4.*Fake GPU"):
        command.measure("cuda", path)


def test_no_gpu_is_named_with_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version, reason in ((0, "no NVIDIA driver"), (11_040, "Update the driver")):
        monkeypatch.setattr(cuda, "driver_version", lambda version=version: version)
        with pytest.raises(DeviceUnavailable, match=reason):
            command.measure("cuda", tmp_path / "mine.json")
    assert list(tmp_path.iterdir()) == []
