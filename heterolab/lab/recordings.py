"""Recordings: traces from real GPUs, shown beside what runs here.

They lie in ``labs/recordings/NAME.json.gz`` and are made by ``python labs/record.py``.
"""

from __future__ import annotations

from pathlib import Path

import heterolab
from heterolab.lab.messages import text
from heterolab.lab.shown import show
from heterolab.trace.compare import settings_of
from heterolab.trace.trace import Trace


def folder() -> Path | None:
    """Where recordings lie: beside the notebook, above it, or beside the package."""
    here = Path.cwd()
    package = Path(heterolab.__file__).parents[1]
    for place in (here / "recordings", here.parent / "recordings", package / "labs" / "recordings"):
        if place.is_dir():
            return place
    return None


def recording(name: str) -> Trace | None:
    """The recorded trace of that name, stamped *replayed*; None where there is none.

    Raises
    ------
    TraceError
        There is one, and it is damaged.
    """
    place = folder()
    path = place / f"{name}.json.gz" if place else None
    return Trace.load(path) if path and path.exists() else None


def like(trace: Trace) -> Trace | None:
    """The first recording of a pipeline that ran with the settings (and, where both tell it, the
    load) of the run that `trace` shows; None where there is none."""
    wanted, place = settings_of(trace), folder()
    if wanted is None or place is None:
        return None
    for path in sorted(place.glob("*.json.gz")):
        recorded = Trace.load(path)
        loads = {one.meta["load"] for one in (recorded, trace) if "load" in one.meta}
        if settings_of(recorded) == wanted and len(loads) <= 1:
            return recorded
    return None


class NoRecording:
    """Says that there is nothing to replay."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return text("recording.none", name=self.name)


def replay(name: str, title: str = "", beside: Trace | None = None) -> object:
    """Show the recording `name`, on one scale with the trace `beside`; or say that there is none."""
    recorded = recording(name)
    if recorded is None:
        return NoRecording(name)
    return show(recorded if beside is None else [beside, recorded], title)
