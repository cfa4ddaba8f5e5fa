"""The real host: its clock, its waiting, its workers."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

import pytest

from heterolab.device.base import Pool
from heterolab.device.host import MAX_WORKERS, RealHost, machine_memory, usable_cores
from heterolab.errors import InputError


@pytest.fixture
def host() -> RealHost:
    return RealHost()


class Polled:
    """A wait that cannot call the host, as a CUDA event: done some time from now."""

    def __init__(self, host: RealHost, after_ns: int) -> None:
        self.host_now, self.at, self.asked = host.now, host.now() + after_ns, 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.host_now() >= self.at

    def result(self) -> None:
        return None


# -- the clock -----------------------------------------------------------------------------


def test_the_clock_starts_at_zero_and_only_goes_on(host: RealHost) -> None:
    readings = [host.now() for _ in range(100)]
    assert 0 <= readings[0] < 1_000_000_000
    assert readings == sorted(readings)


def test_meta_tells_the_offset_to_the_time_of_day(host: RealHost) -> None:
    first, last = host.meta()["realtime_offset_ns"]
    assert abs(first + host.now() - time.time_ns()) < 50_000_000
    assert abs(last - first) < 50_000_000
    assert host.meta()["cores"] == usable_cores() >= 1


def test_machine_memory_is_believable() -> None:
    assert 2**28 < machine_memory() < 2**50


# -- waiting -------------------------------------------------------------------------------


def test_done_waits_come_in_the_order_given_and_cost_no_span(host: RealHost) -> None:
    first, second = Polled(host, 0), Polled(host, 0)
    assert host.wait_any([second, first]) == [second, first]
    assert host.recorder.spans == []


def test_what_cannot_call_is_asked_often_enough(host: RealHost) -> None:
    wait = Polled(host, 5_000_000)
    assert host.wait_any([wait]) == [wait]
    assert host.now() - wait.at < 50_000_000
    assert wait.asked > 5
    (span,) = host.recorder.spans
    assert (span.kind, span.lane) == ("wait", "host")
    assert span.end_ns - span.start_ns >= 4_000_000


def test_what_calls_is_not_polled(host: RealHost) -> None:
    pool = host.pool(1)
    job = pool.submit("sleep", time.sleep, 0.2)
    used = time.process_time()
    assert host.wait_any([job]) == [job]
    assert time.process_time() - used < 0.1, "the host slept while it waited"
    pool.close()


def test_a_wake_before_the_wait_is_not_lost(host: RealHost) -> None:
    host.wake()
    assert host.wait_any([]) == []
    before = host.now()
    assert host.wait_any([], until=before + 2_000_000) == []
    assert host.now() - before >= 2_000_000, "one wake ends one wait"


def test_a_wake_ends_a_wait_for_something_else(host: RealHost) -> None:
    never = Polled(host, 10**15)
    timer = threading.Timer(0.02, host.wake)
    timer.start()
    assert host.wait_any([never]) == []
    timer.join()


def test_ctrl_c_ends_a_wait_and_leaves_the_host_whole(host: RealHost) -> None:
    timer = threading.Timer(0.05, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        host.wait_any([])
    timer.join()
    pool = host.pool(1)
    job = pool.submit("add", sum, [1, 2])
    assert host.wait_any([job]) == [job]
    pool.close()


# -- a loop of its own ---------------------------------------------------------------------


def test_a_loop_runs_beside_and_join_waits_for_it(host: RealHost) -> None:
    go, count = threading.Event(), []

    def step() -> bool:
        count.append(threading.get_ident())
        go.wait(5)
        return len(count) < 3

    loop = host.spawn(step)
    assert not loop.join(timeout_s=0.02)
    assert not loop.done
    go.set()
    assert loop.join(timeout_s=5)
    assert loop.done
    assert len(count) == 3
    assert threading.get_ident() not in count


def test_join_raises_what_the_loop_raised_every_time(host: RealHost) -> None:
    def fail() -> bool:
        raise ValueError("no further")

    loop = host.spawn(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no further"):
            loop.join(timeout_s=5)


# -- workers -------------------------------------------------------------------------------


def test_threads_work_side_by_side(host: RealHost) -> None:
    pool = host.pool(2)
    meeting = threading.Barrier(2)
    jobs = [pool.submit("meet", meeting.wait, 5, batch=7) for _ in range(2)]
    while not all(job.done for job in jobs):
        host.wait_any([job for job in jobs if not job.done])
    pool.close()
    assert sorted(job.result() for job in jobs) == [0, 1]
    spans = [s for s in host.recorder.spans if s.kind == "cpu"]
    assert {s.lane for s in spans} == {"worker 0", "worker 1"}
    assert all(s.batch == 7 and s.queued_ns <= s.start_ns <= s.end_ns for s in spans)


def test_close_finishes_what_is_queued_and_then_refuses(host: RealHost) -> None:
    pool = host.pool(1)
    jobs = [pool.submit("add", sum, [n, 1]) for n in range(20)]
    pool.close()
    assert [job.result() for job in jobs] == list(range(1, 21))
    with pytest.raises(InputError, match="closed"):
        pool.submit("add", sum, [1])


def test_a_result_asked_for_too_early_says_what_to_do(host: RealHost) -> None:
    pool, go = host.pool(1), threading.Event()
    job = pool.submit("wait", go.wait, 5)
    with pytest.raises(InputError, match="wait_any"):
        job.result()
    go.set()
    pool.close()
    assert job.result() is True


@pytest.mark.parametrize("workers", [0, -1, 2.5, MAX_WORKERS + 1, 10**6])
def test_workers_that_cannot_be(host: RealHost, workers: object) -> None:
    with pytest.raises(InputError, match=f"{workers}"):
        host.pool(workers)


def test_a_kind_of_pool_that_there_is_not(host: RealHost) -> None:
    with pytest.raises(InputError, match="fork"):
        host.pool(1, kind="fork")


# -- processes (the pool is shared: starting one takes half a second) ----------------------


@pytest.fixture(scope="module")
def process_host() -> RealHost:
    return RealHost()


@pytest.fixture(scope="module")
def processes(process_host: RealHost) -> Iterator[Pool]:
    pool = process_host.pool(2, kind="process")
    yield pool
    pool.close()


def _wait(host: RealHost, job) -> None:
    while not job.done:
        host.wait_any([job], until=host.now() + 10_000_000_000)


def test_processes_are_others_and_their_times_are_ours(process_host: RealHost, processes: Pool) -> None:
    before = process_host.now()
    job = processes.submit("pid", os.getpid, batch=2)
    _wait(process_host, job)
    assert job.result() != os.getpid()
    span = process_host.recorder.spans[[s.name for s in process_host.recorder.spans].index("pid")]
    assert before <= span.queued_ns <= span.start_ns <= span.end_ns <= process_host.now()
    assert span.lane in ("worker 0", "worker 1")
    assert span.batch == 2


def test_an_error_in_a_process_arrives_with_where_it_was(process_host: RealHost, processes: Pool) -> None:
    job = processes.submit("int", int, "seven")
    _wait(process_host, job)
    with pytest.raises(ValueError, match="seven") as caught:
        job.result()
    assert "In a worker process" in "".join(caught.value.__notes__)


def test_a_result_that_cannot_be_pickled_is_an_error_not_a_hang(
    process_host: RealHost, processes: Pool
) -> None:
    job = processes.submit("lock", threading.Lock)
    _wait(process_host, job)
    with pytest.raises(TypeError, match="pickle"):
        job.result()


def test_what_a_process_cannot_import_is_refused_at_once(processes: Pool) -> None:
    with pytest.raises(InputError, match="module"):
        processes.submit("lambda", lambda: 1)


def test_a_worker_process_that_dies_fails_its_job(host: RealHost) -> None:
    pool = host.pool(1, kind="process")
    job = pool.submit("exit", os._exit, 3)
    _wait(host, job)
    with pytest.raises(BrokenExecutor):
        job.result()
    pool.close()
