"""Imagined machines: made in a few lines, saved, opened, and stamped wherever they appear."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

import heterolab as hl
from heterolab.device import profile as profiles
from heterolab.device.imagined import SECTIONS, imagined, one_memory
from heterolab.device.profile import BUILT_IN, DeviceProfile
from heterolab.errors import InputError, ProfileError
from heterolab.lab import checks_05, streams
from heterolab.lab.check import check
from heterolab.pipeline.kernels import empty
from heterolab.trace import metrics
from heterolab.workload import closed_loop, questions

MIB = 2**20


def npu() -> DeviceProfile:
    return hl.imagined(
        "an NPU",
        copies={"channels": 1, "both_speed": 0.5},
        compute={"kernels": 1, "flops_per_ns": {"int8": 400_000}},
        faster={"link": 0.25, "arithmetic": 2},
    )


def dsp() -> DeviceProfile:
    return hl.imagined(
        "a DSP",
        limits={"memory_bytes": 8 * 2**30},
        compute={"sms": 4, "kernels": 1},
        faster={"arithmetic": 0.05, "memory": 0.05, "link": 0.2},
    )


def shared() -> DeviceProfile:
    return hl.imagined("one memory, slower", base="one_memory", faster={"memory": 0.1, "link": 0.1})


def pcie() -> DeviceProfile:
    return hl.imagined("twice the PCIe", faster={"link": 2})


MACHINES = {"npu": npu, "dsp": dsp, "one memory": shared, "pcie": pcie}


@pytest.fixture(params=MACHINES)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The name under which one of the four machines is opened from its file."""
    return f"sim:{MACHINES[request.param]().save(tmp_path / 'machine.json')}"


# -- they run what the labs run ----------------------------------------------------------------


def test_lab_05s_pipeline_runs_on_it_and_says_imagined(saved: str) -> None:
    load = hl.closed_loop(n=64, in_flight=64, texts=questions()[:16])
    for settings in (
        {"batch": 32},
        {"payload": "images_float32", "memory": "pageable"},
        {"memory": "mapped"},
    ):
        run = hl.Pipeline(hl.models.encoder(), chunk=32, **settings).run(load, on=hl.open_device(saved))
        assert len(run.answers) == 64
        assert run.stamp.endswith("(imagined)")
        assert run.trace.meta["provenance"]["kind"] == "imagined"
    assert "imagined" in repr(hl.open_device(saved))


def test_lab_03s_and_05s_functions_and_checks_run_on_it(saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SIZE_MIB", 16)  # smaller than in the labs: the same, sooner
    monkeypatch.setattr(checks_05, "load", lambda: closed_loop(n=32, in_flight=32, texts=questions()[:8]))
    dev = hl.open_device(saved)
    for memory in ("pageable", "pinned"):
        tasks = streams.pairs(dev, memory)
        assert streams.timed(dev, streams.two_tasks, tasks, streams.queues(dev, 2)).wall_ns > 0
    job = streams.job(dev, empty(), mib=1)
    streams.in_chunks(dev, job, 8, streams.queues(dev, 8))
    assert job.right()
    for name, answer in (
        ("03-1", streams.in_chunks),
        ("05-2", {"payload": "images_uint8", "memory": "pinned"}),
    ):
        verdict = check(name, answer, on=dev)
        assert verdict.state != "fail", repr(verdict)


# -- and what was imagined is what happens -------------------------------------------------------


def copy_ns(profile: DeviceProfile, memory: str = "pinned") -> int:
    dev = hl.open_device(profile, values=False)
    host, there = dev.buffer(64 * MIB, "uint8", memory), dev.buffer(64 * MIB, "uint8")
    dev.default_stream.copy(there, host)
    dev.synchronize()
    (span,) = hl.Trace.from_spans(dev.host.recorder.spans, "simulated", "x").kind("h2d")
    return span.end_ns - span.start_ns


def test_twice_the_link_halves_a_large_copy() -> None:
    h200 = DeviceProfile.load("h200")
    assert copy_ns(pcie()) == pytest.approx(copy_ns(h200) / 2, rel=0.01)
    assert pcie().kernels == h200.kernels


def test_on_one_memory_memory_kinds_make_no_difference_and_copies_are_at_memory_rate() -> None:
    machine = DeviceProfile.load("one_memory")
    assert copy_ns(machine, "pageable") == copy_ns(machine, "pinned")
    assert copy_ns(machine) < copy_ns(DeviceProfile.load("h200")) / 20
    dev = hl.open_device("sim:one_memory")
    load = hl.closed_loop(n=64, in_flight=64, texts=questions()[:16])
    walls = {}
    for memory in ("pageable", "pinned", "mapped"):
        pipe = hl.Pipeline(hl.models.encoder(), batch=16, payload="images_float32", memory=memory)
        walls[memory] = pipe.run(load, on=dev).wall_ns
    assert walls["pageable"] == pytest.approx(walls["pinned"], rel=0.02)
    assert walls["mapped"] < 1.01 * walls["pinned"], "it has no copies to issue"


def test_one_engine_for_both_directions_takes_turns() -> None:
    machine = npu()
    dev = hl.open_device(machine, values=False)
    queues = dev.streams(2)
    up, down = (dev.buffer(64 * MIB, "uint8", "pinned") for _ in range(2))
    first, second = (dev.buffer(64 * MIB, "uint8") for _ in range(2))
    queues[0].copy(first, up)
    queues[1].copy(down, second)
    dev.synchronize()
    trace = hl.Trace.from_spans(dev.host.recorder.spans, "simulated", "x")
    both = metrics.length_ns(metrics.busy_intervals(trace, "link"))
    assert both > 1.8 * copy_ns(machine)


def test_arithmetic_of_one_type() -> None:
    h200, faster = DeviceProfile.load("h200"), hl.imagined("x", faster={"float16": 3})
    assert faster.flops_per_ns("float16") == 3 * h200.flops_per_ns("float16")
    assert faster.flops_per_ns("float32") == h200.flops_per_ns("float32")
    assert faster.kernels["gemm.float16"].time.at(4096) < h200.kernels["gemm.float16"].time.at(4096) / 2
    assert faster.kernels["gemm.float32"] == h200.kernels["gemm.float32"]


def test_a_faster_host_is_faster_in_all_it_does() -> None:
    h200, faster = DeviceProfile.load("h200"), hl.imagined("x", faster={"host": 2})
    assert faster.host.launch_ns == h200.host.launch_ns / 2
    assert faster.host.cores == h200.host.cores
    assert faster.cpu_cost("preprocess").time.at(16) == h200.cpu_cost("preprocess").time.at(16) / 2
    held, before = faster.kernels["encoder.forward"].host, h200.kernels["encoder.forward"].host
    assert held is not None
    assert before is not None
    assert held.at(64) == pytest.approx(before.at(64) / 2)
    load = hl.closed_loop(n=32, in_flight=32, texts=questions()[:8])
    runs = [hl.Pipeline(hl.models.encoder()).run(load, on=hl.open_device(p)).wall_ns for p in (h200, faster)]
    assert runs[1] < 0.6 * runs[0]


# -- honesty ---------------------------------------------------------------------------------------


def test_nothing_of_the_bases_measurement_is_claimed_for_the_new_numbers() -> None:
    machine = npu()
    assert machine.stamp == "imagined"
    assert "link × 0.25" in machine.provenance.method
    assert "NVIDIA H200 (measured" in machine.provenance.method
    assert "notes" not in machine.raw
    assert machine.copies.source == machine.compute.source == "imagined"
    for name in ("encoder.forward", "gemm.float32"):
        kernel = machine.raw["kernels"][name]
        assert kernel["source"] == "imagined"
        assert "p10" not in kernel
    assert "measured" in machine.raw["cpu_costs"]["preprocess"]["source"], "what was not touched keeps its"
    assert DeviceProfile.load("h200").raw["notes"], "and the base is as it was"


def test_the_shipped_one_is_made_from_the_h200() -> None:
    """Run ``python -m heterolab.device.datasheet`` after h200.json has changed."""
    assert json.loads((BUILT_IN / "one_memory.json").read_text(encoding="utf-8")) == one_memory().raw


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    path = npu().save(tmp_path / "npu.json")
    assert DeviceProfile.load(path) == npu()
    again = hl.imagined("the same", base=path)
    assert again.copies == npu().copies
    with pytest.raises(ProfileError, match=r"hl\.imagined"):
        replace(npu(), name="other").save(tmp_path / "other.json")


# -- wrong names and values --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"copys": {}}, r"no section 'copys'\. Did you mean 'copies'"),
        ({"copies": {"chanels": 1}}, r"copies has no field 'chanels'\. Did you mean 'channels'"),
        ({"copies": {"both_sped": 1}}, r"Did you mean 'both_speed'"),
        ({"kernels": {"encoder.foward": {"ns": [1]}}}, r"Did you mean 'encoder\.forward'"),
        ({"cpu_costs": {"preproces": {"gil": 0}}}, r"Did you mean 'preprocess'"),
        ({"faster": {"lnk": 2}}, r"no part 'lnk'\. Did you mean 'link'"),
        ({"faster": {"int4": 2}}, r"no part 'int4'.*float16"),
        ({"faster": {"link": 0}}, r"above 0"),
        ({"faster": {"link": "2"}}, r"above 0"),
        ({"faster": {"link": True}}, r"above 0"),
        ({"copies": 3}, r"copies=3"),
        ({"copies": None}, r"copies is None.*JSON object"),
        ({"host": {"launch_ns": -1}}, r"imagined\('x'\): host\.launch_ns is -1"),
        ({"copies": {"h2d": {"ns": [1]}}}, r"copies\.h2d\.ns.*as long as its sizes"),
        ({"base": "h300"}, r"no device profile 'h300'"),
    ],
    ids=str,
)
def test_a_mistake_is_named_with_the_nearest_right_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ProfileError, match=said):
        imagined("x", **changes)  # type: ignore[arg-type]


def test_a_slip_in_a_file_is_named_with_the_nearest_right_name(tmp_path: Path) -> None:
    raw = json.loads(npu().save(tmp_path / "npu.json").read_text(encoding="utf-8"))
    raw["host"]["cold_lauch_ns"] = raw["host"].pop("cold_launch_ns")
    (tmp_path / "npu.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"npu\.json: host.*'cold_lauch_ns'.*host\.cold_launch_ns"):
        hl.open_device(f"sim:{tmp_path / 'npu.json'}")


def test_a_new_stage_and_a_new_kernel_may_be_added() -> None:
    table = {"sizes": [1], "ns": [5], "source": "a guess"}
    machine = imagined("x", cpu_costs={"parse": table}, kernels={"conv": table})
    assert machine.cpu_cost("parse").time.at(1) == 5
    assert machine.kernels["conv"].time.at(1) == 5


def test_a_profile_can_be_opened_as_it_is() -> None:
    assert hl.open_device(pcie()).name == "twice the PCIe (imagined)"
    with pytest.raises(InputError, match="no such option"):
        hl.open_device(pcie(), speed=2)


# -- the page that explains the file -----------------------------------------------------------------


def test_the_readme_explains_every_field_and_every_profile() -> None:
    text = (BUILT_IN / "README.md").read_text(encoding="utf-8")
    for cls in (*SECTIONS.values(), profiles.Provenance):
        for field in fields(cls):
            assert f"`{field.name}`" in text or f"`provenance.{field.name}`" in text, f"{cls}: {field.name}"
    for name in ("sizes", "gil", "waits", "host_ns", "cold_host_ns", "mapped", *SECTIONS):
        assert f"`{name}`" in text, name
    for name in DeviceProfile.names():
        assert f"`{name}.json`" in text, name


def test_the_readmes_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (BUILT_IN / "README.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert "an NPU (imagined)" in str(names["dev"].name)  # type: ignore[attr-defined]
