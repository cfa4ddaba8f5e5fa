"""What would help most? The ranking, and the promise against the result."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import heterolab as hl
from heterolab.device.profile import DeviceProfile
from heterolab.errors import InputError
from heterolab.trace import what_if
from heterolab.trace.trace import Trace
from heterolab.trace.what_if import Outlook, outlook

MACHINES = ("h200", "t4", "a100")
PICTURES: dict[str, Any] = {"payload": "images_float32", "batch": 32, "chunk": 32, "streams": 1}
BUSY = hl.closed_loop(n=192, in_flight=96, seed=0)


def serve(name: str = "sim:h200", load: Any = BUSY, **settings: Any) -> Any:
    return hl.Pipeline(hl.models.encoder(), **settings).run(load, on=hl.open_device(name, values=False))


def gains(found: Outlook) -> dict[str, float]:
    return {outcome.change.name: outcome.gain for outcome in found.outcomes}


@pytest.mark.parametrize("machine", MACHINES)
def test_pageable_pictures_are_to_be_pinned(machine: str) -> None:
    found = outlook(serve(f"sim:{machine}", memory="pageable", **PICTURES))
    assert found.best.change.name == "pinned"
    assert found.best.gain > 1.3
    assert found.goal == "throughput"
    assert [outcome.gain for outcome in found.outcomes] == sorted(gains(found).values(), reverse=True)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_promise_is_kept_on_the_machine_that_was_simulated(machine: str) -> None:
    dev = hl.open_device(f"sim:{machine}", values=False)
    run = hl.Pipeline(hl.models.encoder(), memory="pageable", **PICTURES).run(BUSY, on=dev)
    trial = outlook(run).try_best(dev)
    assert trial.measured == pytest.approx(trial.promised, rel=0.01)
    ((before, after),) = trial.runs
    assert (before.settings.memory, after.settings.memory) == ("pageable", "pinned")
    assert before.latencies_ns.tolist() == run.latencies_ns.tolist(), "the unchanged run is that run again"


@pytest.mark.parametrize("machine", MACHINES)
def test_a_launch_bound_run_gains_by_batching_and_nothing_by_a_faster_gpu(machine: str) -> None:
    found = outlook(serve(f"sim:{machine}", batch=8))
    assert found.best.change.name == "batch"
    assert gains(found)["gpu"] < 1.1 < found.best.gain


def test_what_cannot_be_tried_is_flagged_and_never_the_best() -> None:
    base = DeviceProfile.load("h200")
    cost = base.raw["cpu_costs"]["preprocess"]
    slow = hl.imagined("slow", base, cpu_costs={"preprocess": {"ns": [30 * ns for ns in cost["ns"]]}})
    run = hl.Pipeline(hl.models.encoder(), payload="images_uint8", batch=16).run(
        BUSY, on=hl.open_device(slow, values=False)
    )
    found = outlook(run)
    assert found.outcomes[0].change.name == "parsing"
    assert found.outcomes[0].gain > 2
    imagined = {o.change.name for o in found.outcomes if not o.change.can_be_tried}
    assert imagined == {"parsing", "gpu", "link"}
    assert found.best.change.name == "workers"
    assert found.profile is slow, "an imagined machine is simulated as it was"


def test_a_slow_link_is_what_a_faster_link_helps() -> None:
    slow = hl.imagined("slow link", faster={"link": 0.05})
    run = hl.Pipeline(hl.models.encoder(), **PICTURES).run(BUSY, on=hl.open_device(slow, values=False))
    found = gains(outlook(run))
    assert found["link"] > 1.5
    assert found["link"] == max(found.values())


def test_only_what_would_change_something_is_tried() -> None:
    names = set(gains(outlook(serve(batch=8, max_delay_ms=0))))
    assert names == {"stream", "workers", "batch", "gpu", "link", "parsing"}
    names = set(gains(outlook(serve(batch=8, memory="mapped", returns="logits", workers=0))))
    assert names == {"pinned", "delay", "bytes", "stream", "workers", "batch", "gpu", "link", "parsing"}
    settings = serve(workers=0).settings
    changed = {c.name: c.settings for c, _ in what_if.changes(settings, DeviceProfile.load("h200"))}
    assert changed["workers"] == {"workers": 1}


def test_where_arrivals_limit_the_latency_ranks() -> None:
    run = serve(load=hl.poisson(rate=300, n=60, seed=0), payload="images_uint8", max_delay_ms=20)
    found = outlook(run)
    assert found.goal == "latency"
    assert found.best.change.name == "delay"
    assert found.best.p90_ratio < 0.5
    ratios = [outcome.p90_ratio for outcome in found.outcomes]
    assert ratios == sorted(ratios)


def test_nothing_helps_and_then_there_is_nothing_to_try() -> None:
    found = outlook(serve(load=hl.poisson(rate=5, n=5, seed=0), max_delay_ms=0))
    assert found.best is None
    with pytest.raises(InputError, match="nothing to try"):
        found.try_best(hl.open_device("sim:h200"))


def test_a_change_that_does_not_fit_says_why_and_the_others_go_on() -> None:
    tight = hl.imagined("tight", limits={"memory_bytes": 80 << 20})
    run = hl.Pipeline(hl.models.encoder(), **PICTURES).run(BUSY, on=hl.open_device(tight, values=False))
    found = outlook(run)
    last = found.outcomes[-1]
    assert (last.change.name, last.gain) == ("stream", 0.0) or (last.change.name, last.gain) == ("batch", 0.0)
    assert "fits" in last.why_not
    assert {o.change.name for o in found.outcomes if o.why_not} == {"batch", "stream"}
    assert gains(found)["link"] > 0


def test_a_measured_run_is_simulated_on_the_profile_of_its_machine() -> None:
    run = serve(memory="pageable", **PICTURES)
    measured = replace(
        run,
        trace=replace(run.trace, source="cupti", device="NVIDIA T4", meta={}),
        origin=replace(run.origin, profile=None),
    )
    assert outlook(measured).profile.name == "NVIDIA T4"
    unknown = replace(measured, trace=replace(measured.trace, device="NVIDIA GeForce GTX 1080"))
    with pytest.raises(InputError, match=r"GTX 1080.*heterolab calibrate.*on='sim:mine\.json'"):
        outlook(unknown)
    assert outlook(unknown, on="sim:a100").profile.name == "NVIDIA A100 80GB"
    assert outlook(unknown, on=DeviceProfile.load("l4")).profile.name == "NVIDIA L4"
    assert outlook(unknown, on=hl.open_device("sim:l4")).profile.name == "NVIDIA L4"


def test_a_real_device_is_no_profile(cpu_device: Any) -> None:
    with pytest.raises(InputError, match="no simulated device"):
        outlook(serve(), on=cpu_device)


def test_a_recording_needs_what_made_it(tmp_path: Any) -> None:
    pipe = hl.Pipeline(hl.models.encoder(), memory="pageable", **PICTURES)
    run = pipe.run(BUSY, on=hl.open_device("sim:h200", values=False))
    replayed = Trace.load(run.trace.save(tmp_path / "run.json"))
    with pytest.raises(InputError, match=r"pipeline=pipe, load=load"):
        outlook(replayed)
    assert gains(outlook(replayed, pipeline=pipe, load=BUSY)) == gains(outlook(run))


def test_a_long_load_is_cut_and_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(what_if, "MOST_REQUESTS", 40)
    found = outlook(serve())
    assert (found.requests, found.of_requests) == (40, 192)


def test_hooks_and_sessions_of_the_run_are_left_alone() -> None:
    seen: list[Any] = []
    pipe = hl.Pipeline(hl.models.encoder(), hooks=[seen.append])
    run = pipe.run(hl.closed_loop(n=8, in_flight=8), on=hl.open_device("sim:h200", values=False))
    events = len(seen)
    outlook(run)
    assert len(seen) == events


def test_a_run_without_answers_cannot_get_better() -> None:
    run = serve(load=hl.closed_loop(n=4, in_flight=4, texts=[b"not json"]))
    with pytest.raises(InputError, match="none of the run's requests"):
        outlook(run)


@pytest.mark.gpu
def test_the_promise_on_a_real_gpu() -> None:
    dev = hl.open_device("cuda")
    run = hl.Pipeline(hl.models.encoder(), memory="pageable", **PICTURES).run(BUSY, on=dev)
    try:
        found = outlook(run)
    except InputError:
        dev.close()
        pytest.skip(f"no profile of {dev.name}")
    trial = found.try_best(dev, rounds=3)
    dev.close()
    assert trial.change.name == "pinned"
    assert trial.measured == pytest.approx(trial.promised, rel=0.3)
