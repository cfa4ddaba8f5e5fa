"""Lab 05: what must happen, and what must not help; ratios and orders of the same machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import heterolab as hl
from heterolab.device.base import Device
from heterolab.errors import InputError
from heterolab.lab import checks_05, disk_logger, one_request
from heterolab.pipeline.run import Run
from heterolab.trace import metrics
from heterolab.workload import questions

PROFILES = ("sim:h200", "sim:a100", "sim:t4")
LARGE = {"batch": 64, "chunk": 64}
LOAD = hl.closed_loop(n=128, in_flight=128, texts=questions()[:16])

Go = Callable[..., Run]
per_s = metrics.throughput_per_s


def server(dev: Device) -> Go:
    def go(**settings: Any) -> Run:
        return hl.Pipeline(hl.models.encoder(), **{"batch": 32, **settings}).run(LOAD, on=dev)

    return go


@pytest.fixture(scope="module", params=PROFILES)
def go(request: pytest.FixtureRequest) -> Iterator[Go]:
    dev = hl.open_device(request.param)
    yield server(dev)
    dev.close()


# -- 1: the GPU is idle, and the CPU is the cause --------------------------------------------------


def test_the_gpu_waits_for_launches(go: Go) -> None:
    run = go(batch=8)
    assert metrics.idle_ns(run.trace, "gpu") > 0.5 * run.trace.wall_ns
    assert next(iter(metrics.gpu_idle_by_cause(run.trace))) == metrics.LAUNCH_CALL
    assert metrics.balance_card(run).lane == "host"


def test_more_streams_change_nothing(go: Go) -> None:
    rates = [per_s(go(batch=8, streams=n)) for n in (1, 2, 4, 8)]
    assert max(rates) < 1.03 * min(rates)


def test_larger_batches_do(go: Go) -> None:
    """A forward pass is as many launches for 64 requests as for 8."""
    small, large = go(batch=8), go(batch=64, chunk=64)
    assert per_s(large) > 3 * per_s(small)
    assert [a.answer for a in small.answers] == [a.answer for a in large.answers]


def test_with_few_launches_small_jobs_are_the_cause(go: Go) -> None:
    one, many = go(payload="images_uint8", chunk=1), go(payload="images_uint8")
    assert metrics.idle_ns(one.trace, "gpu") > 0.5 * one.trace.wall_ns
    assert next(iter(metrics.gpu_idle_by_cause(one.trace))) == "cpu:preprocess"
    assert per_s(many) > 1.5 * per_s(one)


# -- 2: what crosses the link ----------------------------------------------------------------------


def gain(go: Go, **settings: Any) -> float:
    """What pinned memory gains over pageable memory."""
    pinned, pageable = (go(memory=memory, **settings) for memory in ("pinned", "pageable"))
    return per_s(pinned) / per_s(pageable)


def test_for_token_ids_pinning_does_nothing(go: Go) -> None:
    assert abs(gain(go, batch=8) - 1) < 0.05


@pytest.mark.parametrize("settings", [{"payload": "images_float32"}, {"returns": "logits"}])
def test_for_float_pictures_and_logits_it_does_something(go: Go, settings: dict[str, Any]) -> None:
    assert gain(go, **LARGE, **settings) > gain(go, **LARGE) + 0.03


def test_for_float_pictures_it_does_most(go: Go) -> None:
    """Where the GPU limits, its wait for a host held in pageable copies shows for ids as well."""
    assert gain(go, **LARGE, payload="images_float32") - 1 > 3 * abs(gain(go, **LARGE) - 1)


def test_fewer_bytes_beat_pinning(go: Go) -> None:
    pinned = per_s(go(**LARGE, memory="pinned", payload="images_float32"))
    assert per_s(go(**LARGE, memory="pageable", payload="images_uint8")) > 1.05 * pinned


def test_the_best_three_need_no_pinned_memory(go: Go) -> None:
    """From pageable memory they are as fast as logits from pinned memory, whose link is far busier."""
    logits, best = go(**LARGE, memory="pinned", returns="logits"), go(**LARGE, memory="pageable")
    assert per_s(best) > 0.9 * per_s(logits)
    assert metrics.balance_card(logits).link_ms > 5 * metrics.balance_card(best).link_ms


# -- 3: buy a faster GPU ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bought() -> dict[str, Run]:
    long = [" ".join(questions()[i : i + 4]) for i in range(0, 128, 4)]
    load = hl.closed_loop(n=256, in_flight=256, texts=long)
    runs = {}
    for name in ("t4", "a100", "h200"):
        dev = hl.open_device(f"sim:{name}", values=False)
        runs[name] = hl.Pipeline(hl.models.encoder(), batch=32, chunk=32, streams=1).run(load, on=dev)
    return runs


@pytest.mark.parametrize(("old", "new"), [("t4", "a100"), ("a100", "h200"), ("t4", "h200")])
def test_throughput_rises_less_than_the_gpu_did(bought: dict[str, Run], old: str, new: str) -> None:
    """From the oldest one it still pays; on a slow host the last step may bring nothing at all."""
    gpu = metrics.balance_card(bought[old]).gpu_ms / metrics.balance_card(bought[new]).gpu_ms
    service = per_s(bought[new]) / per_s(bought[old])
    assert (1.1 if old == "t4" else 0.99) < service < (0.8 if new == "h200" else 1.0) * gpu


def test_idle_grows_and_the_bottleneck_moves_to_the_cpu(bought: dict[str, Run]) -> None:
    idle = [metrics.idle_ns(run.trace, "gpu") / run.trace.wall_ns for run in bought.values()]
    assert idle == sorted(idle)
    assert idle[-1] > idle[0] + 0.2
    assert metrics.balance_card(bought["t4"]).limits == "gpu"
    assert metrics.balance_card(bought["h200"]).limits == "cpu"


def test_throughput_is_the_least_of_the_lanes(go: Go) -> None:
    """No setting is faster than its busiest lane allows, and the best come near it."""
    runs = [go(chunk=chunk) for chunk in (1, 8, 32, 64)]
    for run in runs:
        assert per_s(run) * metrics.balance_card(run).lane_ms <= 1_000
    assert max(metrics.balance_card(run).share for run in runs) > 0.75


# -- hooks, and what does not help -------------------------------------------------------------------


def test_a_hook_that_logs_to_disk_stalls_the_run(go: Go, tmp_path: Path) -> None:
    plain = go(chunk=32)
    logged = go(chunk=32, hooks=[disk_logger(tmp_path / "log")])
    assert per_s(logged) < 0.8 * per_s(plain)
    causes = metrics.gpu_idle_by_cause(logged.trace)
    assert (
        max((cause for cause in causes if cause.startswith("cpu:")), key=causes.__getitem__)
        == "cpu:log_to_disk"
    )
    assert len((tmp_path / "log").read_text().splitlines()) == len(logged.answers)
    assert not logged.hook_errors


@pytest.mark.parametrize("change", [{"streams": 4}, {"batch": 64}, {"chunk": 64}])
def test_tuning_a_stage_that_does_not_limit_does_not_help(go: Go, change: dict[str, Any]) -> None:
    start = {**checks_05.START, "chunk": 32}
    assert per_s(go(**{**start, **change})) < 1.02 * per_s(go(**start))


def test_one_request_can_be_followed(go: Go) -> None:
    run = go(chunk=32)
    steps = [float(row[2]) for row in one_request(run, 70).rows]
    assert steps[0] == 0
    assert all(step > 0 for step in steps[1:])
    with pytest.raises(InputError, match="0 to 127"):
        one_request(run, 500)


@pytest.mark.gpu
def test_on_a_gpu_the_payload_decides() -> None:
    go = server(hl.open_device("cuda"))
    for settings in ({}, {"payload": "images_float32"}):  # warm up
        go(**settings)
    assert gain(go, **LARGE, payload="images_float32") > 1.05
