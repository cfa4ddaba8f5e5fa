"""Lab 03's panel: the chunked job's three knobs, its timeline, and its speed-up beside the bound."""

from __future__ import annotations

from typing import Any

import ipywidgets

from heterolab.device.base import Device
from heterolab.errors import InputError
from heterolab.lab.messages import text
from heterolab.lab.recordings import recording
from heterolab.lab.streams import MIB, Job, in_chunks, job, queues, serial, speed_up_bound, timed
from heterolab.trace.trace import Trace
from heterolab.view.knobs import Choices
from heterolab.view.panel import Panel
from heterolab.view.still import svg
from heterolab.view.switch import simulated_like

CHUNKS, STREAMS, MEMORY = [1, 2, 4, 8, 16, 32, 64, 256], [1, 2, 3, 4, 8], ["pinned", "pageable"]


class StreamsPanel(ipywidgets.VBox):  # type: ignore[misc]
    """Turn chunks, streams and memory; see the timeline and the speed-up.

    Attributes
    ----------
    panel
        The :class:`heterolab.Panel` inside.
    speed_up
        Of the last run, over pinned memory, one piece, one stream, the same work.
    """

    def __init__(self, dev: Device, pinned: Job) -> None:
        self._dev = dev
        self._jobs = {"pinned": pinned, "pageable": job(dev, pinned.kernel, memory="pageable")}
        self._alone = timed(dev, serial, pinned)
        self.speed_up = 1.0
        self._told = ipywidgets.HTML()
        knobs: dict[str, Choices] = {"chunks": CHUNKS, "streams": STREAMS, "memory": MEMORY}
        self.panel = Panel(self._run, knobs=knobs, code=_code, bound=True, counterpart=self._counterpart)
        super().__init__([self._told, self.panel])

    def _run(self, chunks: int, streams: int, memory: str) -> Trace:
        trace = timed(self._dev, in_chunks, self._jobs[memory], chunks, queues(self._dev, streams))
        self.speed_up = self._alone.wall_ns / trace.wall_ns
        self.line = text("03.panel", speed_up=f"{self.speed_up:.2f}", bound=f"{speed_up_bound(chunks):.2f}")
        self._told.value = f'<b role="status">{self.line}</b>'
        return trace

    def _counterpart(self, shown: Trace, chunks: int, streams: int, memory: str) -> Trace:
        """What the panel's switch lays over a run: a simulated one of the same job, or a recording."""
        if self._dev.source == "simulated":
            recorded = recording(f"03-chunks-{chunks}")
            if recorded is None or memory != "pinned" or streams != (4 if chunks > 1 else 1):
                raise InputError(text("03.panel.not_recorded"))
            return recorded
        simulated = simulated_like(self._dev, values=False)
        real = self._jobs[memory]
        mine = job(simulated, real.kernel, memory=memory, mib=real.nbytes / MIB)
        return timed(simulated, in_chunks, mine, chunks, queues(simulated, streams))

    def set(self, **values: object) -> StreamsPanel:
        """Move knobs from code, as the mouse would."""
        self.panel.set(**values)
        return self

    def __repr__(self) -> str:
        return f"{self.panel!r} {self.line}"

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**options)
        still = {"image/svg+xml": svg(self.panel.last)} if self.panel.last else {}
        return {**bundle, "text/plain": repr(self), **still}


def _code(values: dict[str, object]) -> str:
    return f"in_chunks(dev, job, {values['chunks']}, {values['streams']})  # job in {values['memory']} memory"


def streams_panel(dev: Device, job: Job) -> StreamsPanel:
    """Lab 03's panel for `job`, whose host buffers are pinned."""
    return StreamsPanel(dev, job)
