"""What the labs need beside the course's subject: predictions, checks, pictures, the report."""

from __future__ import annotations

from heterolab.lab import streams
from heterolab.lab.check import Verdict, check
from heterolab.lab.hooks import disk_logger
from heterolab.lab.panel_03 import streams_panel
from heterolab.lab.predict import predict, reveal
from heterolab.lab.recordings import recording, replay
from heterolab.lab.report import decide
from heterolab.lab.shown import Table, curve, show
from heterolab.lab.tables import beside, idle_causes, one_request

__all__ = [
    "Table",
    "Verdict",
    "beside",
    "check",
    "curve",
    "decide",
    "disk_logger",
    "idle_causes",
    "one_request",
    "predict",
    "recording",
    "replay",
    "reveal",
    "show",
    "streams",
    "streams_panel",
]
