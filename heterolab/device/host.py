"""The real host: this machine's clock, its CPU, and workers that are threads or processes.

One host thread runs the pipeline's loop. Everything else that goes on (a worker's job, a
stream, an HTTP arrival) ends by telling that thread, through one condition variable; what
cannot tell it (a CUDA event) is asked again and again, at least every 50 µs.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from heterolab.device.base import Background, Host, Pool, Wait
from heterolab.errors import InputError
from heterolab.trace.trace import CPU, NO_STREAM, NONE, WAIT, Recorder, Span

#: How often waits that cannot tell the host of their end are asked for it.
POLL_S = 50e-6
#: The longest single sleep: Windows delivers Ctrl-C only between sleeps.
LONGEST_SLEEP_S = 0.25
MAX_WORKERS = 256


def usable_cores() -> int:
    """The CPU cores this process may run on (a container may allow fewer than there are)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_time_ns() -> int:
    """CPU time that this process has used: a clock that stands still while it waits for a core."""
    return time.process_time_ns()


def machine_memory() -> int:
    """Bytes of memory this process may use: the machine's, or its container's limit."""
    total = 4 * 2**30
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


class Completion:
    """Something that ends once, on another thread, and tells the host when it does.

    Futures of CPU jobs and the events of a CPU device are Completions: `wait_any` sleeps
    until one of them calls.
    """

    def __init__(self, host: RealHost) -> None:
        self.host = host
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self._done

    def result(self) -> Any:
        if not self.done:
            raise InputError(f"{self!r} is not done yet. Wait for it first: host.wait_any([it]).")
        if self._error is not None:
            raise self._error
        return self._value

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """It has ended with this value or error; wakes the host. Called once."""
        self._value, self._error = value, error
        self._done = True
        self.host.notify()


class Job(Completion):
    """The result to come of a CPU job in a pool."""

    def __init__(self, host: RealHost, name: str, batch: int) -> None:
        super().__init__(host)
        self.op = host.recorder.next_op()
        self.name, self.batch = name, batch
        self.queued_ns = host.now()

    def ran(self, lane: str, start_ns: int, end_ns: int) -> None:
        """Record where and when the work was done."""
        span = Span(
            self.op, CPU, self.name, lane, NO_STREAM, NONE, self.queued_ns, start_ns, end_ns, 0, self.batch
        )
        self.host.recorder.add(span)

    def __repr__(self) -> str:
        return f"<CPU job {self.name!r}, {'done' if self._done else 'not done'}>"


class RealHost(Host):
    """This machine: a monotonic clock, the calling thread, and pools of workers."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self._zero_ns = time.perf_counter_ns()
        self._condition = threading.Condition()
        self._woken = False
        self._devices = itertools.count()
        self._first_offset_ns = self._offset_ns()

    def now(self) -> int:
        return time.perf_counter_ns() - self._zero_ns

    def since_zero(self, perf_counter_ns: int) -> int:
        """A reading of ``time.perf_counter_ns``, from any process of this machine, as host time."""
        return perf_counter_ns - self._zero_ns

    def next_device_index(self) -> int:
        """The index of one more device on this host."""
        return next(self._devices)

    def meta(self) -> dict[str, Any]:
        """Versions, cores, and what to add to a host time to get CLOCK_REALTIME, then and now.

        The monotonic clock cannot jump, the time of day can be set: the offset at both ends
        of a trace shows whether it was.
        """
        return {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cores": usable_cores(),
            "realtime_offset_ns": [self._first_offset_ns, self._offset_ns()],
        }

    def _offset_ns(self) -> int:
        before = self.now()
        realtime = time.time_ns()
        return realtime - (before + self.now()) // 2

    # -- work --------------------------------------------------------------------------

    def call(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Any:
        op = self.recorder.next_op()
        start = self.now()
        try:
            return fn(*args)
        finally:
            end = self.now()
            self.recorder.add(Span(op, CPU, name, "host", NO_STREAM, NONE, start, start, end, 0, batch))

    def pool(self, workers: int, kind: Literal["thread", "process"] = "thread") -> Pool:
        if not isinstance(workers, int) or not 1 <= workers <= MAX_WORKERS:
            raise InputError(f"workers={workers!r}: a pool has 1 to {MAX_WORKERS} workers.")
        if kind == "thread":
            return ThreadPool(self, workers)
        if kind == "process":
            return ProcessPool(self, workers)
        raise InputError(f'kind={kind!r} is not a kind of pool. Use "thread" or "process".')

    def spawn(self, step: Callable[[], bool]) -> Background:
        return Loop(step)

    # -- waiting -----------------------------------------------------------------------

    def wait_any(self, waits: Sequence[Wait], until: int | None = None) -> list[Wait]:
        entered, slept = self.now(), False
        longest_s = POLL_S if any(map(self.must_poll, waits)) else LONGEST_SLEEP_S
        try:
            with self._condition:
                while not (done := [wait for wait in waits if wait.done]) and not self._woken:
                    left_s = longest_s if until is None else (until - self.now()) * 1e-9
                    if left_s <= 0:
                        break
                    slept = True
                    self._condition.wait(min(left_s, longest_s))
                self._woken = False
                return done
        finally:
            if slept:
                op = self.recorder.next_op()
                end = self.now()
                self.recorder.add(Span(op, WAIT, "wait", "host", NO_STREAM, NONE, entered, entered, end))

    def must_poll(self, wait: Wait) -> bool:
        """Whether `wait` has to be asked, because it will not call :meth:`notify` by itself."""
        return not (isinstance(wait, Completion) and wait.host is self)

    def notify(self) -> None:
        """Let a sleeping `wait_any` look again. May be called from any thread."""
        with self._condition:
            self._condition.notify_all()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify_all()


class Loop(Background):
    """A step function called until it says False, in a thread of its own."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="heterolab-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # kept for join(): a thread's own error is seen by nobody
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> bool:
        # In slices, so that Ctrl-C ends the wait (not the loop) on every system.
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._thread.is_alive():
            left_s = LONGEST_SLEEP_S if end is None else end - time.monotonic()
            if left_s <= 0:
                return False
            self._thread.join(min(left_s, LONGEST_SLEEP_S))
        if self._error is not None:
            raise self._error
        return True


class _ExecutorPool(Pool):
    """What both kinds of pool share: an executor, and its end."""

    _executor: Executor

    def __init__(self, host: RealHost, workers: int) -> None:
        self.host, self.workers = host, workers
        self._closed = False

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise InputError(f"job {name!r}: this pool is closed. Make another with host.pool(...).")

    def close(self) -> None:
        self._closed = True
        self._executor.shutdown(wait=True)


class ThreadPool(_ExecutorPool):
    """Workers that are threads: no pickling, but Python code shares one interpreter lock."""

    def __init__(self, host: RealHost, workers: int) -> None:
        super().__init__(host, workers)
        self._numbers = itertools.count()
        self._mine = threading.local()
        self._executor = ThreadPoolExecutor(workers, "heterolab-worker", initializer=self._take_number)

    def _take_number(self) -> None:
        self._mine.lane = f"worker {next(self._numbers)}"

    def submit(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Job:
        self._check_open(name)
        job = Job(self.host, name, batch)
        self._executor.submit(self._work, job, fn, args)
        return job

    def _work(self, job: Job, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        value, error = None, None
        start = self.host.now()
        try:
            value = fn(*args)
        except BaseException as raised:
            error = raised
        job.ran(self._mine.lane, start, self.host.now())
        job.finish(value, error)


class ProcessPool(_ExecutorPool):
    """Workers that are processes: an interpreter each, but arguments and results are pickled.

    They are spawned, never forked: a fork copies locks that other threads hold at that moment,
    and a CUDA context does not survive it. All of them are up when the constructor returns, so
    that their start (imports included) is not taken for the first job's time.
    """

    def __init__(self, host: RealHost, workers: int) -> None:
        super().__init__(host, workers)
        context = multiprocessing.get_context("spawn")
        self._lanes: dict[int, str] = {}
        self._executor = ProcessPoolExecutor(
            workers, context, initializer=_meet, initargs=(context.Barrier(workers),)
        )
        try:
            # A process is started per job as long as none is idle, and none is before all have met.
            for started in [self._executor.submit(os.getpid) for _ in range(workers)]:
                started.result()
        except BrokenExecutor as error:
            self._executor.shutdown()
            raise InputError(
                "Worker processes cannot start here. In a script, put what uses them under "
                "`if __name__ == '__main__':`, because each of them imports the script once."
            ) from error

    def submit(self, name: str, fn: Callable[..., Any], *args: Any, size: int = 1, batch: int = NONE) -> Job:
        self._check_open(name)
        _check_importable(name, fn)
        job = Job(self.host, name, batch)
        future = self._executor.submit(_timed, fn, args)
        future.add_done_callback(lambda ended: self._ended(job, ended))
        return job

    def _ended(self, job: Job, future: Future[tuple[int, int, int, Any, BaseException | None]]) -> None:
        try:
            pid, start, end, value, error = future.result()
        except BaseException as lost:  # the process died, or its result could not be pickled
            job.finish(error=lost)
            return
        lane = self._lanes.setdefault(pid, f"worker {len(self._lanes)}")
        job.ran(lane, self.host.since_zero(start), self.host.since_zero(end))
        job.finish(value, error)


def _meet(barrier: Any) -> None:
    """In a new worker process: go on once all of them are up."""
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait(timeout=60)


def _timed(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, int, int, Any, BaseException | None]:
    """In a worker process: (pid, start, end, value, error). The clock is the machine's own, so
    its readings mean the same in every process."""
    value, error = None, None
    start = time.perf_counter_ns()
    try:
        value = fn(*args)
    except Exception as raised:
        raised.add_note(f"In a worker process:\n{traceback.format_exc()}")
        error = raised
    return os.getpid(), start, time.perf_counter_ns(), value, error


def _check_importable(name: str, fn: Callable[..., Any]) -> None:
    """A worker process gets a function by its name, so it must be able to import it."""
    main = sys.modules.get("__main__")
    typed_in = getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__")
    try:
        pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError):
        typed_in = True
    if typed_in:
        raise InputError(
            f"job {name!r}: a worker process cannot import {fn!r}. Put the function into a module "
            '(a .py file) at its top level, or use a pool of kind="thread".'
        )
