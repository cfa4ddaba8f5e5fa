"""The panel's switch "compare": the prediction over the measurement, in place of the timeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from heterolab.errors import InputError
from heterolab.view.catalogue import text
from heterolab.view.compared import Comparison, compare
from heterolab.view.picture import Picture
from heterolab.view.words import trace_of

if TYPE_CHECKING:
    from heterolab.device.base import Device
    from heterolab.trace.trace import Trace
    from heterolab.view.words import Shown

    #: ``counterpart(shown, **knobs)``: what to compare `shown` with.
    Counterpart = Callable[..., Shown]


class CompareSwitch:
    """A checkbox, and what is shown while it is on.

    Attributes
    ----------
    checkbox
        The switch.
    words
        The comparison's tables.
    picture
        The comparison's figure; None before the first.
    comparison
        The last comparison; None while there is none.
    """

    def __init__(self, counterpart: Counterpart) -> None:
        self._counterpart = counterpart
        layout = widgets.Layout(width="auto")
        self.checkbox = widgets.Checkbox(description=text("panel.compare"), indent=False, layout=layout)
        self.words = widgets.HTML()
        self.picture: Picture | None = None
        self.comparison: Comparison | None = None

    @property
    def on(self) -> bool:
        return bool(self.checkbox.value)

    def look(self, shown: Shown, knobs: Mapping[str, Any]) -> None:
        """Compare `shown`, which was made with `knobs`. What cannot be compared raises, and then
        there is no comparison."""
        self.clear()
        comparison = in_order(shown, self._counterpart(shown, **knobs))
        figure = comparison.figure()
        if self.picture is None:
            self.picture = Picture(figure)
        else:
            self.picture.show(figure)
        self.words.value = comparison._repr_html_()
        self.comparison = comparison

    def clear(self) -> None:
        """There is no comparison."""
        self.comparison, self.words.value = None, ""

    def refuse(self, why: str) -> None:
        """Say why there is none."""
        self.clear()
        self.words.value = f'<p role="alert">{escape(text("panel.no_comparison", why=why))}</p>'


def in_order(shown: Shown, other: Shown) -> Comparison:
    """Compare the two, whichever of them is the measured one."""
    predicted = trace_of(shown).source == "simulated" != trace_of(other).source
    return compare(other, shown) if predicted else compare(shown, other)


def simulated_like(device: Device, **options: Any) -> Device:
    """A simulated device from the built-in profile of the machine that `device` is.

    Raises
    ------
    InputError
        There is none: nobody has measured such a machine for us.
    """
    from heterolab.device import open_device
    from heterolab.device.profile import DeviceProfile

    for name in DeviceProfile.names():
        if DeviceProfile.load(name).name == device.name:
            return open_device(f"sim:{name}", **options)
    raise InputError(text("panel.no_profile", device=device.name))


def recorded_like(trace: Trace) -> Trace:
    """A recording of a run with the same settings as the one that `trace` shows.

    Raises
    ------
    InputError
        There is none.
    """
    from heterolab.lab.recordings import like  # the labs build on the view

    recorded = like(trace)
    if recorded is None:
        raise InputError(text("panel.no_recording"))
    return recorded
