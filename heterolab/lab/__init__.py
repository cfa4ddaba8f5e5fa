"""What the labs need beside the course's subject: predictions, checks, pictures, the report."""

from __future__ import annotations

from heterolab.lab import streams
from heterolab.lab.check import Verdict, check
from heterolab.lab.panel_03 import streams_panel
from heterolab.lab.predict import predict, reveal
from heterolab.lab.recordings import recording, replay
from heterolab.lab.report import decide
from heterolab.lab.shown import Table, curve, show

__all__ = [
    "Table",
    "Verdict",
    "check",
    "curve",
    "decide",
    "predict",
    "recording",
    "replay",
    "reveal",
    "show",
    "streams",
    "streams_panel",
]
