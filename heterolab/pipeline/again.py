"""A measured run again, on another device, with the same requests in the same batches.

Under an open load the batcher takes who is there, and when it looks depends on the device. So
two devices make other batches of the same requests, and then do other work. To compare a
prediction with a measurement, let the prediction make the measured run's batches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TYPE_CHECKING

from heterolab.errors import InputError
from heterolab.pipeline.batch import Batch, Batcher
from heterolab.pipeline.loop import Loop
from heterolab.pipeline.preprocess import Prepared

if TYPE_CHECKING:
    from heterolab.device.base import Device
    from heterolab.pipeline.pipeline import Pipeline
    from heterolab.pipeline.run import Run
    from heterolab.workload import Load


class SameBatches(Batcher):
    """A batcher that makes the batches of an earlier run, in its order.

    Each goes when all of its requests are there, and not before the batcher that it stands for
    would have let it go: when it is full, or its oldest request has waited long enough.
    """

    def __init__(self, batches: list[set[int]], max_batch: int, max_delay_ns: int) -> None:
        super().__init__(max_batch, max_delay_ns)
        self.planned = deque(batches)
        self._known = set().union(*batches)

    def add(self, item: Prepared, now_ns: int) -> None:
        if item.request.id in self._known:  # else it was not served in that run either
            super().add(item, now_ns)

    def deadline_ns(self) -> int | None:
        members = self._members()
        return members[0][0] + self.max_delay_ns if members else None

    def ready(self, now_ns: int, no_more: bool = False) -> bool:
        members = self._members()
        if not members:
            return False
        return len(members) >= self.max_batch or now_ns >= members[0][0] + self.max_delay_ns or no_more

    def take(self, now_ns: int) -> Batch:
        members = self._members()
        waiting = self.queue
        self.queue = deque(members)
        batch = super().take(now_ns)  # all of them: there are no others
        self.planned.popleft()
        self.queue = deque(entry for entry in waiting if entry not in members)
        return batch

    def _members(self) -> list[tuple[int, Prepared]]:
        """The next batch's requests, oldest first; none while some of them are not there yet."""
        if not self.planned:
            return []
        here = [entry for entry in self.queue if entry[1].request.id in self.planned[0]]
        return here if len(here) == len(self.planned[0]) else []


def predict_like(run: Run, pipeline: Pipeline, load: Load, *, on: Device) -> Run:
    """Serve `load` as in `run`, in the same batches, on another device: as a rule a simulated one.

    Parameters
    ----------
    run
        The run to repeat.
    pipeline, load
        What it was made with.
    on
        Where to run it again, e.g. ``hl.open_device("sim:h200")``.

    Raises
    ------
    InputError
        `pipeline` or `load` is not the one that `run` was made with.

    >>> hl.compare(run, hl.predict_like(run, pipe, load, on=sim))  # doctest: +SKIP
    """
    if pipeline.settings != run.settings:
        raise InputError(
            f"predict_like: the run was made with Pipeline({run.settings.code()}), and this one is "
            f"Pipeline({pipeline.settings.code()}). Give the one that made the run."
        )
    if run.trace.meta.get("load", load.label) != load.label or max(run.timings, default=-1) >= len(load):
        raise InputError(
            f"predict_like: the run served {run.trace.meta.get('load', 'more requests')}, and this load is "
            f"{load.label} of {len(load)} requests. Give the load that the run served."
        )
    members: dict[int, set[int]] = defaultdict(set)
    for request, timing in run.timings.items():
        if timing.batch >= 0:
            members[timing.batch].add(request)
    loop = Loop(pipeline, load, on)
    delay_ns = round(pipeline.settings.max_delay_ms * 1e6)
    loop.batcher = SameBatches([members[n] for n in sorted(members)], pipeline.settings.batch, delay_ns)
    try:
        while loop.step():
            pass
        return loop.finish()
    finally:
        loop.close()
