"""Comparing traces: which ops are the same, what differs, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterolab.errors import InputError
from heterolab.trace import compare
from heterolab.trace.compare import differences, join, ops, settings_of, start_order
from heterolab.trace.trace import NO_STREAM, NONE, Span, Trace

LANES = {"kernel": "gpu", "h2d": "h2d", "d2h": "d2h"}


def op(number, kind, name, stream, start, end, batch=0, nbytes=0):
    return Span(number, kind, name, LANES[kind], stream, 0, start, start, end, nbytes, batch)


def host(number, name, start, end, kind="cpu", lane="host", batch=NONE):
    return Span(number, kind, name, lane, NO_STREAM, NONE, start, start, end, 0, batch)


def two_batches(stretch=1, *, source="cupti", device="NVIDIA H200", **meta):
    """CPU work, copy in, kernel, copy out, twice, on two streams."""
    spans = [host(0, "preprocess", 0, 10 * stretch), host(7, "wait", 60, 90, "wait")]
    for batch in (0, 1):
        first, at = 1 + 3 * batch, (10 + 40 * batch) * stretch
        spans += [
            op(first, "h2d", "copy", batch, at, at + 10 * stretch, batch, 4096),
            op(first + 1, "kernel", "encode", batch, at + 10 * stretch, at + 40 * stretch, batch),
            op(first + 2, "d2h", "copy", batch, at + 40 * stretch, at + 45 * stretch, batch, 64),
        ]
    return Trace.from_spans(spans, source, device, meta)


def predicted(stretch=1, **meta):
    return two_batches(stretch, source="simulated", profile="NVIDIA H200", **meta)


# -- ops ---------------------------------------------------------------------------------------


def test_an_op_of_many_pieces_is_one_with_their_sum_and_their_ends():
    pieces = [op(5, "kernel", "forward", 0, start, start + 2) for start in (0, 10, 28)]
    (found,) = ops(Trace.from_spans(pieces, "simulated", "x"))
    assert (found.start_ns, found.end_ns, found.busy_ns, found.pieces) == (0, 30, 6, 3)
    assert found.took_ns == 30


def test_a_sleeping_or_held_host_is_no_op():
    spans = [host(0, "wait", 0, 9, "wait"), host(1, "synchronize", 9, 12, "sync"), host(2, "pad", 12, 13)]
    assert [found.name for found in ops(Trace.from_spans(spans, "simulated", "x"))] == ["pad"]


def test_the_call_and_the_op_it_issued_are_two_though_they_share_a_number():
    spans = [host(3, "launch", 0, 5, "api"), op(3, "kernel", "add", 0, 4, 9)]
    assert [(o.number, o.kind) for o in ops(Trace.from_spans(spans, "cupti", "x"))] == [
        (3, "api"),
        (3, "kernel"),
    ]


def test_occurrences_count_by_issue_not_by_start():
    late_first = [op(1, "h2d", "copy", 0, 50, 60), op(2, "h2d", "copy", 1, 0, 10)]
    found = ops(Trace.from_spans(late_first, "cupti", "x"))
    assert [(o.number, o.occurrence, o.start_ns) for o in found] == [(1, 0, 50), (2, 1, 0)]


def test_an_op_whose_pieces_have_several_names_is_joined_by_its_place():
    exact = [op(1, "kernel", name, 0, at, at + 1) for at, name in enumerate(("gemm", "softmax", "gemm"))]
    exact.append(op(2, "kernel", "top_k", 0, 5, 6))
    whole = [op(1, "kernel", "encoder.forward", 0, 0, 4), op(2, "kernel", "top_k", 0, 5, 7)]
    pairs, left, rest = join(
        ops(Trace.from_spans(exact, "cupti", "x")), ops(Trace.from_spans(whole, "simulated", "x"))
    )
    assert [(p.measured.pieces, p.predicted.name) for p in pairs] == [(3, "encoder.forward"), (1, "top_k")]
    assert left == rest == []


@given(st.permutations(range(7)))
def test_ops_join_whatever_the_order_in_which_they_ran(order):
    """Every op gets another place in time; it is still the same op."""
    trace = two_batches()
    moved = [
        span._replace(start_ns=1000 * order[span.op % 7], end_ns=1000 * order[span.op % 7] + 10)
        for span in trace
    ]
    found = differences(trace, Trace.from_spans(moved, "simulated", "NVIDIA H200"))
    assert len(found.pairs) == 7
    assert not found.only_measured
    assert not found.only_predicted
    assert all(pair.measured.number == pair.predicted.number for pair in found.pairs)


# -- errors ------------------------------------------------------------------------------------


def test_a_trace_and_itself_differ_nowhere():
    found = differences(two_batches(), two_batches())
    assert found.wall_error == 0
    assert all(lane.busy_error == 0 == lane.end_error for lane in found.lanes)
    assert all(pair.off_ns == 0 for pair in found.pairs)
    assert found.in_order == found.neighbours > 0
    assert found.doubts == ()


def test_errors_are_of_the_measured_value():
    found = differences(two_batches(1), predicted(2))
    assert found.wall_error == pytest.approx(2 * 95 / 95 - 1)
    by_lane = {lane.lane: lane for lane in found.lanes}
    assert list(by_lane) == ["host", "h2d", "d2h", "gpu"]
    assert by_lane["gpu"].busy_error == pytest.approx(1.0)
    assert (by_lane["gpu"].measured_busy_ns, by_lane["gpu"].predicted_busy_ns) == (60, 120)
    assert (by_lane["h2d"].measured_end_ns, by_lane["h2d"].predicted_end_ns) == (60, 120)


def test_the_worst_op_comes_first():
    slow = [
        span._replace(end_ns=span.end_ns + (33 if (span.kind, span.batch) == ("d2h", 1) else 0))
        for span in predicted()
    ]
    found = differences(two_batches(), Trace.from_spans(slow, "simulated", "NVIDIA H200"))
    assert [pair.off_ns for pair in found.worst(2)] == [33, 0]
    assert (found.worst()[0].measured.kind, found.worst()[0].measured.batch) == ("d2h", 1)


def test_what_only_one_of_them_has_is_listed():
    more = Trace.from_spans([*predicted(), host(30, "log_to_disk", 100, 110)], "simulated", "NVIDIA H200")
    found = differences(two_batches(), more)
    assert [left.name for left in found.only_predicted] == ["log_to_disk"]
    assert not found.only_measured
    assert found.doubts == (compare.OTHER_OPS,)


def test_what_was_issued_before_the_run_does_not_count():
    early = [span._replace(op=span.op - 100, start_ns=-900, end_ns=-800) for span in two_batches()]
    found = differences(Trace.from_spans([*early, *two_batches()], "cupti", "NVIDIA H200"), predicted())
    assert found.wall_error == 0
    assert not found.only_measured


def test_throughput_is_told_where_the_traces_tell_how_many_were_answered():
    assert differences(two_batches(), predicted()).throughputs is None
    found = differences(two_batches(answers=19), predicted(2, answers=19))
    assert found.throughputs == pytest.approx((19 / 95e-9, 19 / 190e-9))
    assert found.throughput_error == pytest.approx(-0.5)


def test_start_order_is_of_neighbours_on_other_streams():
    def pair(number, stream, measured, predicted):
        a, b = (op(number, "kernel", "k", stream, at, at + 1) for at in (measured, predicted))
        (a,), (b,) = (ops(Trace.from_spans([one], "cupti", "x")) for one in (a, b))
        return compare.Pair(a, b)

    kept = [pair(n, n % 2, n, 10 * n) for n in range(4)]
    assert start_order(kept) == (3, 3)
    swapped = [pair(0, 0, 0, 0), pair(1, 1, 1, 9), pair(2, 0, 2, 5), pair(3, 1, 3, 20)]
    assert start_order(swapped) == (2, 3)
    assert start_order([pair(n, 0, n, -n) for n in range(4)]) == (0, 0), "one stream orders its own"
    after_a_run_on_one = [pair(0, 0, 0, 7), pair(1, 0, 1, 8), pair(2, 1, 2, 7)]
    assert start_order(after_a_run_on_one) == (1, 2), "each is held against the next of another stream"


# -- what may be compared ------------------------------------------------------------------------


def test_the_wrong_way_round_is_refused():
    with pytest.raises(InputError, match="the other way round"):
        differences(predicted(), two_batches())


def test_other_settings_are_refused_by_name():
    settings = {"batch": 8, "streams": 2}
    with pytest.raises(InputError, match=r"batch=8 and batch=32"):
        differences(two_batches(settings=settings), predicted(settings=settings | {"batch": 32}))
    assert differences(two_batches(settings=settings), predicted(settings=settings)).pairs


def test_other_loads_are_refused():
    with pytest.raises(InputError, match=r"poisson\(8\) and poisson\(9\)"):
        differences(two_batches(load="poisson(8)"), predicted(load="poisson(9)"))


def test_nothing_in_common_is_refused_with_what_there_is():
    other = Trace.from_spans([op(0, "kernel", "vector_add", 0, 0, 5, NONE)], "simulated", "NVIDIA H200")
    with pytest.raises(InputError, match=r"no op in common.*preprocess.*vector_add"):
        differences(two_batches(), other)
    empty = Trace.from_spans([], "cupti", "NVIDIA H200")
    with pytest.raises(InputError, match="the one has none"):
        differences(empty, predicted())


def test_two_machines_are_compared_with_a_doubt():
    assert differences(two_batches(device="NVIDIA T4"), predicted()).doubts == (compare.OTHER_DEVICE,)


def test_other_batches_are_compared_with_a_doubt():
    larger = [span._replace(bytes=2 * span.bytes) for span in predicted()]
    found = differences(two_batches(), Trace.from_spans(larger, "simulated", "NVIDIA H200"))
    assert found.doubts == (compare.OTHER_BATCHES,)


def test_requests_that_nobody_noted_are_a_doubt():
    settings = {"batch": 8}
    found = differences(two_batches(settings=settings, load="a"), predicted(settings=settings))
    assert found.doubts == (compare.UNKNOWN_LOAD,)
    both = differences(two_batches(settings=settings, load="a"), predicted(settings=settings, load="a"))
    assert both.doubts == ()


def test_events_see_a_composite_from_end_to_end():
    pulses = [span for span in predicted() if span.kind != "kernel"]
    for span in predicted().kind("kernel"):
        pulses += [span._replace(end_ns=span.start_ns + 5), span._replace(start_ns=span.end_ns - 5)]
    with_pulses = Trace.from_spans(pulses, "simulated", "NVIDIA H200")
    assert differences(two_batches(source="cuda-events"), with_pulses).doubts == (compare.EVENTS_SEE_ENDS,)
    assert differences(two_batches(source="cupti"), with_pulses).doubts == ()


def test_settings_are_read_in_both_ways_in_which_traces_note_them():
    assert settings_of(two_batches(settings={"batch": 2})) == {"batch": 2}
    told = settings_of(two_batches(settings="batch=32, memory='pageable'"))
    assert (told["batch"], told["memory"], told["streams"]) == (32, "pageable", 2)
    for damaged in (None, 7, "batch=", "batch=32)(", "batch=print(1)", "depth=3", "**{1: 2}"):
        assert settings_of(two_batches(settings=damaged)) is None


def test_a_replayed_trace_is_as_good_as_one_just_made(tmp_path):
    loaded = Trace.load(two_batches().save(tmp_path / "run.json.gz"))
    found = differences(loaded, predicted())
    assert found.wall_error == 0
    assert found.measured.replayed
    assert np.array_equal(found.measured["op"], two_batches()["op"])
    assert replace(found.measured, replayed=False).stamp == two_batches().stamp
