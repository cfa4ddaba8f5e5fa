"""Why is the GPU idle? In pipelines whose cause is known, since they were built to have it."""

from __future__ import annotations

from typing import Any

import pytest

import heterolab as hl
from heterolab.device.base import Kernel, Work
from heterolab.lab.streams import record
from heterolab.pipeline.run import Run
from heterolab.trace import explain
from heterolab.trace.trace import Trace

MACHINES = ("h200", "t4", "a100")
AT_ONCE = hl.closed_loop(n=64, in_flight=64, seed=0)


def serve(profile: Any, load: Any = AT_ONCE, **settings: Any) -> Run:
    name = profile if isinstance(profile, hl.DeviceProfile) else f"sim:{profile}"
    return hl.Pipeline(hl.models.encoder(), **settings).run(load, on=hl.open_device(name, values=False))


def shares(run: Run | Trace) -> dict[str, float]:
    """Idle time by cause as shares of it, the largest first."""
    causes = explain.find(run).by_cause()
    return {cause: ns / sum(causes.values()) for cause, ns in causes.items()}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_slow_worker(machine: str) -> None:
    base = hl.DeviceProfile.load(machine)
    cost = base.raw["cpu_costs"]["preprocess"]
    slow = hl.imagined("slow", base, cpu_costs={"preprocess": {"ns": [20 * ns for ns in cost["ns"]]}})
    found = explain.find(serve(slow, batch=16, payload="images_uint8"))
    assert next(iter(found.by_cause())) == "cpu:preprocess"
    gap = max(found.gaps, key=lambda gap: gap.took_ns)
    (worker, ns), *_ = gap.evidence
    assert (worker.name, worker.lane, ns) == ("preprocess", "worker 0", gap.took_ns)
    as_it_is = shares(serve(base, batch=16, payload="images_uint8"))
    assert as_it_is["cpu:preprocess"] < shares(found.trace)["cpu:preprocess"] - 0.1


@pytest.mark.parametrize("machine", MACHINES)
def test_pageable_pictures_hold_the_host(machine: str) -> None:
    pictures = {"payload": "images_float32", "batch": 32, "chunk": 32, "streams": 1}
    held = explain.find(serve(machine, memory="pageable", **pictures))
    assert list(held.by_cause()).index("pageable") <= 2
    calls = {span.op for gap in held.gaps if gap.cause == "pageable" for span, _ in gap.evidence}
    copies = held.trace.kind("h2d", "d2h")["op"].tolist()
    assert calls <= set(copies), "the evidence is copies"
    pinned = explain.find(serve(machine, memory="pinned", **pictures)).by_cause()
    assert "pageable" not in pinned


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_arrives_at_a_low_rate(machine: str) -> None:
    run = serve(machine, hl.poisson(rate=20, n=20, seed=0), max_delay_ms=0)
    assert next(iter(shares(run))) == "arrivals"
    assert shares(run)["arrivals"] > 0.7
    assert "batch_delay" not in shares(run)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_long_batch_delay(machine: str) -> None:
    run = serve(machine, hl.poisson(rate=50, n=20, seed=0), max_delay_ms=40)
    assert next(iter(shares(run))) == "batch_delay"
    assert "batch_delay" not in shares(serve(machine, hl.poisson(rate=50, n=20, seed=0), max_delay_ms=0))


def test_an_eager_forward_is_launch_bound() -> None:
    run = serve("h200", batch=8)
    assert next(iter(shares(run))) == "launch_call"
    assert shares(run)["launch_call"] > 0.8
    gaps = [gap for gap in explain.find(run).gaps if gap.cause == "launch_call"]
    assert all(span.name == "launch" for gap in gaps for span, _ in gap.evidence[:1] if gap.took_ns > 50_000)


@pytest.mark.parametrize("machine", MACHINES)
def test_two_streams_and_an_event(machine: str) -> None:
    dev = hl.open_device(f"sim:{machine}")
    work = Kernel("use", lambda xp, r, w: None, lambda r, w: Work(block_ns=50_000))
    host, there = dev.buffer(1 << 24, "float32", "pinned"), dev.buffer(1 << 24, "float32")
    host.write()[...] = 1
    first, second = dev.stream(), dev.stream()

    def program(dev: Any) -> None:
        first.copy(there, host)
        second.wait(first.record())
        second.launch(work, [there], [there])

    found = explain.find(record(dev, program))
    (copy,) = found.trace.kind("h2d")
    event = [gap for gap in found.gaps if gap.cause == "event"]
    assert sum(gap.took_ns for gap in event) > 0.95 * (copy.end_ns - copy.start_ns)
    assert event[0].evidence[0][0].op == copy.op

    def in_one_stream(dev: Any) -> None:
        first.copy(there, host)
        first.launch(work, [there], [there])

    causes = explain.find(record(dev, in_one_stream)).by_cause()
    assert next(iter(causes)) == "input_copy"
    assert "event" not in causes


def test_two_gpus_under_one_host_are_told_apart() -> None:
    one = hl.open_device("sim:h200")
    two = hl.open_device("sim:t4", host=one.host)
    spin = Kernel("spin", lambda xp, r, w: None, lambda r, w: Work(block_ns=300_000))

    def program(dev: Any) -> None:
        one.stream().launch(spin)
        one.synchronize()
        two.stream().launch(spin)
        two.synchronize()

    found = explain.find(record(one, program))
    assert found.devices == (0, 1)
    assert next(iter(found.by_cause(0))) == "end"
    assert next(iter(found.by_cause(1))) == "sync"
    assert sum(found.by_cause(0).values()) > 300_000 < sum(found.by_cause(1).values())


def test_a_real_clock(cpu_device: Any) -> None:
    """On this CPU times vary; the sums do not."""
    run = hl.Pipeline(hl.models.encoder(), batch=4).run(hl.poisson(rate=200, n=16, seed=0), on=cpu_device)
    found = explain.find(run)
    assert sum(found.by_cause(0).values()) == hl.metrics.idle_ns(run.trace, "gpu")
    assert {"arrivals", "batch_delay"} & found.by_cause().keys()
    assert found.by_cause().get("unknown", 0) < 0.02 * run.trace.wall_ns


def test_a_recording_says_as_much_as_the_run_did(tmp_path: Any) -> None:
    run = serve("h200", hl.poisson(rate=200, n=20, seed=0))
    replayed = Trace.load(run.trace.save(tmp_path / "run.json.gz"))
    assert explain.find(replayed).gaps == explain.find(run).gaps
    assert explain.find(replayed).path == explain.find(run).path
    old = Trace(replayed.columns, replayed.source, replayed.device, True, {})
    found = explain.find(old)
    assert {gap.missing for gap in found.gaps if gap.cause == "unknown"} == {"requests"}
    assert not {"arrivals", "batch_delay"} & found.by_cause().keys()


def test_a_run_remembers_what_it_was_made_from_and_its_trace_when_requests_came() -> None:
    run = serve("t4", hl.poisson(rate=200, n=5, seed=0))
    assert run.origin.load.label == "poisson(rate=200, n=5, seed=0)"
    assert run.origin.profile.name == "NVIDIA T4"
    assert run.trace.meta["requests"]["done_ns"] == [run.timings[i].done_ns for i in range(5)]


def test_cuda_events_hide_pauses_and_it_says_so() -> None:
    trace = serve("h200").trace
    by_events = Trace(trace.columns, "cuda-events", trace.device, meta=trace.meta)
    assert explain.find(by_events).doubts == ("events",)
    assert explain.find(trace).doubts == ()


@pytest.mark.parametrize("name", ["05-ids-pinned", "05-images_float32-pageable", "05-images_float32-pinned"])
def test_a_recording_of_a_gpu(name: str) -> None:
    recorded = hl.lab.recording(name)
    found = explain.find(recorded)
    assert sum(found.by_cause().values()) == hl.metrics.idle_ns(found.trace, "gpu")
    assert ("pageable" in list(found.by_cause())[:3]) == name.endswith("pageable")
    if recorded.source == "cupti" and "ids" in name:
        assert next(iter(found.by_cause())) == "launch_call"


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["pageable", "pinned"])
def test_a_real_gpu(memory: str) -> None:
    dev = hl.open_device("cuda")
    pictures = {"payload": "images_float32", "batch": 32, "chunk": 32, "streams": 1}
    run = hl.Pipeline(hl.models.encoder(), memory=memory, **pictures).run(AT_ONCE, on=dev)
    dev.close()
    found = explain.find(run)
    assert sum(found.by_cause(0).values()) == hl.metrics.idle_ns(run.trace, "gpu")
    assert ("pageable" in list(found.by_cause())[:3]) == (memory == "pageable")
    assert found.by_cause().get("unknown", 0) < 0.05 * run.trace.wall_ns
