"""Every question, on traces small enough to answer on paper, and what must hold on any trace."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterolab.errors import InputError
from heterolab.trace import metrics
from heterolab.trace.trace import NO_STREAM, NONE, Span, Trace

LANE = {"cpu": "host", "api": "host", "sync": "host", "wait": "host", "kernel": "gpu"}


def span(kind, start, end, name="", lane="", op=0, queued=None, batch=NONE):
    lane = lane or LANE.get(kind, kind)
    device = kind in ("h2d", "d2h", "kernel")
    queued = start if queued is None else queued
    return Span(op, kind, name or kind, lane, 0 if device else NO_STREAM, 0 if device else NONE,
                queued, start, end, 0, batch)  # fmt: skip


def trace_of(*spans):
    return Trace.from_spans(spans, "simulated", "a GPU on paper")


#: Copy in, compute, copy out, twice, the second copy in beside the first kernel.
OVERLAPPED = trace_of(
    span("api", 0, 2, op=0),
    span("h2d", 2, 12, op=0, queued=1),
    span("h2d", 12, 22, op=1, queued=1),
    span("kernel", 12, 20, op=2, queued=2),
    span("kernel", 22, 30, op=3, queued=2),
    span("d2h", 30, 34, op=4, queued=2),
    span("sync", 3, 34),
)


def test_busy_and_idle_of_lanes_and_groups():
    assert metrics.busy_ns(OVERLAPPED, "h2d") == 20
    assert metrics.busy_ns(OVERLAPPED, "link") == 24
    assert metrics.busy_ns(OVERLAPPED, "gpu") == 16
    assert metrics.idle_ns(OVERLAPPED, "gpu") == 18


def test_a_host_that_is_held_or_asleep_is_not_busy():
    assert metrics.busy_ns(OVERLAPPED, "cpu") == 2
    assert metrics.busy_ns(trace_of(span("wait", 0, 9), span("cpu", 9, 10)), "host") == 1


def test_concurrent_spans_of_a_lane_count_once():
    trace = trace_of(span("kernel", 0, 10), span("kernel", 5, 8), span("kernel", 9, 14))
    assert metrics.busy_ns(trace, "gpu") == 14


def test_overlap_of_two_lanes():
    assert metrics.overlap_ns(OVERLAPPED, "h2d", "gpu") == 8
    assert metrics.overlap_ns(OVERLAPPED, "d2h", "gpu") == 0
    assert metrics.overlap_ns(OVERLAPPED, "gpu", "gpu") == 16


def test_an_unknown_lane_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"'gpus'.*cpu, link, gpu, host, h2d, d2h"):
        metrics.busy_ns(OVERLAPPED, "gpus")


def test_a_lane_that_did_nothing_was_busy_for_no_time():
    assert metrics.busy_ns(trace_of(span("kernel", 0, 5)), "d2h") == 0


def test_lanes_are_listed_as_they_are_drawn():
    trace = trace_of(
        *(span("cpu", 0, 1, lane=f"worker {n}") for n in (10, 2)),
        span("kernel", 0, 1), span("h2d", 0, 1), span("cpu", 0, 1),
    )  # fmt: skip
    assert metrics.lanes(trace) == ["host", "worker 2", "worker 10", "h2d", "gpu"]


def test_the_bound_is_the_busiest_lane():
    assert metrics.lanes_bound_ns(OVERLAPPED) == 20
    assert metrics.lanes_bound_ns(trace_of()) == 0


def test_idle_by_cause_when_all_was_enqueued_at_once_blames_no_host():
    # The first 2 ns are the copy call; then the first copy, and the tail of the second.
    assert metrics.gpu_idle_by_cause(OVERLAPPED) == {"input_copy": 12, "output_copy": 4, "copy_call": 2}


@pytest.mark.parametrize(
    ("before", "queued", "cause"),
    [
        ([span("h2d", 0, 10), span("cpu", 0, 10, "pad")], 10, "input_copy"),
        ([span("d2h", 0, 10), span("sync", 0, 10)], 0, "output_copy"),
        ([span("d2h", 0, 10), span("sync", 0, 10)], 10, "sync"),
        ([span("wait", 0, 10)], 0, "hand_over"),
        ([span("api", 0, 10, op=7), span("h2d", 10, 11, op=7)], 11, "copy_call"),
        ([span("api", 0, 10, op=7)], 10, "launch_call"),
        ([span("cpu", 0, 10, "pad"), span("cpu", 0, 10, "preprocess", "worker 0")], 10, "cpu:pad"),
        ([span("wait", 0, 10), span("cpu", 0, 10, "preprocess", "worker 0")], 10, "cpu:preprocess"),
        ([span("wait", 0, 10), span("d2h", 0, 10)], 10, "output_copy"),
        ([span("wait", 0, 10)], 10, "unknown"),
        ([span("cpu", 0, 0, "mark")], 10, "unrecorded"),
    ],
)
def test_each_cause_of_an_idle_gpu(before, queued, cause):
    trace = trace_of(*before, span("kernel", 11, 15, op=99, queued=queued))
    causes = metrics.gpu_idle_by_cause(trace)
    assert next(iter(causes)) == cause
    assert causes[cause] >= 10
    assert sum(causes.values()) == metrics.idle_ns(trace, "gpu") == 11


def test_after_the_last_kernel_the_copy_out_is_the_cause_even_if_the_host_waits_for_it():
    trace = trace_of(span("kernel", 0, 5), span("d2h", 5, 9), span("sync", 1, 9), span("cpu", 9, 12, "reply"))
    assert metrics.gpu_idle_by_cause(trace) == {"output_copy": 4, "cpu:reply": 3}


def test_a_run_without_kernels_is_idle_throughout():
    trace = trace_of(span("cpu", 0, 5, "parse"), span("wait", 5, 9))
    assert metrics.gpu_idle_by_cause(trace) == {"cpu:parse": 5, "end": 4}
    assert metrics.gpu_idle_by_cause(trace_of()) == {}


def test_percentiles_are_latencies_that_occurred_with_their_number():
    p = metrics.latency_percentiles([30, 10, 20, 40], qs=(50, 99))
    assert (p.samples, p.values_ns) == (4, {50: 20, 99: 40})
    assert p.too_few == (50, 99)


@pytest.mark.parametrize(("samples", "too_few"), [(999, (99,)), (1000, ()), (199, (95, 99)), (200, (99,))])
def test_p99_needs_a_thousand_samples(samples, too_few):
    assert metrics.latency_percentiles(np.arange(samples), (50, 95, 99)).too_few == too_few


def test_percentiles_of_nothing_and_of_nonsense():
    assert metrics.latency_percentiles([]).values_ns == {}
    with pytest.raises(InputError, match=r"101"):
        metrics.latency_percentiles([1], qs=(101,))


def run_of(trace, answers=2, wall_ns=34, waiting=(1, 2), sizes=(2,)):
    return SimpleNamespace(
        trace=trace, answers=[None] * answers, wall_ns=wall_ns,
        waiting_ns=np.array(waiting), batch_sizes=np.array(sizes),
    )  # fmt: skip


def test_questions_about_requests():
    run = run_of(OVERLAPPED, wall_ns=1_000_000_000)
    assert metrics.throughput_per_s(run) == 2.0
    assert metrics.queue_delay_ns(run).tolist() == [1, 2]
    assert metrics.batch_sizes(run).tolist() == [2]
    assert metrics.throughput_per_s(run_of(OVERLAPPED, answers=0, wall_ns=0)) == 0.0


def test_batch_sizes_from_a_mapping_leave_out_who_was_in_none():
    assert metrics.batch_sizes({0: 0, 1: 1, 2: 1, 3: -1}).tolist() == [1, 2]
    assert metrics.batch_sizes({}).tolist() == []


def test_balance_card_shares_the_work_by_request_and_names_the_busiest_lane():
    trace = trace_of(
        span("cpu", 0, 4_000_000, lane="worker 0"),
        span("cpu", 0, 3_000_000, lane="host"),
        span("h2d", 4_000_000, 5_000_000),
        span("d2h", 9_000_000, 10_000_000),
        span("kernel", 5_000_000, 10_000_000),
    )
    card = metrics.balance_card(run_of(trace))
    assert card.as_dict() == {"cpu": 3.5, "link": 1.0, "gpu": 2.5}
    assert (card.limits, card.lane, card.lane_ms, card.share) == ("gpu", "gpu", 2.5, 0.5)
    assert "gpu 2.5 ms" in repr(card)
    assert metrics.balance_card(trace).as_dict() == {"cpu": 7.0, "link": 2.0, "gpu": 5.0}
    assert metrics.balance_card(trace, requests=10).gpu_ms == 0.5


def test_balance_card_of_a_run_without_answers_divides_by_nothing():
    card = metrics.balance_card(run_of(trace_of(), answers=0))
    assert card.as_dict() == {"cpu": 0.0, "link": 0.0, "gpu": 0.0}
    assert card.share == 0.0


# -- what must hold on any trace ---------------------------------------------------------


@st.composite
def any_trace(draw):
    spans = []
    for op in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["cpu", "api", "sync", "wait", "h2d", "d2h", "kernel"]))
        start = draw(st.integers(0, 40))
        lane = draw(st.sampled_from(["host", "worker 0", "worker 1"])) if kind == "cpu" else ""
        queued = draw(st.integers(0, start))
        spans.append(span(kind, start, start + draw(st.integers(0, 15)), "", lane, op, queued))
    return trace_of(*spans)


def at_work(trace, lane, moment):
    """By the definition, one moment at a time."""
    return any(
        s.start_ns <= moment < s.end_ns and s.kind not in ("sync", "wait")
        and lane in (s.lane, metrics.group_of(s.lane))
        for s in trace
    )  # fmt: skip


@given(any_trace(), st.sampled_from(["host", "h2d", "cpu", "link", "gpu"]))
@settings(max_examples=150, deadline=None)
def test_busy_is_what_the_definition_says_and_busy_plus_idle_is_the_wall(trace, lane):
    moments = range(trace.start_ns, trace.end_ns)
    assert metrics.busy_ns(trace, lane) == sum(at_work(trace, lane, t) for t in moments)
    assert metrics.busy_ns(trace, lane) + metrics.idle_ns(trace, lane) == trace.wall_ns


@given(any_trace(), *[st.sampled_from(["host", "h2d", "d2h", "cpu", "link", "gpu"])] * 2)
@settings(max_examples=150, deadline=None)
def test_overlap_is_symmetric_and_at_most_the_less_busy(trace, a, b):
    moments = range(trace.start_ns, trace.end_ns)
    both = metrics.overlap_ns(trace, a, b)
    assert both == metrics.overlap_ns(trace, b, a)
    assert both == sum(at_work(trace, a, t) and at_work(trace, b, t) for t in moments)
    assert both <= min(metrics.busy_ns(trace, a), metrics.busy_ns(trace, b))


@given(any_trace())
@settings(max_examples=200, deadline=None)
def test_causes_sum_to_the_idle_time_exactly(trace):
    causes = metrics.gpu_idle_by_cause(trace)
    assert sum(causes.values()) == metrics.idle_ns(trace, "gpu")
    assert all(ns > 0 for ns in causes.values())
    assert metrics.lanes_bound_ns(trace) <= trace.wall_ns
