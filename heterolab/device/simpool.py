"""Virtual CPU workers: a job's value is real, its time comes from the machine's profile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from heterolab.device.agenda import BEGIN
from heterolab.device.base import Pool
from heterolab.errors import InputError, ProfileError
from heterolab.trace.trace import CPU, NO_STREAM, NONE, Span

if TYPE_CHECKING:
    from heterolab.device.simhost import SimHost


@dataclass(eq=False)
class Job:
    """The result to come of a CPU job in a pool."""

    op: int
    name: str
    call: Callable[[], Any]
    cost_ns: float
    gil: float
    waits: float
    queued_ns: int
    batch: int
    done_flag: bool = False
    value: Any = None
    error: BaseException | None = None
    host: SimHost | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        if self.host is not None:
            self.host.catch_up()
        return self.done_flag

    def result(self) -> Any:
        if not self.done:
            raise InputError(f"{self!r} is not done yet. Wait for it first: host.wait_any([it]).")
        if self.error is not None:
            raise self.error
        return self.value

    def __repr__(self) -> str:
        return f"<CPU job {self.name!r}, {'done' if self.done_flag else 'not done'}>"


class SimPool(Pool):
    """Virtual workers. A job's value is computed when it starts, its time comes from the profile."""

    def __init__(self, host: SimHost, workers: int, kind: Literal["thread", "process"]) -> None:
        self.host, self.workers, self.kind = host, workers, kind
        self._idle = list(range(workers))
        self._queue: deque[Job] = deque()
        self._closed = False
        self._costs = host.profile.workers
        host.shared = True
        if kind == "process" and None in (self._costs.process_job_ns, self._costs.pickle_ns_per_byte):
            raise ProfileError(
                f"the profile of {host.profile.name} has no cost of pickling, which a pool of processes "
                "needs (workers.process_job_ns, workers.pickle_ns_per_byte). Measure it on that machine "
                'with `heterolab calibrate`, or use kind="thread".'
            )

    def submit(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Job:
        if self._closed:
            raise InputError(f"job {name!r}: this pool is closed. Make another with host.pool(...).")
        cost, host = self.host.profile.cpu_cost(name), self.host
        job = Job(
            host.recorder.next_op(),
            name,
            lambda: fn(*args),
            cost.time.at(size),
            cost.gil.at(size),
            cost.waits.at(size),
            host.now(),
            batch,
            host=host,
        )
        if self.kind == "process":
            job.cost_ns, job.gil, job.waits = job.cost_ns + self._pickling_ns(args), 0.0, 0.0
        host.work(self._costs.submit_ns)
        self._queue.append(job)
        host.agenda.at(host.now() + round(self._costs.start_ns), BEGIN, self._start)
        host.catch_up()
        return job

    def _pickling_ns(self, args: tuple[Any, ...]) -> float:
        assert self._costs.process_job_ns is not None
        assert self._costs.pickle_ns_per_byte is not None
        return self._costs.process_job_ns + self._costs.pickle_ns_per_byte * _size_of(args)

    def _start(self) -> None:
        """An idle worker takes the job that waits longest."""
        if not self._queue or not self._idle:
            return
        job, worker = self._queue.popleft(), self._idle.pop(0)
        start = self.host.agenda.now
        try:
            job.value = job.call()
        except BaseException as error:
            job.error = error
        cost = self.host.noisy(job.cost_ns)
        self.host.cpu.start(start, cost, job.gil, job.waits, lambda: self._end(job, worker, start))

    def _end(self, job: Job, worker: int, start: int) -> None:
        end = self.host.agenda.now
        self.host.recorder.add(
            Span(
                job.op,
                CPU,
                job.name,
                f"worker {worker}",
                NO_STREAM,
                NONE,
                job.queued_ns,
                start,
                end,
                0,
                job.batch,
            )
        )
        job.done_flag = True
        self._idle.append(worker)
        self._idle.sort()
        self._start()

    def close(self) -> None:
        self._closed = True
        busy = self.workers
        self.host.sleep_until(lambda: not self._queue and len(self._idle) == busy, "close()")


def _size_of(value: Any) -> int:
    """About how many bytes pickling `value` makes."""
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, bytes | bytearray | str):
        return len(value)
    if isinstance(value, dict):
        return sum(_size_of(k) + _size_of(v) for k, v in value.items())
    if isinstance(value, list | tuple | set):
        return 8 + sum(map(_size_of, value))
    fields = getattr(value, "__dict__", None)
    return 8 + (_size_of(fields) if fields else 0)
