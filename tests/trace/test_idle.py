"""One cause for every idle moment: on paper, where the cause is known, and on any trace."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from on_paper import any_trace, served, span, trace_of

from heterolab.trace import explain, idle, metrics
from heterolab.trace.queue import Queue
from heterolab.trace.trace import Trace


def causes(trace: Trace, device: int | None = None) -> list[tuple[int, int, str]]:
    """(start, end, cause) of every piece."""
    return [(p.start_ns, p.end_ns, p.cause) for p in idle.pieces(trace, device, Queue.of(trace))]


def kernel(start: int, end: int, **more):
    return span("kernel", start, end, "forward", **({"op": 90} | more))


# -- the kernel is issued: what did its stream wait for? -----------------------------------------


def test_its_input_is_under_way() -> None:
    trace = trace_of(
        span("h2d", 10, 50, op=1, queued=5),
        kernel(52, 60, queued=6, after=1),
        span("cpu", 0, 60, "pad", op=0),
    )
    assert causes(trace) == [
        (0, 6, "cpu:pad"),
        (6, 10, "hand_over"),
        (10, 50, "input_copy"),
        (50, 52, "hand_over"),
    ]


def test_its_input_stands_in_line_behind_another_copy() -> None:
    trace = trace_of(
        span("h2d", 0, 50, op=1, queued=0, stream=1),
        span("h2d", 50, 60, op=2, queued=0, stream=0, after=1),
        kernel(60, 70, queued=0, stream=0, after=2),
    )
    assert causes(trace) == [(0, 60, "input_copy")]
    (piece,) = idle.pieces(trace)
    assert dict(piece.blamed) == {0: 50, 1: 10}, "both copies are the evidence"


def test_a_copy_to_the_host_is_before_it_in_its_stream() -> None:
    trace = trace_of(
        kernel(0, 10, op=1),
        span("d2h", 10, 40, op=2, queued=1, after=1),
        kernel(42, 50, op=3, queued=2, after=2),
    )
    assert causes(trace) == [(10, 40, "output_copy"), (40, 42, "hand_over")]


def test_it_waits_for_an_event_whatever_that_stream_does() -> None:
    trace = trace_of(
        span("h2d", 0, 30, op=1, queued=0, stream=1),
        span("api", 1, 2, "wait", op=2),
        kernel(33, 40, op=3, queued=2, after=1),
    )
    assert causes(trace)[1:] == [(1, 2, "launch_call"), (2, 33, "event")]
    assert causes(trace)[0] == (0, 1, "unrecorded")


def test_behind_a_kernel_of_another_stream_without_an_event_it_is_the_engine_that_was_busy() -> None:
    spans = (kernel(0, 10, op=1, stream=1), kernel(14, 20, op=2, queued=0, after=1))
    assert causes(trace_of(*spans)) == [(10, 14, "hand_over")]
    default = (kernel(0, 10, op=1, stream=-1), kernel(14, 20, op=2, queued=0, after=1))
    assert causes(trace_of(*default)) == [(10, 14, "event")], "the legacy default stream's barrier"


@pytest.mark.parametrize("source", ["cupti", "cuda-events"])
def test_a_measured_trace_shows_an_event_by_the_call_that_waits_for_it(source: str) -> None:
    spans = (
        span("h2d", 0, 30_000, op=1, queued=0, stream=1),
        span("api", 0, 1000, "wait", op=2),
        span("api", 1000, 2000, "launch", op=3),
        kernel(32_000, 40_000, op=3, queued=1000),
    )
    assert causes(trace_of(*spans, source=source)) == [(0, 1000, "launch_call"), (1000, 32_000, "event")]


def test_a_long_pause_on_a_real_gpu_that_nothing_explains_is_unknown_and_not_guessed() -> None:
    spans = (span("api", 0, 1000, "launch", op=3), kernel(500_000, 600_000, op=3, queued=0))
    assert causes(trace_of(*spans, source="cupti")) == [(0, 1000, "launch_call"), (1000, 500_000, "unknown")]
    assert causes(trace_of(*spans)) == [(0, 1000, "launch_call"), (1000, 500_000, "hand_over")]
    (_, gap) = explain.find(trace_of(*spans, source="cupti")).gaps
    assert gap.missing == "reason"


def test_the_gap_between_two_kernels_of_a_stream() -> None:
    trace = trace_of(kernel(0, 10, op=1), kernel(12, 20, op=2, queued=0, after=1))
    assert causes(trace) == [(10, 12, "hand_over")]


def test_a_composite_that_is_launched_too_slowly() -> None:
    pulses = [kernel(start, start + 4, op=1, queued=start if start > 5 else 0) for start in (5, 25, 45)]
    trace = trace_of(span("api", 0, 48, "launch", op=1), *pulses)
    assert causes(trace) == [(0, 5, "launch_call"), (9, 25, "launch_call"), (29, 45, "launch_call")]


def test_the_kernels_of_a_composite_measured_exactly() -> None:
    """The second was launched before the first had ended, the third was not."""
    spans = [kernel(5, 10, op=1, queued=0), kernel(12, 20, op=1, queued=8), kernel(40, 44, op=1, queued=35)]
    trace = trace_of(span("api", 0, 39, "launch", op=1), *spans, source="cupti")
    assert causes(trace) == [(0, 5, "launch_call"), (10, 12, "hand_over"), (20, 40, "launch_call")]


# -- it is not issued: what does the host do? ------------------------------------------------------


def late(*before, **meta) -> str:
    """The cause of the 100 ns before a kernel is issued, with `before` going on."""
    trace = trace_of(*before, kernel(100, 110, queued=100), **meta)
    found = causes(trace)
    assert found[0][:2] == (0, 100), found
    return found[0][2]


def test_the_host_is_busy_with_a_stage_on_its_thread_or_on_a_worker() -> None:
    worker = span("cpu", 0, 100, "preprocess", op=1, lane="worker 0")
    assert late(worker) == "cpu:preprocess"
    assert late(worker, span("wait", 0, 100, op=2)) == "cpu:preprocess"
    assert late(worker, span("cpu", 0, 100, "pad", op=2)) == "cpu:pad"


def test_the_host_is_held_by_a_pageable_copy_if_the_trace_says_so_or_the_call_lasts_as_the_copy() -> None:
    call, copy = copying(100, 1)
    assert late(call, copy, settings={"memory": "pageable"}) == "pageable"
    assert late(call, copy, settings={"memory": "pinned"}) == "copy_call"
    assert late(call, copy) == "copy_call", "a call of 100 ns held nobody"
    us = 1000
    held = trace_of(*copying(100 * us, us), kernel(110 * us, 120 * us, queued=100 * us))
    assert causes(held)[0] == (0, 100 * us, "pageable")
    short = trace_of(*copying(30 * us, us), kernel(110 * us, 120 * us, queued=30 * us))
    assert causes(short)[0] == (0, 30 * us, "copy_call"), "it came back while most was still to be copied"


def copying(call_ns: int, unit: int):
    """A call that takes so long, and a copy from 5 to 102 units."""
    copy = span("h2d", 5 * unit, 102 * unit, op=1, queued=0, stream=1)
    return span("api", 0, call_ns, "copy", op=1), copy


def test_other_calls_and_a_synchronize() -> None:
    assert late(span("api", 0, 100, "launch", op=1)) == "launch_call"
    assert late(span("sync", 0, 100, op=1), span("h2d", 0, 100, op=2, stream=1)) == "sync"
    assert late(span("cpu", 0, 100, "pad", op=1), span("h2d", 0, 100, op=2, stream=0)) == "input_copy"
    assert late(span("cpu", 0, 100, "pad", op=1), span("h2d", 0, 100, op=2, stream=1)) == "cpu:pad"


def test_between_two_steps_and_no_host_at_all() -> None:
    assert late(span("cpu", 0, 0, "mark", op=1)) == "unrecorded"
    alone = trace_of(span("h2d", 0, 10, op=1, stream=1), kernel(100, 110, queued=100), source="cupti")
    assert causes(alone) == [(0, 100, "unknown")]
    assert explain.find(alone).gaps[0].missing == "host"


# -- the host sleeps: what for? --------------------------------------------------------------------

ASLEEP = span("wait", 0, 100, op=1)


def asleep(*requests, before=(), **more) -> list[tuple[int, int, str]]:
    return causes(
        served(ASLEEP, *before, kernel(100, 110, queued=100, batch=0), requests=list(requests), **more)
    )


def test_nothing_has_arrived() -> None:
    assert asleep((100, 100, 100, 120, 0)) == [(0, 100, "arrivals")]


def test_with_nothing_arrived_a_busy_host_is_not_to_blame() -> None:
    trace = served(
        span("cpu", 0, 100, "log_to_disk", op=1),
        kernel(100, 110, queued=100, batch=0),
        requests=[(100, 100, 100, 120, 0)],
    )
    assert causes(trace) == [(0, 100, "arrivals")]
    closed = served(
        span("cpu", 0, 100, "log_to_disk", op=1),
        kernel(100, 110, queued=100, batch=0),
        requests=[(100, 100, 100, 120, 0)],
        load="closed_loop(n=1)",
    )
    assert causes(closed) == [(0, 100, "cpu:log_to_disk")], "the next request waits for what the host does"


def test_the_batch_delay_runs_until_its_end_and_then_the_host_is_late() -> None:
    delay = {"max_delay_ms": 60e-6}  # 60 ns
    assert asleep((10, 20, 100, 120, 0), **delay) == [
        (0, 10, "arrivals"),
        (10, 20, "wake"),
        (20, 80, "batch_delay"),
        (80, 100, "wake"),
    ]


def test_no_slot_is_free() -> None:
    flying = (0, 0, 0, 95, 1)
    out = span("d2h", 0, 90, op=3, batch=1, stream=1)
    found = asleep((0, 0, 100, 120, 0), flying, before=(out,), streams=1, ring=1)
    assert found == [(0, 90, "output_copy"), (90, 95, "wake"), (95, 100, "batch_delay")]


def test_clients_wait_for_their_answers() -> None:
    out = span("d2h", 0, 90, op=3, batch=1, stream=1)
    requests = ((0, 0, 0, 95, 1), (96, 97, 100, 120, 0))
    closed = asleep(*requests, before=(out,), load="closed_loop(n=2)", max_delay_ms=60e-6)
    assert closed[:3] == [(0, 90, "output_copy"), (90, 95, "wake"), (95, 96, "arrivals")]
    assert asleep(*requests, before=(out, span("kernel", -5, 0, op=2, batch=1)))[0][2] == "arrivals"


def test_a_trace_that_does_not_say_when_requests_arrived() -> None:
    trace = trace_of(ASLEEP, kernel(100, 110, queued=100))
    assert causes(trace) == [(0, 100, "unknown")]
    assert explain.find(trace).gaps[0].missing == "requests"
    copying = trace_of(ASLEEP, span("d2h", 0, 60, op=2, stream=1), kernel(100, 110, queued=100))
    assert causes(copying) == [(0, 60, "output_copy"), (60, 100, "unknown")]


@pytest.mark.parametrize("requests", [{"arrival_ns": [1]}, [], {"arrival_ns": "x"}, None])
def test_what_a_file_says_of_requests_is_not_believed_blindly(requests) -> None:
    trace = trace_of(ASLEEP, kernel(100, 110, queued=100), requests=requests, settings="batch=8")
    assert causes(trace) == [(0, 100, "unknown")]


# -- the end, and several GPUs -----------------------------------------------------------------------


def test_after_the_last_kernel() -> None:
    trace = trace_of(
        kernel(0, 10),
        span("d2h", 10, 30, op=91, after=90),
        span("wait", 0, 40, op=1),
        span("cpu", 40, 60, "respond", op=2),
        span("wait", 60, 80, op=3),
    )
    assert causes(trace) == [
        (10, 30, "output_copy"),
        (30, 40, "end"),
        (40, 60, "cpu:respond"),
        (60, 80, "end"),
    ]


def test_each_gpu_has_its_own_gaps() -> None:
    trace = trace_of(
        kernel(0, 10, op=1, batch=0),
        kernel(40, 50, op=2, batch=1, device=1, queued=30),
        span("cpu", 10, 30, "pad", op=3, batch=1),
        span("api", 30, 40, "launch", op=2, device=1),
    )
    assert causes(trace, 0) == [(10, 50, "end")], "the host works for the other one"
    assert causes(trace, 1) == [(0, 10, "unrecorded"), (10, 30, "cpu:pad"), (30, 40, "launch_call")]
    assert explain.find(trace).devices == (0, 1)


# -- on any trace --------------------------------------------------------------------------------------


@given(any_trace())
@settings(max_examples=300, deadline=None)
def test_causes_of_every_gpu_sum_exactly_to_its_idle_time(trace: Trace) -> None:
    found = explain.find(trace)
    for device in found.devices:
        mine = trace.where((trace["kind"] == "kernel") & (trace["device"] == device))
        busy = metrics.length_ns(metrics.union(mine["start_ns"], mine["end_ns"]))
        assert sum(found.by_cause(device).values()) == trace.wall_ns - busy
        gaps = [gap for gap in found.gaps if gap.device == device]
        assert all(gap.took_ns > 0 for gap in gaps)
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(gaps)), "one cause a moment"
        for gap in gaps:
            assert sum(ns for _, ns in gap.evidence) <= gap.took_ns <= gap.whole_ns
            assert all(meet(span, gap) for span, _ in gap.evidence if gap.cause not in BY_STREAM)
    assert sum(metrics.gpu_idle_by_cause(trace).values()) == metrics.idle_ns(trace, "gpu")


#: Their evidence can be the op that was waited for, which has ended before.
BY_STREAM = ("event", "hand_over", "input_copy", "output_copy", "launch_call", "copy_call", "unknown")


def meet(span, gap) -> bool:
    return span.start_ns < gap.end_ns and span.end_ns > gap.start_ns


def test_an_empty_trace_and_one_without_length() -> None:
    assert idle.pieces(trace_of()) == []
    assert explain.find(trace_of()).gaps == ()
    assert explain.find(trace_of(kernel(5, 5))).gaps == ()


def test_a_trace_of_50_000_spans_takes_less_than_two_seconds() -> None:
    spans, at = [], 0
    for batch in range(5_000):
        op = 10 * batch
        spans += [
            span("cpu", at, at + 10, "preprocess", op=op, lane="worker 0"),
            span("wait", at, at + 12, op=op + 1),
            span("cpu", at + 12, at + 20, "pad", op=op + 2, batch=batch),
            span("api", at + 20, at + 25, "copy", op=op + 3, batch=batch),
            span("h2d", at + 24, at + 40, op=op + 3, queued=at + 20, batch=batch, stream=batch % 2),
            span("api", at + 26, at + 30, "launch", op=op + 4, batch=batch),
            span(
                "kernel",
                at + 41,
                at + 60,
                op=op + 4,
                queued=at + 26,
                batch=batch,
                stream=batch % 2,
                after=op + 3,
            ),
            span(
                "d2h",
                at + 61,
                at + 70,
                op=op + 5,
                queued=at + 31,
                batch=batch,
                stream=batch % 2,
                after=op + 4,
            ),
            span("wait", at + 35, at + 75, op=op + 6),
            span("cpu", at + 75, at + 90, "postprocess", op=op + 7, batch=batch),
        ]
        at += 100
    requests = [(100 * b, 100 * b + 10, 100 * b + 12, 100 * b + 90, b) for b in range(5_000)]
    trace = served(*spans, requests=requests)
    began = time.process_time()
    found = explain.find(trace)
    assert time.process_time() - began < 2
    assert len(trace) == 50_000
    assert len(found.gaps) > 5_000
