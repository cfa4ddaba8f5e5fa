"""Hooks for the labs to try."""

from __future__ import annotations

import tempfile
from pathlib import Path

from heterolab.pipeline.costs import log_to_disk
from heterolab.pipeline.hooks import Hook, HookEvent


def disk_logger(path: Path | None = None, lines: int = 1) -> Hook:
    """A careless hook: as a batch's answers are made, it appends a line (or more) for each of its
    requests to a file (a temporary one by default), and after every line waits until the disk has
    it, on the host thread."""
    file = path or Path(tempfile.mkdtemp(prefix="heterolab-")) / "requests.log"

    def log(event: HookEvent) -> None:
        if (event.stage, event.phase) == ("postprocess", "begin"):
            for _ in range(event.size * lines):
                event.host.call("log_to_disk", log_to_disk, file, 1, size=1, batch=event.batch)

    return log
