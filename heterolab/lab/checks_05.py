"""The checks of lab 05."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from heterolab import models
from heterolab.device.base import Device
from heterolab.lab.check import Found, Stopped, attempt, holds, ratio
from heterolab.lab.hooks import disk_logger
from heterolab.lab.messages import text
from heterolab.pipeline.hooks import STAGES, Hook, HookEvent
from heterolab.pipeline.pipeline import Pipeline
from heterolab.pipeline.run import Run
from heterolab.trace import metrics
from heterolab.workload import Load, closed_loop, questions

WAITING = "waiting"

#: Three pipelines, each with another stage made slow: that stage, and the settings that do it.
#: They serve pictures, whose forward pass is a few launches: a hook sees "kernels" begin as the
#: host begins to launch, so it cannot see the GPU wait for hundreds of launches. The last one
#: also gets the hook that logs to disk as the answers are made.
PLANTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("preprocess", {"batch": 32, "chunk": 1, "payload": "images_uint8"}),
    ("transfer", {"batch": 16, "payload": "images_float32"}),
    ("postprocess", {"batch": 16, "chunk": 32, "payload": "images_uint8"}),
)


def load(n: int = 64) -> Load:
    """Requests that are all there at once: few different texts, so that answers are quick."""
    return closed_loop(n=n, in_flight=n, seed=0, texts=questions()[:16])


# -- exercise 1: a hook that says why the GPU is idle --------------------------------------------


class IdleByStage:
    """The reference answer: GPU idle time by the stage that was going on, as hooks can see it."""

    def __init__(self) -> None:
        self.idle: dict[str, int] = {}
        self.open: list[str] = []
        self.last_ns = 0

    def __call__(self, event: HookEvent) -> None:
        if "kernels" not in self.open:
            stage = self.open[-1] if self.open else WAITING
            self.idle[stage] = self.idle.get(stage, 0) + event.now_ns - self.last_ns
        if event.phase == "begin":
            self.open.append(event.stage)
        else:
            self.open.remove(event.stage)
        self.last_ns = event.now_ns


def idle_hook(dev: Device, hook_class: Any) -> Iterator[Found]:
    """``hook_class()`` is a hook with `.idle`: nanoseconds by stage."""
    for planted, settings in PLANTED:
        hook, reference = attempt(hook_class), IdleByStage()
        if not callable(hook):
            raise Stopped(text("05.hook.not_callable", value=type(hook).__name__))
        problems: list[Stopped] = []

        def watched(event: HookEvent, hook: Any = hook, problems: list[Stopped] = problems) -> None:
            try:
                attempt(hook, event)
            except Stopped as stopped:
                problems.append(stopped)
                raise

        serve_planted(dev, planted, settings, reference, watched)
        if problems:
            raise problems[0]
        yield from _same_idle(getattr(hook, "idle", None), reference.idle, planted)


def serve_planted(dev: Device, planted: str, settings: dict[str, Any], *hooks: Hook) -> Run:
    """One of :data:`PLANTED`, with `hooks`."""
    with tempfile.TemporaryDirectory() as folder:
        slow = (disk_logger(Path(folder) / "log", lines=3),) if planted == "postprocess" else ()
        return Pipeline(models.encoder(), hooks=(*hooks, *slow), **settings).run(load(), on=dev)


def _same_idle(got: Any, wanted: dict[str, int], planted: str) -> Iterator[Found]:
    stages = (*STAGES, WAITING)
    shape = ""
    if not isinstance(got, dict) or not got:
        shape = "05.idle.empty"
    elif unknown := [str(stage) for stage in got if stage not in stages]:
        yield holds("05.idle.stages", "05.idle.unknown", unknown=unknown[0], stages=", ".join(stages))
        return
    elif odd := [stage for stage, ns in got.items() if not _is_duration(ns)]:
        yield holds("05.idle.stages", "05.idle.number", stage=odd[0], value=got[odd[0]])
        return
    yield holds("05.idle.stages", shape)
    total, right = sum(got.values()), sum(wanted.values())
    if not total:
        yield holds("05.idle.sum", "05.idle.little", total="0.00", right=f"{right / 1e6:.2f}", case=planted)
        return
    problem = "" if abs(total - right) <= 0.01 * right else f"05.idle.{'much' if total > right else 'little'}"
    yield holds("05.idle.sum", problem, total=f"{total / 1e6:.2f}", right=f"{right / 1e6:.2f}", case=planted)
    shares = {stage: (got.get(stage, 0) / total, wanted.get(stage, 0) / right) for stage in stages}
    worst = max(stages, key=lambda stage: abs(shares[stage][0] - shares[stage][1]))
    mine, should = shares[worst]
    problem = "" if abs(mine - should) <= 0.05 else "05.idle.share.off"
    yield holds("05.idle.share", problem, stage=worst, mine=f"{mine:.0%}", case=planted)


def _is_duration(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


# -- exercise 2: move the bottleneck --------------------------------------------------------------

START: dict[str, Any] = {
    "payload": "images_float32",
    "memory": "pageable",
    "batch": 32,
    "streams": 1,
    "chunk": 16,
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "payload": ("images_float32", "images_uint8"),
    "memory": ("pageable", "pinned"),
    "batch": (16, 32, 64),
    "streams": (1, 2, 4),
    "chunk": (16, 32, 64),
}

#: What counts as close to the best throughput that two changes can give.
NEAR_BEST = 0.8

#: Of each device: throughput and busiest lane with every one or two changes.
_tried: WeakKeyDictionary[Device, list[tuple[float, str]]] = WeakKeyDictionary()


def serve(dev: Device, **changes: Any) -> Run:
    """The exercise's pipeline with `changes`."""
    return Pipeline(models.encoder(), **{**START, **changes}).run(load(), on=dev)


def tried(dev: Device) -> list[tuple[float, str]]:
    """Throughput and busiest lane of all settings with one or two changes, tried on `dev` once."""
    if dev not in _tried:
        runs = (serve(dev, **changes) for changes in settings())
        _tried[dev] = [(metrics.throughput_per_s(run), metrics.balance_card(run).lane) for run in runs]
    return _tried[dev]


def best_throughput(dev: Device) -> float:
    """The highest throughput that one or two changes can give."""
    return max(throughput for throughput, _ in tried(dev))


def settings() -> list[dict[str, Any]]:
    """All ways to change one knob or two."""
    one = [{name: value} for name in CHOICES for value in CHOICES[name] if value != START[name]]
    return one + [a | b for a, b in itertools.combinations(one, 2) if a.keys() != b.keys()]


def two_changes(dev: Device, changes: Any) -> Iterator[Found]:
    """At most two changes of :data:`START` that move the bottleneck."""
    yield _allowed(changes)
    before, after = serve(dev), serve(dev, **changes)
    lost = len(before.answers) - len(after.answers)
    yield holds("05.two.served", "05.two.lost" if lost else "", lost=lost)
    differ = sum(a.answer != b.answer for a, b in zip(before.answers, after.answers, strict=True))
    yield holds("05.two.same", "05.two.differ" if differ else "", differ=differ)
    first, now = metrics.balance_card(before).lane, metrics.balance_card(after).lane
    good = NEAR_BEST * best_throughput(dev)
    if first == now and all(lane == first for throughput, lane in tried(dev) if throughput >= good):
        told = text("05.two.cannot_move", lane=first)
        yield Found(text("05.two.moved"), told, "inconclusive")
    else:
        yield holds("05.two.moved", "05.two.not_moved" if first == now else "", lane=first)
    throughput, best = metrics.throughput_per_s(after), best_throughput(dev)
    yield ratio(
        "05.two.fast",
        throughput / best,
        NEAR_BEST,
        1.1,
        below="05.two.slow",
        above="05.two.skipped",
        source=dev.source,
        throughput=f"{throughput:.0f}",
        best=f"{best:.0f}",
    )


def _allowed(changes: Any) -> Found:
    if not isinstance(changes, dict) or not changes:
        return holds("05.two.few", "05.two.none")
    for name, value in changes.items():
        if name not in CHOICES:
            return holds("05.two.few", "05.two.knob", name=name, knobs=", ".join(CHOICES))
        if not any(value is choice or value == choice for choice in CHOICES[name]):
            return holds("05.two.few", "05.two.value", name=name, value=value, choices=CHOICES[name])
    really = [name for name, value in changes.items() if value != START[name]]
    if not really:
        return holds("05.two.few", "05.two.none")
    return holds("05.two.few", "05.two.many" if len(really) > 2 else "", count=len(really))


__all__ = ["CHOICES", "PLANTED", "START", "IdleByStage", "idle_hook", "serve_planted", "two_changes"]
