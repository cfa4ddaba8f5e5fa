"""What a run leaves: outputs, times of every request, and the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from heterolab.pipeline.postprocess import Answer
from heterolab.pipeline.preprocess import Rejected
from heterolab.trace.trace import Trace
from heterolab.workload import Load, Request

if TYPE_CHECKING:
    from heterolab.device.profile import DeviceProfile
    from heterolab.models.encoder import Encoder
    from heterolab.pipeline.pipeline import Settings


@dataclass(frozen=True)
class Failed:
    """A request whose batch failed on the device, and with what."""

    id: int
    reason: str


@dataclass
class Timing:
    """When what happened to a request, in ns since the start of the run.

    Latency is `done_ns` − `arrival_ns`; the arrival is the *intended* one, whether or not the
    host had time to look. Up to `batched_ns` the request waits, after it it is computed.
    """

    arrival_ns: int
    prepared_ns: int = -1
    batched_ns: int = -1
    done_ns: int = -1
    batch: int = -1


@dataclass(frozen=True)
class Origin:
    """What a run was made from beside its settings: enough to make it again.

    Attributes
    ----------
    model, keys, load
        As given to the pipeline and to its run.
    profile
        The costs of the machine, where it was simulated; else None.
    """

    model: Encoder
    keys: tuple[str, ...]
    load: Load
    profile: DeviceProfile | None


@dataclass(frozen=True)
class Run:
    """The result of :meth:`Pipeline.run`.

    Attributes
    ----------
    settings
        The knobs it ran with.
    outputs
        By request id: an Answer, a Rejected or a Failed.
    timings
        By request id, for every request that has an output.
    trace
        What happened when.
    unserved
        Requests that had arrived when the run was stopped and got no output.
    hook_errors
        One line for each hook that failed.
    origin
        What it was made from; None where it was put together by hand.
    """

    settings: Settings
    outputs: dict[int, Answer | Rejected | Failed]
    timings: dict[int, Timing]
    trace: Trace
    unserved: tuple[Request, ...] = ()
    hook_errors: tuple[str, ...] = ()
    origin: Origin | None = field(default=None, repr=False, compare=False)

    @property
    def answers(self) -> list[Answer]:
        """The answers, by request id."""
        return [o for _, o in sorted(self.outputs.items()) if isinstance(o, Answer)]

    @property
    def rejected(self) -> list[Rejected]:
        return [o for _, o in sorted(self.outputs.items()) if isinstance(o, Rejected)]

    @property
    def failed(self) -> list[Failed]:
        return [o for _, o in sorted(self.outputs.items()) if isinstance(o, Failed)]

    @property
    def latencies_ns(self) -> NDArray[np.int64]:
        """From intended arrival to answer, in the order of `answers`; shape (answers,)."""
        return self._spans("arrival_ns", "done_ns")

    @property
    def waiting_ns(self) -> NDArray[np.int64]:
        """The part of each latency before the request's batch was formed."""
        return self._spans("arrival_ns", "batched_ns")

    def _spans(self, first: str, last: str) -> NDArray[np.int64]:
        timings = [self.timings[answer.id] for answer in self.answers]
        return np.array([getattr(t, last) - getattr(t, first) for t in timings], dtype=np.int64)

    @property
    def batch_sizes(self) -> NDArray[np.int64]:
        """Requests in each batch, by batch number; failed ones included."""
        batches = [t.batch for t in self.timings.values() if t.batch >= 0]
        return np.bincount(batches) if batches else np.zeros(0, np.int64)

    @property
    def wall_ns(self) -> int:
        """From the start of the run to the last output."""
        return max((t.done_ns for t in self.timings.values()), default=0)

    @property
    def stamp(self) -> str:
        """Measured, replayed or simulated, and on what."""
        return self.trace.stamp

    def __repr__(self) -> str:
        parts = [f"{len(self.answers)} answers"]
        for name in ("rejected", "failed", "unserved", "hook_errors"):
            if count := len(getattr(self, name)):
                parts.append(f"{count} {name.replace('_', ' ')}")
        return f"<Run: {', '.join(parts)} in {self.wall_ns / 1e6:.2f} ms; {self.stamp}>"
