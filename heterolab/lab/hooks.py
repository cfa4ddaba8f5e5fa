"""Hooks for the labs to try."""

from __future__ import annotations

import tempfile
from pathlib import Path

from heterolab.pipeline.costs import log_to_disk
from heterolab.pipeline.hooks import Hook, HookEvent


def disk_logger(path: Path | None = None) -> Hook:
    """A careless hook: after each batch it appends a line to a file (a temporary one by default)
    and waits until the disk has it, on the host thread."""
    file = path or Path(tempfile.mkdtemp(prefix="heterolab-")) / "requests.log"

    def log(event: HookEvent) -> None:
        if (event.stage, event.phase) == ("postprocess", "end"):
            event.host.call("log_to_disk", log_to_disk, file, 1, size=1, batch=event.batch)

    return log
