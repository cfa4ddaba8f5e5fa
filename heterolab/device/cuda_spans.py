"""Which source of device spans a CUDA device takes: exact ones where they can be had."""

from __future__ import annotations

from typing import Any, Literal

from heterolab.device import cupti_session
from heterolab.device.cuda_events import EventSpans
from heterolab.device.cupti import CuptiSpans
from heterolab.device.cupti_records import CuptiUnavailable
from heterolab.device.host import RealHost
from heterolab.errors import DeviceUnavailable, InputError

#: ``"auto"``: CUPTI where it works, else CUDA events; the device's repr says which, and why.
Source = Literal["auto", "cupti", "events", "off"]


def source(asked: Source | bool) -> Source:
    """The source asked for; True and False stand for ``"auto"`` and ``"off"``."""
    if isinstance(asked, bool):
        return "auto" if asked else "off"
    if asked not in ("auto", "cupti", "events", "off"):
        raise InputError(
            f"spans={asked!r} is not a source of device spans. Choose from: auto (exact ones where CUPTI "
            "works, else events), cupti, events, off."
        )
    return asked


def open_spans(
    asked: Source, cupy: Any, host: RealHost, device_index: int
) -> tuple[EventSpans | CuptiSpans, str]:
    """The source, and in words what it is; call it with the device as CUDA's current one.

    Raises
    ------
    DeviceUnavailable
        CUPTI was asked for by name and cannot be had; says why, and what to do.
    """
    if asked == "off":
        return EventSpans(cupy, host, device_index, timed=False), "no device spans"
    because = ""
    if asked != "events":
        try:
            session = cupti_session.session(cupy.cuda.runtime.driverGetVersion())
            exact = CuptiSpans(cupy, host, device_index, session)
            return exact, f"spans from {exact.words}"
        except CuptiUnavailable as error:
            if asked == "cupti":
                raise DeviceUnavailable(
                    f"spans='cupti': exact spans cannot be had here. {error} With spans='auto' or 'events' "
                    "the device opens, and CUDA events time it to about 1 µs an op."
                ) from error
            because = f", since exact ones cannot be had: {str(error).rstrip('.')}"
    events = EventSpans(cupy, host, device_index, timed=True)
    return events, f"spans from {events.words}{because}"
