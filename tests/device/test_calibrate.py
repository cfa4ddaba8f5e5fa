"""Calibration: what it writes is a profile, and the profile predicts this machine."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import fake_cupy
import numpy as np
import pytest

import heterolab as hl
from heterolab.device import cuda
from heterolab.device.calibrate import (
    Effort,
    calibrate,
    calibrate_cpu,
    calibrate_cuda,
    deviceside,
    hostside,
    write,
)
from heterolab.device.calibrate import __main__ as command
from heterolab.device.calibrate.figures import spread, table
from heterolab.device.calibrate.keeping import base_of, merged
from heterolab.device.calibrate.lock import gil_share
from heterolab.device.calibrate.waiters import compare_waiting
from heterolab.device.cpu import CpuDevice
from heterolab.device.cuda import CudaDevice
from heterolab.device.profile import DeviceProfile
from heterolab.device.sim import SimDevice
from heterolab.errors import InputError, ProfileError
from heterolab.pipeline.costs import stage_costs

SHORT = Effort(3, (1 << 10, 1 << 16, 1 << 20), ((1, 8), (1, 16), (4, 16), (8, 16), (8, 32)), (1, 4), 0.05)


@pytest.fixture(scope="module")
def encoder() -> Any:
    return hl.models.encoder()


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    """This machine's CPU, measured in a few seconds."""
    return calibrate_cpu(SHORT, accept_noise=True)


def settings() -> list[dict[str, Any]]:
    """Lab 05's pipeline in six settings."""
    return [
        {"batch": 1},
        {"batch": 4},
        {"batch": 8},
        {"batch": 8, "streams": 1, "ring": 1, "workers": 0},
        {"batch": 8, "payload": "images_float32", "memory": "pageable"},
        {"batch": 4, "payload": "images_uint8", "returns": "vectors"},
    ]


def errors_of(profile: DeviceProfile, encoder: Any, repeats: int) -> list[float]:
    """Relative error of the simulated wall, a setting: against the median of real runs."""
    errors = []
    for setting in settings():
        pipeline = hl.Pipeline(encoder, **setting)
        load = hl.closed_loop(n=48, in_flight=16, seed=2)
        walls = []
        for _ in range(repeats):
            device = hl.open_device("cpu")
            walls.append(pipeline.run(load, on=device).trace.wall_ns)
            device.close()
        simulated = pipeline.run(load, on=SimDevice.open(profile)).trace.wall_ns
        errors.append(simulated / float(np.median(walls)) - 1)
    return errors


# -- a profile of this machine -------------------------------------------------------------


def test_the_cpu_measured_is_a_profile_with_every_stage(measured, encoder) -> None:
    profile = DeviceProfile.from_json(measured)
    assert profile.provenance.kind == "measured"
    assert set(stage_costs(encoder)) <= set(profile.cpu_costs)
    assert {"encoder.forward", "encoder.pool", "encoder.top_k"} <= set(profile.kernels)
    assert profile.kernels["encoder.forward"].time.at(256) > profile.kernels["encoder.forward"].time.at(8)


def test_every_table_says_how_much_its_samples_scatter(measured) -> None:
    tables = [*measured["cpu_costs"].values(), *measured["kernels"].values(), measured["copies"]["h2d"]]
    for entry in tables:
        assert len(entry["sizes"]) == len(entry["ns"]) == len(entry["p10"]) == len(entry["p90"])
        for low, ns, high in zip(entry["p10"], entry["ns"], entry["p90"], strict=True):
            assert 0 < low <= high
            assert low <= ns  # a mean may lie above the 90th percentile, never below the 10th


def test_it_tells_nothing_about_whose_machine_it_is(measured) -> None:
    import platform

    text = json.dumps(measured)
    assert platform.node() not in text
    assert str(Path.home()) not in text
    assert sys.prefix not in text


def test_the_simulator_runs_every_pipeline_on_it(measured, encoder) -> None:
    device = SimDevice.open(DeviceProfile.from_json(measured))
    for payload in ("ids", "embeddings", "images_uint8", "images_float32"):
        for returns in ("topk", "vectors", "logits"):
            pipeline = hl.Pipeline(encoder, batch=4, payload=payload, returns=returns)
            assert len(pipeline.run(hl.closed_loop(n=8, in_flight=4, seed=1), on=device).answers) == 8


def test_it_predicts_this_machine_roughly(measured, encoder) -> None:
    """Loose and with a second try, since a test machine is busy with other things; the slow
    test below is the strict one."""
    errors = errors_of(DeviceProfile.from_json(measured), encoder, repeats=2)
    if np.median(np.abs(errors)) > 0.5:
        errors = errors_of(
            DeviceProfile.from_json(calibrate_cpu(SHORT, accept_noise=True)), encoder, repeats=3
        )
    assert np.median(np.abs(errors)) < 0.5, errors


@pytest.mark.slow
def test_it_predicts_a_quiet_machine_within_a_tenth(encoder) -> None:
    profile = DeviceProfile.from_json(calibrate_cpu(accept_noise=True))
    errors = errors_of(profile, encoder, repeats=5)
    assert np.median(np.abs(errors)) < 0.10, errors


def test_write_checks_and_keeps_every_number(measured, tmp_path: Path) -> None:
    path = write(measured, tmp_path / "mine.json")
    assert json.loads(path.read_text()) == measured
    assert DeviceProfile.load(path).name == measured["name"]
    assert hl.open_device(f"sim:{path}").source == "simulated"
    with pytest.raises(ProfileError, match="waiting"):
        write({k: v for k, v in measured.items() if k != "waiting"}, tmp_path / "broken.json")
    assert not (tmp_path / "broken.json").exists()


def test_a_device_that_cannot_be_measured() -> None:
    with pytest.raises(InputError, match="sim"):
        calibrate("sim:h200")


def test_the_command_says_why_there_is_no_gpu_to_measure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda, "driver_version", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["calibrate", "--device", "cuda", "--out", str(tmp_path / "x.json")])
    assert command.main() == 1
    assert "no NVIDIA driver" in capsys.readouterr().out
    assert not (tmp_path / "x.json").exists()


# -- parts ---------------------------------------------------------------------------------


def test_spread_and_table() -> None:
    assert spread([1.0, 2.0, 3.0, 4.0, 100.0])["median"] == 3.0
    made = table({64: [5.0], 4: [1.0, 3.0]})
    assert made["sizes"] == [4, 64]
    assert made["ns"] == [2.0, 5.0]


def test_the_interpreter_lock_is_held_by_python_and_not_by_sleep() -> None:
    def busy() -> None:
        for _ in range(20_000):
            pass

    held = max(gil_share(busy) for _ in range(3))
    free = min(gil_share(lambda: time.sleep(1e-3)) for _ in range(3))
    assert free < 0.3 < held


def test_a_waiter_thread_is_compared_with_polling() -> None:
    found = compare_waiting(lambda host: CpuDevice.open(host=host), Effort(1, (), (), (), 0))
    for way in ("polling", "waiter thread"):
        assert 0 < found[way]["median"] <= found[way]["p99"] < 1e9
        assert 0 <= found[way]["cpu_share"] < 4


def test_a_gpus_physics_is_kept_and_the_rest_exchanged() -> None:
    kept = DeviceProfile.load("h200")
    base = json.loads((Path(hl.__file__).parent / "device/profiles/h200.json").read_text())
    stage = {"sizes": [1], "ns": [42.0], "gil": 0.5, "source": "measured"}
    new = {
        "waiting": base["waiting"] | {"event_ns": 12_345},
        "workers": base["workers"] | {"submit_ns": 777},
        "cpu_costs": {"preprocess": stage},
        "kernels": {"encoder.forward": {"sizes": [1], "ns": [9.0], "source": "measured"}},
        "seam": base["host"] | {"launch_ns": 99_000},
    }
    provenance = {"date": "2027-01-02", "method": "through the seam"}
    notes = {"arithmetic": {"flops_per_ns": {"int32": 123.0}}}
    whole = DeviceProfile.from_json(merged(base, new, 12, notes, provenance))
    assert (whole.copies, whole.gaps, whole.compute.memory) == (
        kept.copies,
        kept.gaps,
        kept.compute.memory,
    )
    assert whole.compute.flops_per_ns == {**kept.compute.flops_per_ns, "int32": 123.0}
    assert whole.host.launch_ns == kept.host.launch_ns
    assert whole.host.cores == 12
    assert whole.seam is not None
    assert whole.seam.launch_ns == 99_000
    assert whole.waiting.event_ns == 12_345
    assert whole.cpu_cost("preprocess").time.at(5) == 42.0
    assert whole.cpu_cost("batch") == kept.cpu_cost("batch")
    assert whole.kernels["encoder.forward"].time.at(1) == 9.0
    assert whole.provenance.date == "2027-01-02"


def test_the_measurements_run_over_cudas_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number here means anything: this is about the calls, over a CuPy made of NumPy."""
    cupy = fake_cupy.make()
    monkeypatch.setattr(cuda, "why_not", lambda: "")
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cupy.matmul = lambda a, b, out: np.matmul(a.values, b.values, out=out.values)
    device = CudaDevice.open()
    calls = hostside.host_calls(device, SHORT)
    assert {"launch", "copy", "record", "wait", "between", "sync", "sync_idle", "start"} == set(calls)
    assert {"h2d pinned", "d2h pageable held", "inside"} <= set(deviceside.copies(device, SHORT))
    assert 0 < deviceside.both_directions(device, SHORT) <= 1
    assert "event" in deviceside.gaps(device, SHORT)
    assert deviceside.arithmetic(device, SHORT)["flops_per_ns"]["float32"] > 0
    assert {"event", "job", "timer"} == set(hostside.waiting(device, SHORT))
    with pytest.raises(InputError, match=r"h200.*NVIDIA H200.*Fake GPU.*Leave the base out"):
        base_of(device, "h200")
    device.close()


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    """From nothing. Whether it is quiet is not asked here; what it says must be a GPU's."""
    measured = calibrate_cuda(effort=SHORT, accept_noise=True)
    profile, host = DeviceProfile.from_json(measured), measured["host"]
    assert not measured["notes"]["failed"]
    forward = profile.kernels["encoder.forward"]
    assert forward.host is not None
    assert forward.host.at(128) > 100 * 1_000, "hundreds of launches hold the host"
    assert 1_000 < profile.waiting.event_ns < 5_000_000
    assert 1_000 < host["launch_ns"] < 100_000
    assert host["record_ns"] < host["launch_ns"] < host["launch_ns"] + host["cold_launch_ns"]
    large = profile.copies.h2d.at(1 << 28)
    assert 1000 * large > 1 << 28, "no link is faster than 1 TB/s"
    assert profile.copies.h2d.at(1 << 27) == pytest.approx(large / 2, rel=0.1)
    assert profile.pageable is not None
    assert profile.pageable.d2h.at(1 << 26) > profile.copies.d2h.at(1 << 26)
    assert 0.3 < profile.copies.both_speed <= 1
    assert profile.kernels["vector_add"].time.at(1 << 26) > 5 * profile.kernels["vector_add"].time.at(1 << 20)
    assert profile.flops_per_ns("float16") > profile.flops_per_ns("float32")
    assert measured["notes"]["grids"]["disagree"] == []


@pytest.mark.gpu
def test_a_gpus_physics_is_the_same_without_exact_spans() -> None:
    """What chains say of large ops is what exact spans say; small ones include the pause between two."""
    exact, chains = (
        DeviceProfile.from_json(calibrate_cuda(effort=SHORT, accept_noise=True, spans=spans))
        for spans in ("auto", "events")
    )
    for nbytes in (1 << 22, 1 << 26):
        assert chains.copies.h2d.at(nbytes) == pytest.approx(exact.copies.h2d.at(nbytes), rel=0.1)
        assert chains.copies.d2h.at(nbytes) == pytest.approx(exact.copies.d2h.at(nbytes), rel=0.1)
    for m in (2048, 4096):
        products = [p.kernels["gemm.float32"].time.at(m) for p in (chains, exact)]
        assert products[0] == pytest.approx(products[1], rel=0.15)
