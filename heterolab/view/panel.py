"""The panel: a lab's knobs beside the timeline and the figures that matter.

A panel turns *any* job: a function of its knobs that returns a Run or a Trace. Where jobs take
no time of their own (a simulator), it runs again as soon as a knob moves. Where they do, one
presses Run; with `live`, the picture grows while the job runs, and Stop ends it.

Nothing here waits for a browser. Without one (a test, a grader, a page made from the notebook)
a panel is the line of text that ``repr`` gives and a still picture.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from html import escape
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import ipywidgets as widgets
import plotly.graph_objects as go

from heterolab.errors import HeteroLabError, InputError
from heterolab.trace.trace import Trace
from heterolab.view.catalogue import text
from heterolab.view.knobs import Choices, Knobs, allowed, arguments, check_choices
from heterolab.view.still import svg
from heterolab.view.timeline import Lanes, timeline
from heterolab.view.words import describe, diagnosis, error_in_words, figures, table, trace_of

if TYPE_CHECKING:
    from heterolab.device.base import Device
    from heterolab.models.encoder import Encoder
    from heterolab.pipeline.run import Run
    from heterolab.view.words import Shown
    from heterolab.workload import Load

#: How often a live picture is redrawn; it takes at most a fifth of the time, see `_follow`.
REFRESH_S, REST = 0.2, 4
#: What a live picture shows of a long run.
LIVE_WINDOW_NS = 1_000_000_000

_PACKAGE = str(Path(__file__).parent.parent)


class LiveRun(Protocol):
    """A job that runs by itself; :class:`heterolab.pipeline.pipeline.Live` is one."""

    @property
    def done(self) -> bool: ...
    def stop(self) -> Any: ...
    def join(self) -> Any: ...
    def snapshot(self) -> Any: ...


class Panel(widgets.VBox):  # type: ignore[misc]
    """Knobs, a timeline, and the figures that matter.

    Parameters
    ----------
    job
        ``job(**knobs)`` returns a Run or a Trace.
    knobs
        One to three: by keyword of `job`, a list of values or a range ``(low, high)``.
    start
        Where the knobs stand at first; default: the first choice.
    at_once
        Run as soon as a knob moves, and once now. Else only when Run is pressed.
    live
        ``live(**knobs)`` starts the job beside the notebook and returns a
        :class:`LiveRun`; then Run and Stop are offered, and `at_once` is off.
    code
        From the knobs' values, the line of code that does the same as this panel.
    lanes, bound
        As in :func:`heterolab.view.timeline.timeline`.

    Attributes
    ----------
    last
        The last Run or Trace, None before the first.
    figure
        Its timeline, as a figure of its own that does not change.
    """

    def __init__(
        self,
        job: Callable[..., Shown],
        *,
        knobs: Mapping[str, Choices],
        start: Mapping[str, Any] | None = None,
        at_once: bool = True,
        live: Callable[..., LiveRun] | None = None,
        code: Callable[[dict[str, Any]], str] | None = None,
        lanes: Lanes = "three",
        bound: bool = False,
    ) -> None:
        self._job, self._live_job = job, live
        self._at_once = at_once and live is None
        self._lanes, self._bound = lanes, bound
        self._code = code or (lambda values: f"{getattr(job, '__name__', 'job')}({arguments(values)})")
        self._knobs = Knobs(knobs, start or {}, self._on_moved)
        self.last: Shown | None = None
        self.figure = go.Figure()
        self._figures: dict[str, str] = {}
        self._following: asyncio.Task[None] | None = None
        self._live: LiveRun | None = None
        self._stop_asked = asyncio.Event()
        super().__init__(self._make_widgets())
        self._show_code()
        if self._at_once:
            self.run()
        else:
            self._say("panel.ready")

    # -- what a lab or a student calls -----------------------------------------------------

    @property
    def settings(self) -> dict[str, Any]:
        """The knobs' values."""
        return self._knobs.settings

    @property
    def code(self) -> str:
        """The line of code that does the same as this panel."""
        return self._code(self.settings)

    def set(self, **values: Any) -> Panel:
        """Move knobs from code, as the mouse would; unknown names and values are refused."""
        self._knobs.set(values)
        return self

    def run(self) -> Shown:
        """Run the job as the knobs stand, to its end, and show it. What it raises is raised;
        the earlier result stays."""
        if self._live is not None:
            raise InputError(text("panel.busy"))
        shown = self._job(**self.settings)
        if not isinstance(shown, Trace) and not isinstance(getattr(shown, "trace", None), Trace):
            raise InputError(text("panel.no_run", kind=type(shown).__name__))
        self._keep(shown)
        return shown

    def start(self) -> None:
        """Start the job live, as the Run button does; the picture grows while it runs."""
        if self._live_job is None:
            self.run()
            return
        if self._live is not None:
            raise InputError(text("panel.busy"))
        self._live = self._live_job(**self.settings)
        self._stop_asked.clear()
        self._set_buttons(running=True)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a plain script: nobody would redraw, so wait for the end
            self._finish(self._live.join())
        else:
            self._following = loop.create_task(self._follow(self._live))

    def stop(self) -> None:
        """End a live run: nothing more is admitted, what is in flight is finished."""
        if self._live is not None:
            self._say("panel.stopping")
            self._stop_asked.set()

    def __repr__(self) -> str:
        stamp = f"; {trace_of(self.last).stamp}" if self.last is not None else ""
        return f"<Panel {arguments(self.settings)}{stamp}>"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**options)
        if self.last is not None:
            bundle["image/svg+xml"] = svg(self.last)
        return bundle

    # -- a live run --------------------------------------------------------------------------

    async def _follow(self, live: LiveRun) -> None:
        """Redraw until the run ends or Stop is pressed. Between two pictures it rests several
        times as long as one took, so that watching does not slow down what is watched."""
        rest_s = REFRESH_S
        try:
            while not live.done:
                if await self._stop_comes_within(rest_s):
                    # In a thread: the notebook must not freeze while batches in flight end.
                    await asyncio.get_running_loop().run_in_executor(None, live.stop)
                    break
                began = time.perf_counter()
                self._show_so_far(live.snapshot())
                rest_s = max(REFRESH_S, REST * (time.perf_counter() - began))
            self._finish(live.join())
        except Exception as error:
            self._show_error(error)
        finally:
            self._live = None
            self._set_buttons(running=False)

    async def _stop_comes_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop_asked.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _show_so_far(self, shown: Shown) -> None:
        answers = len(trace_of(shown)) if isinstance(shown, Trace) else len(shown.answers)
        if not self._stop_asked.is_set():
            self._say("panel.running", answers=answers)
        self._draw(shown, last_ns=LIVE_WINDOW_NS)

    def _finish(self, shown: Shown) -> None:
        self._live = None
        self._set_buttons(running=False)
        self._keep(shown)
        unserved = 0 if isinstance(shown, Trace) else len(shown.unserved)
        stopped = self._stop_asked.is_set() or unserved
        self._say("panel.stopped" if stopped else "panel.done", unserved=unserved)

    # -- showing ---------------------------------------------------------------------------

    def _make_widgets(self) -> list[Any]:
        self._code_line = widgets.HTML()
        self._status = widgets.HTML()
        self._error = widgets.HTML()
        self._diagnosis = widgets.HTML()
        self._numbers = widgets.HTML()
        self._picture = Picture(timeline([], lanes=self._lanes))
        self._run_button = widgets.Button(description=text("panel.run"), button_style="primary")
        self._stop_button = widgets.Button(description=text("panel.stop"), disabled=True)
        self._reset_button = widgets.Button(description=text("panel.reset"))
        self._run_button.on_click(lambda _: self._attempt(self.start))
        self._stop_button.on_click(lambda _: self.stop())
        self._reset_button.on_click(lambda _: self._knobs.reset())
        buttons = [self._reset_button]
        if not self._at_once:
            buttons = [self._run_button, *([self._stop_button] if self._live_job else []), *buttons]
        for button in buttons:
            button.layout.width = "80px"
        controls = widgets.VBox([*self._knobs.widgets, widgets.HBox(buttons), self._status, self._error])
        controls.layout = widgets.Layout(flex="0 1 330px", overflow="hidden")
        picture = widgets.Box([self._picture.widget], layout=widgets.Layout(flex="1 1 480px", min_width="0"))
        side_by_side = widgets.Layout(flex_flow="row wrap", align_items="flex-start")
        top = widgets.HBox([controls, picture], layout=side_by_side)
        return [self._code_line, top, self._diagnosis, self._numbers]

    def _on_moved(self) -> None:
        self._show_code()
        if self._at_once:
            self._attempt(self.run)
        elif self._live is None and self.last is not None:
            self._say("panel.stale")

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do what a widget asks for; an error is shown, and what was there stays."""
        try:
            action()
        except Exception as error:
            self._show_error(error)

    def _keep(self, shown: Shown) -> None:
        """A finished result: draw it, and remember it."""
        self.figure = self._draw(shown)
        self.last = shown
        self._figures = dict(figures(shown))
        self._error.value = ""
        self._say("panel.done")

    def _draw(self, shown: Shown, last_ns: int | None = None) -> go.Figure:
        figure = timeline(shown, lanes=self._lanes, bound=self._bound, last_ns=last_ns)
        self._picture.show(figure)
        stamp = trace_of(shown).stamp
        words = escape(describe(shown).alt)
        now, head = figures(shown), ("", text("panel.now"), text("panel.before"))
        rows = [(name, value, self._figures.get(name, "")) for name, value in now]
        self._diagnosis.value = (
            f'<p role="status"><b>{escape(diagnosis(shown))}</b> <i>{escape(stamp)}</i></p>'
        )
        self._numbers.value = (
            f"{table(rows, head)}<details><summary>{escape(text('panel.words'))}</summary>{words}</details>"
        )
        return figure

    def _show_code(self) -> None:
        self._code_line.value = f"<code>{escape(self.code)}</code>"

    def _say(self, key: str, **values: Any) -> None:
        self._status.value = f'<span role="status">{escape(text(key, **values))}</span>'

    def _show_error(self, error: Exception) -> None:
        told = escape(text("panel.error", error=explain_error(error)))
        self._error.value = f'<p role="alert" style="line-height: 1.3; white-space: normal">{told}</p>'
        self._say("panel.failed")

    def _set_buttons(self, running: bool) -> None:
        self._run_button.disabled = running
        self._stop_button.disabled = not running


class Picture:
    """Where the timeline is drawn. To put another kind of view here (a canvas), give it a
    `widget` and a `show(figure)`."""

    def __init__(self, figure: go.Figure) -> None:
        self.widget = go.FigureWidget(figure)

    def show(self, figure: go.Figure) -> None:
        """Draw `figure` in place of what is there. All timelines have the same plotly traces,
        so only their data and the layout's changing parts travel."""
        with self.widget.batch_update():
            for old, new in zip(self.widget.data, figure.data, strict=True):
                old.x, old.y = new.x, new.y
                old.text, old.showlegend = new.text, new.showlegend
            for part in ("title", "annotations", "shapes", "height", "xaxis", "yaxis"):
                self.widget.layout[part] = figure.layout[part]


def explain_error(error: Exception) -> str:
    """An error in a line; where it came from code outside this package, that code's line too."""
    told = error_in_words(error)
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_PACKAGE)
    ]
    if isinstance(error, HeteroLabError) or not theirs:
        return told
    line = text("panel.error_line", number=theirs[-1].lineno, code=theirs[-1].line or "")
    return f"{told} {line}"


def pipeline_panel(
    model: Encoder, load: Load, *, on: Device, knobs: Mapping[str, Choices], **fixed: Any
) -> Panel:
    """A panel whose job is ``Pipeline(model, **knobs, **fixed).run(load, on=on)``.

    Parameters
    ----------
    model, load
        As for the pipeline.
    on
        The device. On a simulated one a knob that moves shows its effect at once; on a real
        one Run starts a live run.
    knobs
        One to three of the pipeline's settings, e.g. ``{"batch": [1, 8, 32], "streams": (1, 8)}``.
    fixed
        The other settings; one that is a knob too is where that knob stands at first.
    """
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

    def code(values: dict[str, Any]) -> str:
        shown = {name: value for name, value in fixed.items() if isinstance(value, str | int | float)}
        return f"hl.Pipeline(enc, {arguments(values | shown)})"

    usual = asdict(make().settings)
    start = {n: usual[n] for n in knobs if n in usual and allowed(knobs[n], usual[n])} | start
    is_real = on.source != "simulated"
    return Panel(job, knobs=knobs, start=start, live=live if is_real else None, code=code)


#: The live run of each device. A device serves one run at a time, whichever panel began it: a
#: cell that is run again makes a new panel, while the old one's run may still go on.
_going: WeakKeyDictionary[Device, LiveRun] = WeakKeyDictionary()


def _end_run_on(device: Device) -> None:
    """Stop the run that still goes on there, if one does."""
    before = _going.pop(device, None)
    if before is not None and not before.done:
        before.stop()


__all__ = ["LiveRun", "Panel", "Picture", "pipeline_panel"]
