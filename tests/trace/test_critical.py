"""The critical path: on paper, where it is known, and on any trace it covers the run."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from on_paper import any_trace, span, trace_of

import heterolab as hl
from heterolab.trace import explain
from heterolab.trace.critical import Step, critical_path, totals
from heterolab.trace.queue import Queue
from heterolab.trace.trace import Trace

#: One batch: a worker prepares, the host copies, launches and sleeps, and answers in the end.
ONE_BATCH = (
    span("cpu", 2, 20, "preprocess", op=0, queued=1, lane="worker 0"),
    span("cpu", 0, 1, "admit", op=1),
    span("wait", 1, 22, op=2),
    span("cpu", 22, 24, "enqueue", op=3),
    span("cpu", 24, 30, "pad", op=4, batch=0),
    span("api", 30, 33, "copy", op=5, batch=0),
    span("h2d", 34, 50, op=5, queued=30, batch=0),
    span("api", 33, 36, "launch", op=6, batch=0),
    span("kernel", 52, 70, "forward", op=6, queued=33, batch=0, after=5),
    span("d2h", 71, 75, op=7, queued=36, batch=0, after=6),
    span("wait", 40, 78, op=8),
    span("cpu", 78, 90, "respond", op=9, batch=0),
)


def told(path: tuple[Step, ...]) -> list[tuple[int, int, str, str]]:
    return [(step.start_ns, step.end_ns, step.lane, step.name or step.cause) for step in path]


def test_one_batch_from_its_arrival_to_its_answer() -> None:
    assert told(critical_path(trace_of(*ONE_BATCH))) == [
        (0, 1, "host", "admit"),
        (1, 2, "worker 0", "hand_over"),
        (2, 20, "worker 0", "preprocess"),
        (20, 22, "host", "wake"),
        (22, 24, "host", "enqueue"),
        (24, 30, "host", "pad"),
        (30, 33, "host", "copy"),
        (33, 34, "h2d", "hand_over"),
        (34, 50, "h2d", "h2d"),
        (50, 52, "gpu", "hand_over"),
        (52, 70, "gpu", "forward"),
        (70, 71, "d2h", "hand_over"),
        (71, 75, "d2h", "d2h"),
        (75, 78, "host", "wake"),
        (78, 90, "host", "respond"),
    ]


def test_totals_tell_work_from_waits() -> None:
    sums = totals(critical_path(trace_of(*ONE_BATCH)))
    assert sums["worker 0", "preprocess", ""] == 18
    assert sums["host", "", "wake"] == 5
    assert next(iter(sums)) == ("gpu", "forward", ""), "the largest first"
    assert sum(sums.values()) == 90


def test_a_sleep_that_an_arrival_or_the_batch_delay_ended() -> None:
    trace = trace_of(
        span("cpu", 0, 2, "admit", op=0),
        span("wait", 2, 50, op=1),
        span("cpu", 50, 52, "admit", op=2),
        span("wait", 52, 80, op=3),
        span("cpu", 80, 90, "batch", op=4),
    )
    assert told(critical_path(trace))[1] == (2, 50, "host", "arrivals")
    assert (52, 80, "host", "batch_delay") in told(critical_path(trace))


def test_a_busy_worker_and_a_job_that_waited_for_it() -> None:
    trace = trace_of(
        span("cpu", 0, 30, "preprocess", op=0, lane="worker 0"),
        span("cpu", 30, 60, "preprocess", op=1, queued=5, lane="worker 0"),
        span("wait", 5, 61, op=2),
        span("cpu", 61, 70, "enqueue", op=3),
    )
    assert told(critical_path(trace)) == [
        (0, 30, "worker 0", "preprocess"),
        (30, 60, "worker 0", "preprocess"),
        (60, 61, "host", "wake"),
        (61, 70, "host", "enqueue"),
    ]


def test_a_slow_launch_lies_on_the_host_and_not_on_the_gpu() -> None:
    pulses = [span("kernel", s, s + 2, "forward", op=1, queued=s if s > 5 else 0) for s in (5, 25, 45)]
    trace = trace_of(span("api", 0, 46, "launch", op=1), *pulses, span("sync", 46, 50, op=2))
    assert totals(critical_path(trace)) == {
        ("host", "launch", ""): 45, ("host", "", "sync"): 3, ("gpu", "forward", ""): 2,
    }  # fmt: skip


def test_a_synchronize_waits_for_its_own_stream() -> None:
    trace = trace_of(
        span("api", 0, 2, "launch", op=0, stream=0),
        span("api", 2, 4, "launch", op=1, stream=1),
        span("kernel", 3, 40, "short", op=0, queued=0, stream=0),
        span("kernel", 5, 45, "other", op=1, queued=2, stream=1),
        span("sync", 4, 43, op=2, stream=0),
        span("cpu", 43, 50, "use", op=3),
    )
    assert (3, 40, "gpu", "short") in told(critical_path(trace))
    assert not any(name == "other" for *_, name in told(critical_path(trace)))


def test_a_copy_back_to_pageable_memory_holds_the_host_until_the_stream_has_come_to_it() -> None:
    trace = trace_of(
        span("api", 0, 2, "launch", op=0),
        span("kernel", 2, 40, "forward", op=0, queued=0),
        span("api", 3, 60, "copy", op=1),
        span("d2h", 41, 50, "copy", op=1, queued=3, after=0),
    )
    assert told(critical_path(trace)) == [
        (0, 2, "host", "launch"),
        (2, 40, "gpu", "forward"),
        (40, 41, "d2h", "hand_over"),
        (41, 50, "d2h", "copy"),
        (50, 60, "host", "copy"),
    ]


def test_a_file_whose_ops_wait_for_each_other_ends() -> None:
    round_and_round = trace_of(
        span("cpu", 0, 1, op=1),
        span("kernel", 5, 5, "a", op=2, queued=0, after=3),
        span("kernel", 5, 5, "b", op=3, queued=0, stream=1, after=2),
        span("api", 3, 9, "copy", op=4),
        span("d2h", 9, 9, op=4, queued=3),
        span("kernel", 9, 12, "c", op=5, queued=0, after=2),
    )
    assert covers(round_and_round)
    assert sum(explain.find(round_and_round).by_cause().values()) == 9


def covers(trace: Trace) -> bool:
    path = critical_path(trace, Queue.of(trace))
    if not trace.wall_ns:
        return path == ()
    joined = all(a.end_ns == b.start_ns for a, b in pairwise(path))
    return joined and path[0].start_ns == trace.start_ns and path[-1].end_ns == trace.end_ns


@given(any_trace())
@settings(max_examples=300, deadline=None)
def test_it_covers_the_run_without_holes_and_each_step_is_work_or_a_wait(trace: Trace) -> None:
    assert covers(trace)
    for step in critical_path(trace, Queue.of(trace)):
        assert step.took_ns > 0
        assert bool(step.name) != bool(step.cause)
        if step.name:
            assert any(
                (s.op, s.kind, s.lane) == (step.op, step.kind, step.lane)
                and s.start_ns <= step.start_ns < step.end_ns <= s.end_ns
                for s in trace
            ), "work on the path was work that happened then"


@pytest.mark.parametrize("device", ["sim:h200", "sim:t4", "sim:one_memory", "cpu"])
def test_of_runs(device: str) -> None:
    on = hl.open_device(device, races="off")
    run = hl.Pipeline(hl.models.encoder(), batch=4).run(hl.poisson(rate=2000, n=24, seed=1), on=on)
    on.close()
    assert covers(run.trace)
    path = critical_path(run.trace, Queue.of(run.trace))
    assert path[-1].name == "respond"
    assert sum(totals(path).values()) == run.trace.wall_ns


@pytest.mark.parametrize("name", ["03-chunks-256", "03-pageable-2", "05-ids-pinned", "05-logits-pageable"])
def test_of_recordings(name: str) -> None:
    assert covers(hl.lab.recording(name))
