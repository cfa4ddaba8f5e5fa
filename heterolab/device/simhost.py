"""A host with a virtual clock: the CPU's side of the simulator.

The code that runs is real, the time it takes is not: each call moves the clock on by what the
machine's profile says it costs. Things that happen by themselves (a copy ends, a worker's job
ends) lie on the *agenda*, in order of time; whenever the host looks at them or sleeps, the
agenda is played up to that moment. No threads and no real clock: same seed, same trace.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, Literal, Protocol

import numpy as np

from heterolab.device.base import Background, Event, Host, Pool, Wait
from heterolab.device.profile import DeviceProfile
from heterolab.errors import InputError, ProfileError, StalledError
from heterolab.trace.trace import CPU, NO_STREAM, NONE, WAIT, Recorder, Span

#: At one moment, what ends goes before what begins.
END, BEGIN = 0, 1
MAX_WORKERS = 256
#: Rounds in which the speeds of jobs that share the interpreter lock are settled.
LOCK_ROUNDS = 4
NEVER = "{} waits for something that can never happen: nothing is in flight."


class Ending(Protocol):
    """What the host can be held for: an op of a device."""

    done: bool


class SimRecorder(Recorder):
    """Spans of a run on a virtual clock. One thread writes them: there is no lock. It may write
    plain tuples to :attr:`rows`, which are made spans once somebody looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Any] = self._spans
        self._looked = 0

    def next_op(self) -> int:
        self._next = number = self._next + 1
        return number - 1

    @property
    def spans(self) -> list[Span]:
        spans, new = self._spans, tuple.__new__
        for i in range(self._looked, len(spans)):
            spans[i] = new(Span, spans[i])
        self._looked = len(spans)
        return spans

    def since(self, index: int) -> list[Span]:
        return self.spans[index:]


class Agenda:
    """What will happen: a heap of (time, priority, number, action, its arguments)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()
        self._playing = False
        #: The moment of the action that was played last.
        self.now = 0

    def at(self, time_ns: int, priority: int, action: Callable[..., None], *args: Any) -> None:
        """Have ``action(*args)`` called at `time_ns`."""
        heappush(self._heap, (time_ns, priority, next(self._numbers), action, args))

    def __bool__(self) -> bool:
        return bool(self._heap)

    def next_ns(self) -> int:
        """When the next action is due. Only if there is one."""
        return self._heap[0][0]

    def play_one(self) -> None:
        """Go to the next action and do it."""
        self.now, _, _, action, args = heappop(self._heap)
        self._playing, playing = True, self._playing
        try:
            action(*args)
        finally:
            self._playing = playing

    def play_until(self, time_ns: int) -> None:
        """Do all that is due by `time_ns`. (An action that looks at the clock starts no second play.)"""
        heap = self._heap
        if self._playing or not heap or heap[0][0] > time_ns:
            return
        self._playing = True
        try:
            while heap and heap[0][0] <= time_ns:
                self.now, _, _, action, args = heappop(heap)
                action(*args)
        finally:
            self._playing = False

    def play_till(self, op: Ending, host: SimHost) -> bool:
        """Go on until `op` has ended, and the host's clock with it; False if that never comes."""
        heap = self._heap
        self._playing, playing = True, self._playing
        try:
            while heap and not op.done:
                self.now, _, _, action, args = heappop(heap)
                action(*args)
                if self.now > host._now:
                    host._now = self.now
        finally:
            self._playing = playing
        return op.done


class SimHost(Host):
    """The virtual clock, the host thread, and its pools of workers.

    Parameters
    ----------
    profile
        Costs of the CPU's stages, of waiting and of workers.
    seed, jitter
        With ``jitter`` > 0, every cost is multiplied by a random factor around 1 with about
        that relative deviation, drawn from `seed`. 0 is off.
    """

    recorder: SimRecorder

    def __init__(self, profile: DeviceProfile, seed: int = 0, jitter: float = 0.0) -> None:
        if not isinstance(seed, int):
            raise InputError(f"seed={seed!r} is not a whole number.")
        if not isinstance(jitter, int | float) or not 0 <= jitter <= 1:
            raise InputError(f"jitter={jitter!r} is a relative deviation: give a number from 0 to 1.")
        self.recorder = SimRecorder()
        self.profile = profile
        self.agenda = Agenda()
        self.cpu = Processor(self.agenda, profile.host.cores)
        self.seed, self.jitter = seed, jitter
        self._random = random.Random(seed) if jitter else None
        self._now = 0
        self._devices = 0
        self._woken = False
        #: The share of a device call in which others wait for the interpreter lock.
        self.call_gil = (profile.seam or profile.host).call_gil
        #: Whether workers or a device may take turns with the host thread on its cores.
        self.shared = False
        #: CPU work and bytes staged by the host thread so far: what makes its caches cold.
        self.worked_ns = 0.0
        self.staged_bytes = 0.0
        #: Changes whenever these two do.
        self.stirred = 0

    def next_device_index(self) -> int:
        """The index of one more device on this host."""
        self._devices += 1
        return self._devices - 1

    # -- the clock ---------------------------------------------------------------------

    def now(self) -> int:
        return self._now

    def catch_up(self) -> None:
        """Let all that is due by now have happened."""
        self.agenda.play_until(self._now)

    def noisy(self, ns: float) -> float:
        """`ns` with the run's jitter."""
        return ns * self._random.lognormvariate(0.0, self.jitter) if self._random else ns

    def spend(self, ns: float, gil: float = 1.0, waits: float | None = None) -> None:
        """The host thread works for `ns` (longer if workers contend for the interpreter, see
        :class:`Processor`; `waits` is `gil` where it is not given)."""
        if self.jitter:
            ns = self.noisy(ns)
        if not self.shared or self._undisturbed(ns):
            self._now += round(ns)
            return
        self.catch_up()
        finished: list[int] = []
        waits = gil if waits is None else waits
        self.cpu.start(self._now, ns, gil, waits, lambda: finished.append(self.agenda.now))
        while not finished:
            self.agenda.play_one()
        self._now = finished[0]

    def _undisturbed(self, ns: float) -> bool:
        """Nothing else runs on the CPU in the next `ns`, as far as one can know."""
        soon = self.agenda and self.agenda.next_ns() < self._now + ns
        return not (self.cpu.jobs or soon)

    def work(self, ns: float, gil: float = 1.0, waits: float | None = None) -> None:
        """The host thread computes something of its own for `ns`."""
        self.worked_ns += ns
        self.stirred += 1
        self.spend(ns, gil, waits)

    def staged(self, nbytes: int) -> None:
        """The host thread has copied bytes of pageable memory."""
        self.staged_bytes += nbytes
        self.stirred += 1

    def enter(self, between_ns: float, ns: float, held: bool = False) -> tuple[int, int]:
        """The host calls the device: a pause before, then `ns` inside. Gives (entry, exit).

        `held` says that the call blocks: its length is the device's doing, not the host's.
        """
        if not (self.shared or self.jitter):  # as a rule: nothing can come between
            entry = self._now + round(between_ns)
            self._now = exit_ns = entry + round(ns)
            return entry, exit_ns
        if between_ns:
            self.spend(between_ns, self.call_gil, 1.0)
        entry = self._now
        if held:  # in the driver, which has let go of the interpreter lock
            self.spend(ns, 0.0)
        else:
            self.spend(ns, self.call_gil, 1.0)
        return entry, self._now

    def sleep_until(self, happened: Callable[[], bool], why: str) -> None:
        """Hold the host thread until `happened()`; the clock stands where it came true."""
        while not happened():
            if not self.agenda:
                raise StalledError(NEVER.format(why))
            self.agenda.play_one()
            self._now = max(self._now, self.agenda.now)

    def sleep_until_done(self, ops: Sequence[Ending], why: str) -> None:
        """Hold the host thread until all `ops` have ended."""
        for op in ops:
            if not (op.done or self.agenda.play_till(op, self)):
                raise StalledError(NEVER.format(why))

    # -- work --------------------------------------------------------------------------

    def call(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Any:
        cost = self.profile.cpu_cost(name)
        op, start = self.recorder.next_op(), self._now
        self.catch_up()
        try:
            return fn(*args)
        finally:
            self.work(cost.time.at(size), cost.gil.at(size), cost.waits.at(size))
            self.recorder.add(Span(op, CPU, name, "host", NO_STREAM, NONE, start, start, self._now, 0, batch))

    def pool(self, workers: int, kind: Literal["thread", "process"] = "thread") -> Pool:
        if not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise InputError(f"workers={workers!r}: a pool has 1 to {MAX_WORKERS} workers.")
        if kind not in ("thread", "process"):
            raise InputError(f'kind={kind!r} is not a kind of pool. Use "thread" or "process".')
        return SimPool(self, workers, kind)

    def spawn(self, step: Callable[[], bool]) -> Background:
        return Finished(step)

    # -- waiting -----------------------------------------------------------------------

    def wait_any(self, waits: Sequence[Wait], until: int | None = None) -> list[Wait]:
        costs = self.profile.waiting
        self.work(costs.loop_step_ns)
        self.catch_up()
        entered = self._now
        while not (done := [wait for wait in waits if wait.done]) and not self._woken:
            if until is not None and until <= self._now:
                break
            if self.agenda and (until is None or self.agenda.next_ns() <= until):
                self.agenda.play_one()
                self._now = max(self._now, self.agenda.now)
            elif until is not None:
                self._now = until
            else:
                raise StalledError(
                    f"The host waits for {len(waits)} things and no time limit, and nothing is in flight "
                    "that could end its wait. Submit or enqueue the work first, or give until=."
                )
        self._woken = False
        if self._now > entered:
            late = costs.timer_ns
            if done:
                late = costs.event_ns if isinstance(done[0], Event) else costs.job_ns
            self._now += round(self.noisy(late))
            self.catch_up()
            done = [wait for wait in waits if wait.done]
            op = self.recorder.next_op()
            self.recorder.add(Span(op, WAIT, "wait", "host", NO_STREAM, NONE, entered, entered, self._now))
        return done

    def wake(self) -> None:
        self._woken = True


@dataclass(eq=False)
class Running:
    """A job on the CPU: what is left of it, and how fast it goes."""

    left_ns: float
    gil: float
    waits: float
    finish: Callable[[], None]
    speed: float = 1.0
    version: int = 0


class Processor:
    """The host's cores and Python's interpreter lock, shared by all that runs.

    A job holds the lock for a share `gil` of its time, and for a share `waits` it makes no
    progress while another job holds it. The two differ. Tokenising holds the lock at first and
    at the end, and lets go of it in between. Copying a picture row by row hardly ever holds it,
    but comes back for it at every row and waits each time. Plain Python never lets go, so others
    wait for it and it for nobody (a thread that wants the lock asks for it after 5 ms). So a job
    goes at 1 - waits × (the share of time in which others hold the lock), and at its fair share
    1 / n of n jobs at least. More jobs than cores share the cores.
    """

    def __init__(self, agenda: Agenda, cores: float) -> None:
        self.agenda, self.cores = agenda, max(cores, 1.0)
        self.jobs: list[Running] = []
        self._settled_ns = 0

    def start(self, now: int, ns: float, gil: float, waits: float, finish: Callable[[], None]) -> None:
        """Run a job that takes `ns` alone; `finish` is called at its end."""
        self._settle(now)
        self.jobs.append(Running(ns, gil, waits, finish))
        self._share(now)

    def _settle(self, now: int) -> None:
        """Take off what each job has done since the last change."""
        for job in self.jobs:
            job.left_ns -= (now - self._settled_ns) * job.speed
        self._settled_ns = now

    def _share(self, now: int) -> None:
        """Give each job its new speed and its new end."""
        jobs = self.jobs
        cores = min(1.0, self.cores / max(len(jobs), 1))
        for job, speed in zip(jobs, shared_speeds([(job.gil, job.waits) for job in jobs]), strict=True):
            job.speed = cores * speed
            job.version += 1
            end = now + max(0, round(job.left_ns / job.speed))
            self.agenda.at(end, END, self._end, job, job.version)

    def _end(self, job: Running, version: int) -> None:
        if job.version != version:
            return  # its speed has changed since: another end is on the agenda
        self._settle(self.agenda.now)
        self.jobs.remove(job)
        job.version += 1
        self._share(self.agenda.now)
        job.finish()


def shared_speeds(jobs: Sequence[tuple[float, float]]) -> list[float]:
    """Speeds, 0 to 1, of jobs that share one interpreter lock, given as (gil, waits) each.

    A job that others slow down also holds the lock less, so the speeds depend on each other; a
    few rounds settle them.
    """
    if len(jobs) < 2:
        return [1.0] * len(jobs)
    speeds = [1.0] * len(jobs)
    least = 1 / len(jobs)
    for _ in range(LOCK_ROUNDS):
        held = [gil * speed for (gil, _), speed in zip(jobs, speeds, strict=True)]
        total = sum(held)
        speeds = [
            max(least, 1 - waits * min(total - mine, 1.0))
            for (_, waits), mine in zip(jobs, held, strict=True)
        ]
    return speeds


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


class Finished(Background):
    """A loop that has run to its end already: a virtual clock has nothing beside it."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._error: BaseException | None = None
        try:
            while step():
                pass
        except Exception as error:  # raised where a real loop's error would be: at join()
            self._error = error

    @property
    def done(self) -> bool:
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        if self._error is not None:
            raise self._error
        return True


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
