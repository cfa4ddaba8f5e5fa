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
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ipywidgets as widgets
import plotly.graph_objects as go

from heterolab.errors import HeteroLabError, InputError
from heterolab.trace.trace import Trace
from heterolab.view.catalogue import text
from heterolab.view.knobs import Choices, Knobs, arguments
from heterolab.view.picture import Picture
from heterolab.view.still import svg
from heterolab.view.switch import CompareSwitch
from heterolab.view.timeline import Lanes, timeline
from heterolab.view.words import describe, diagnosis, error_in_words, figures, table, trace_of

if TYPE_CHECKING:
    from heterolab.view.compared import Comparison
    from heterolab.view.words import Shown

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
    counterpart
        ``counterpart(shown, **knobs)``: the prediction of what the job measured, or a measurement
        of what it predicted. With it, a switch lays one over the other.

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
        counterpart: Callable[..., Shown] | None = None,
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
        self._switch = CompareSwitch(counterpart) if counterpart else None
        self._ran_with: dict[str, Any] = {}
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
        self._ran_with = self.settings
        shown = self._job(**self._ran_with)
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
        self._ran_with = self.settings
        self._live = self._live_job(**self._ran_with)
        self._stop_asked.clear()
        self._box.children = [self._picture.widget]
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

    @property
    def comparison(self) -> Comparison | None:
        """The prediction over the measurement, while the switch is on; else None."""
        return self._switch.comparison if self._switch else None

    def compare(self, on: bool = True) -> Comparison | None:
        """Turn the switch from code, as the mouse would; gives the comparison. What stands in its
        way is raised, and leaves the switch as it was."""
        if self._switch is None:
            raise InputError(text("panel.no_switch"))
        if on:
            self._compare()
        self._switch.checkbox.value = on
        self._show_comparison()
        return self.comparison

    def __repr__(self) -> str:
        stamp = f"; {trace_of(self.last).stamp}" if self.last is not None else ""
        compared = f"; {self.comparison.title}" if self.comparison else ""
        return f"<Panel {arguments(self.settings)}{stamp}{compared}>"

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
        switch = [self._switch.checkbox] if self._switch else []
        inside = [*self._knobs.widgets, widgets.HBox(buttons), *switch, self._status, self._error]
        controls = widgets.VBox(inside, layout=widgets.Layout(flex="0 1 330px", overflow="hidden"))
        self._box = widgets.Box(
            [self._picture.widget], layout=widgets.Layout(flex="1 1 480px", min_width="0")
        )
        side_by_side = widgets.Layout(flex_flow="row wrap", align_items="flex-start")
        top = widgets.HBox([controls, self._box], layout=side_by_side)
        compared = []
        if self._switch:
            self._switch.checkbox.observe(lambda _: self._show_comparison(), names="value")
            compared = [self._switch.words]
        return [self._code_line, top, self._diagnosis, *compared, self._numbers]

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
        if self._switch and self._switch.on:
            self._switch.clear()  # it was of the result before
            self._show_comparison()

    def _compare(self) -> None:
        """Compare the last result, unless that is done already; raises what stands in the way."""
        assert self._switch is not None
        if self.last is None:
            raise InputError(text("panel.nothing_yet"))
        if self._switch.comparison is None:
            self._switch.look(self.last, self._ran_with)

    def _show_comparison(self) -> None:
        """What the switch does: the comparison in the timeline's place, or why there is none."""
        assert self._switch is not None
        picture = self._picture
        if not self._switch.on:
            self._switch.clear()
        else:
            try:
                self._compare()
                picture = self._switch.picture or picture
            except Exception as error:
                self._switch.refuse(explain_error(error))
        self._box.children = [picture.widget]

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


__all__ = ["LiveRun", "Panel", "Picture"]
