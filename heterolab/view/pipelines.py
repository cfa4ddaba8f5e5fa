"""A panel for the pipeline: its knobs are the pipeline's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from heterolab.errors import InputError
from heterolab.view.catalogue import text
from heterolab.view.knobs import Choices, allowed, arguments, check_choices
from heterolab.view.panel import LiveRun, Panel
from heterolab.view.switch import recorded_like, simulated_like

if TYPE_CHECKING:
    from heterolab.device.base import Device
    from heterolab.models.encoder import Encoder
    from heterolab.pipeline.pipeline import Pipeline
    from heterolab.pipeline.run import Run
    from heterolab.view.words import Shown
    from heterolab.workload import Load


def pipeline_panel(
    model: Encoder,
    load: Load,
    *,
    on: Device,
    knobs: Mapping[str, Choices],
    predict_on: Device | None = None,
    **fixed: Any,
) -> Panel:
    """A panel whose job is ``Pipeline(model, **knobs, **fixed).run(load, on=on)``.

    Its switch lays the simulator's prediction over what was measured, in the measured run's
    batches. Where `on` is simulated, the measurement is a recording with the same settings.

    Parameters
    ----------
    model, load
        As for the pipeline.
    on
        The device. On a simulated one a knob that moves shows its effect at once; on a real
        one Run starts a live run.
    knobs
        One to three of the pipeline's settings, e.g. ``{"batch": [1, 8, 32], "streams": (1, 8)}``.
    predict_on
        The simulated device that predicts a real one; default: the built-in profile of its name.
    fixed
        The other settings; one that is a knob too is where that knob stands at first.
    """
    from heterolab.pipeline.again import predict_like
    from heterolab.pipeline.pipeline import Pipeline

    check_choices(knobs)
    known = [name for name in signature(Pipeline).parameters if name != "model"]
    for name in (*knobs, *fixed):
        if name not in known:
            raise InputError(text("panel.unknown_setting", name=name, names=", ".join(known)))
    start = {name: fixed.pop(name) for name in list(fixed) if name in knobs}

    def make(**values: Any) -> Pipeline:
        return Pipeline(model, **fixed, **values)

    def job(**values: Any) -> Run:
        _end_run_on(on)
        return make(**values).run(load, on=on)

    def live(**values: Any) -> LiveRun:
        _end_run_on(on)
        started = _going[on] = make(**values).start(load, on=on)
        return started

    predicting = [predict_on] if predict_on else []

    def counterpart(shown: Run, **values: Any) -> Shown:
        if on.source == "simulated":
            return recorded_like(shown.trace)
        if not predicting:
            predicting.append(simulated_like(on))
        return predict_like(shown, make(**values), load, on=predicting[0])

    def code(values: dict[str, Any]) -> str:
        shown = {name: value for name, value in fixed.items() if isinstance(value, str | int | float)}
        return f"hl.Pipeline(enc, {arguments(values | shown)})"

    usual = asdict(make().settings)
    start = {n: usual[n] for n in knobs if n in usual and allowed(knobs[n], usual[n])} | start
    is_real = on.source != "simulated"
    beside = live if is_real else None
    return Panel(job, knobs=knobs, start=start, live=beside, code=code, counterpart=counterpart)


#: The live run of each device. A device serves one run at a time, whichever panel began it: a
#: cell that is run again makes a new panel, while the old one's run may still go on.
_going: WeakKeyDictionary[Device, LiveRun] = WeakKeyDictionary()


def _end_run_on(device: Device) -> None:
    """Stop the run that still goes on there, if one does."""
    before = _going.pop(device, None)
    if before is not None and not before.done:
        before.stop()
