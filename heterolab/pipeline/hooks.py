"""Hooks: functions the pipeline calls as a stage begins and ends.

They fire at *host* moments: a device stage "begins" when its work is issued, and "ends" when
the host knows that it is done. What the device really did when is in the trace's spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from heterolab.device.base import Host

Phase = Literal["begin", "end"]
STAGES = ("preprocess", "batch", "transfer", "kernels", "postprocess")


@dataclass(frozen=True)
class HookEvent:
    """What a hook is told.

    Attributes
    ----------
    stage, phase
        One of the five stages; ``"begin"`` or ``"end"``.
    now_ns
        The host's clock, counted from the start of the run.
    batch
        Batch number; -1 for preprocess, which runs in chunks before there are batches.
    size
        Requests in the chunk or batch.
    host
        For hooks that do work of their own: ``event.host.call("log_to_disk", write, size=1)``
        runs it on the host thread, on the timeline, and a simulated clock charges it.
    """

    stage: str
    phase: Phase
    now_ns: int
    batch: int
    size: int
    host: Host


Hook = Callable[[HookEvent], None]


class Hooks:
    """Calls the hooks of a run. One that fails is kept in `errors`, called no more, and the
    run goes on."""

    def __init__(self, hooks: tuple[Hook, ...], host: Host, origin_ns: int) -> None:
        self._hooks = list(hooks)
        self._host = host
        self._origin_ns = origin_ns
        self.errors: list[str] = []

    def fire(self, stage: str, phase: Phase, size: int, batch: int = -1) -> None:
        if not self._hooks:
            return
        event = HookEvent(stage, phase, self._host.now() - self._origin_ns, batch, size, self._host)
        for hook in tuple(self._hooks):
            try:
                hook(event)
            except Exception as error:
                self._hooks.remove(hook)
                name = getattr(hook, "__name__", type(hook).__name__)
                self.errors.append(
                    f"hook {name} failed at {stage} {phase} with {type(error).__name__} ({error}). "
                    "It was switched off; the run went on."
                )
