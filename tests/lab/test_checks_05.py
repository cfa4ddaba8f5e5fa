"""Lab 05's checks: right answers pass, and each typical wrong one gets its own message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import heterolab as hl
from heterolab.device.base import Device
from heterolab.lab.check import check
from heterolab.lab.checks_05 import PLANTED, START, IdleByStage, best_throughput, serve, serve_planted
from heterolab.pipeline.hooks import HookEvent
from heterolab.trace import metrics

PROFILES = ("sim:h200", "sim:a100", "sim:t4")


@pytest.fixture(scope="module", params=PROFILES)
def dev(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = hl.open_device(request.param)
    yield opened
    opened.close()


# -- exercise 1 --------------------------------------------------------------------------------


class Empty:
    def __init__(self) -> None:
        self.idle: dict[str, int] = {}

    def __call__(self, event: HookEvent) -> None: ...


class NoIdle:
    def __call__(self, event: HookEvent) -> None: ...


class Constant(Empty):
    def __call__(self, event: HookEvent) -> None:
        self.idle = {"preprocess": 1_000_000}


class EarlyReturn(IdleByStage):
    """Only the first events count."""

    events = 0

    def __call__(self, event: HookEvent) -> None:
        self.events += 1
        if self.events < 20:
            super().__call__(event)


class AlsoWhileBusy(IdleByStage):
    """Counts all the time, kernels or not."""

    def __call__(self, event: HookEvent) -> None:
        busy = self.open.count("kernels")
        self.open = [stage for stage in self.open if stage != "kernels"]
        super().__call__(event) if event.stage != "kernels" else self._move(event)
        self.open += ["kernels"] * busy

    def _move(self, event: HookEvent) -> None:
        self.idle["waiting"] = self.idle.get("waiting", 0) + event.now_ns - self.last_ns
        self.last_ns = event.now_ns


class AllToPreprocess(IdleByStage):
    def __call__(self, event: HookEvent) -> None:
        super().__call__(event)
        self.idle = {"preprocess": sum(self.idle.values())}


class OwnNames(IdleByStage):
    def __call__(self, event: HookEvent) -> None:
        super().__call__(event)
        self.idle = {"gpu": sum(self.idle.values())}


class Raises(IdleByStage):
    def __call__(self, event: HookEvent) -> None:
        self.idle[event.stag] = 1  # type: ignore[attr-defined]


class Text(Empty):
    def __call__(self, event: HookEvent) -> None:
        self.idle = {"preprocess": "a lot"}  # type: ignore[dict-item]


WRONG_HOOKS = {
    Empty: "`idle` is empty",
    NoIdle: "`idle` is empty",
    Constant: "Does every event move",
    EarlyReturn: "Does every event move",
    AlsoWhileBusy: "Do you count while a batch",
    AllToPreprocess: "of the idle time, which is off",
    OwnNames: "'gpu', which is no stage",
    Raises: "self.idle[event.stag] = 1",
    Text: "a number of nanoseconds",
}


def test_the_reference_passes(dev: Device) -> None:
    verdict = check("05-1", IdleByStage, on=dev)
    assert verdict.passed, verdict


@pytest.mark.parametrize("hook", WRONG_HOOKS, ids=lambda c: c.__name__)
def test_wrong_hooks_are_told_what_is_wrong(dev: Device, hook: type) -> None:
    verdict = check("05-1", hook, on=dev)
    assert verdict.state == "fail", verdict
    assert WRONG_HOOKS[hook] in " ".join(repr(verdict).split()), verdict


@pytest.mark.parametrize("answer", [None, 3, IdleByStage()])
def test_no_class_is_said(answer: object) -> None:
    verdict = check("05-1", answer, on=hl.open_device("sim:h200"))
    assert verdict.state == "fail"


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: p[0])
def test_the_planted_stage_is_what_the_trace_blames_too(dev: Device, planted: tuple[str, Any]) -> None:
    """What hooks see agrees with what the trace says: the slow stage comes first."""
    stage, settings = planted
    hook = IdleByStage()
    run = serve_planted(dev, stage, settings, hook)
    assert max(hook.idle, key=lambda name: hook.idle[name]) == stage
    cause = next(c for c in metrics.gpu_idle_by_cause(run.trace) if c.startswith("cpu:"))
    work = {"preprocess": "preprocess", "transfer": "pad_images_float32", "postprocess": "log_to_disk"}
    assert cause == f"cpu:{work[stage]}"


# -- exercise 2 --------------------------------------------------------------------------------


def test_fewer_bytes_and_pinning_move_the_bottleneck(dev: Device) -> None:
    verdict = check("05-2", {"payload": "images_uint8", "memory": "pinned"}, on=dev)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (None, "Nothing is changed yet"),
        ({}, "Nothing is changed yet"),
        (dict(START), "Nothing is changed yet"),
        ("pinned", "Nothing is changed yet"),
        ({"streams": 4, "batch": 64}, "busiest lane is still host"),
        ({"workers": 4}, "not a knob of this exercise"),
        ({"batch": 7}, "Choose from: (16, 32, 64)"),
        ({"memory": []}, "Choose from"),
        ({"memory": "pinned", "batch": 64, "chunk": 64}, "two is the limit"),
    ],
)
def test_wrong_changes_are_told_what_is_wrong(dev: Device, changes: Any, said: str) -> None:
    verdict = check("05-2", changes, on=dev)
    assert verdict.state == "fail", verdict
    assert said in " ".join(repr(verdict).split()), verdict


def test_pinning_alone_is_not_enough(dev: Device) -> None:
    """Where the GPU is slow and the host fast it moves the bottleneck, but is far from the best."""
    verdict = check("05-2", {"memory": "pinned"}, on=dev)
    still = metrics.balance_card(serve(dev, memory="pinned")).lane == "host"
    said = "busiest lane is still host" if still else "of the best two changes"
    assert said in " ".join(repr(verdict).split()), verdict
    assert still or "T4" in dev.name


def test_a_change_that_does_little_is_told_apart(dev: Device) -> None:
    """Fewer bytes move the bottleneck; a batch that is too large gives much of it back."""
    verdict = check("05-2", {"payload": "images_uint8", "batch": 64}, on=dev)
    assert verdict.state == "fail", verdict


def test_the_best_of_all_settings_is_found_and_kept(dev: Device) -> None:
    best = best_throughput(dev)
    one_of_them = metrics.throughput_per_s(serve(dev, payload="images_uint8", memory="pinned"))
    assert best > 0.999 * one_of_them  # a device that has run before has other roundings
    assert best_throughput(dev) == best
