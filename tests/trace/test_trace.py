"""Traces: saved and loaded without loss, the same bytes for the same trace, damage refused."""

import gzip
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterolab.errors import TraceError
from heterolab.trace.trace import NONE, Recorder, Span, Trace

SPANS = [
    Span(1, "kernel", "add", "gpu", 0, 0, 20, 40, 90, 12, 3, 0),
    Span(0, "h2d", "copy", "h2d", 0, 0, 10, 15, 35, 4096, 3),
    Span(1, "api", "launch", "host", 0, 0, 20, 20, 30),
]


def made() -> Trace:
    return Trace.from_spans(SPANS, "simulated", "NVIDIA H200", {"settings": {"batch": 8}})


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_saved_trace_comes_back_whole_and_is_stamped_replayed(tmp_path, name) -> None:
    trace = made()
    loaded = Trace.load(trace.save(tmp_path / name))
    assert list(loaded) == list(trace) == sorted(SPANS, key=lambda s: (s.start_ns, s.op))
    assert (loaded.source, loaded.device, loaded.meta) == (trace.source, trace.device, trace.meta)
    assert trace.stamp == "simulated · NVIDIA H200"
    assert loaded.stamp == "replayed, simulated · NVIDIA H200"
    assert trace.save(tmp_path / "again").read_bytes() == made().save(tmp_path / "once").read_bytes()


@pytest.mark.parametrize("source", ["cpu-clock", "cuda-events", "cupti"])
def test_what_was_measured_says_how(source) -> None:
    assert Trace.from_spans(SPANS, source, "here").stamp.startswith("measured (")


def test_times_and_ops_can_count_from_the_start_of_a_run() -> None:
    trace = Trace.from_spans(SPANS, "simulated", "x", origin_ns=10, first_op=1)
    assert (trace.start_ns, trace.end_ns, trace.wall_ns) == (10, 80, 70)
    (kernel,) = trace.kind("kernel")
    assert (kernel.op, kernel.queued_ns, kernel.after) == (0, 10, NONE)


def test_what_was_issued_before_a_run_is_not_in_its_trace() -> None:
    """A real device tells the spans of the warm-up when the run has begun already."""
    trace = Trace.from_spans(SPANS, "cupti", "x", origin_ns=10, first_op=1)
    assert trace["op"].tolist() == [0, 0]
    assert "h2d" not in trace["kind"].tolist()


def test_an_empty_trace_is_a_trace(tmp_path) -> None:
    empty = Trace.from_spans([], "simulated", "x")
    assert (len(empty), empty.wall_ns) == (0, 0)
    assert len(Trace.load(empty.save(tmp_path / "empty.json"))) == 0


def damaged(change) -> bytes:
    data = made().to_json()
    change(data)
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not json",
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        gzip.compress(made().save.__name__.encode())[:-6],
        b"\x1f\x8b" + b"\x00" * 40,
        gzip.compress(b"{}" * 5000)[:12] + b"\x07" * 30,
        damaged(lambda d: d.update(version=2)),
        damaged(lambda d: d.update(format="other")),
        damaged(lambda d: d["columns"].pop("op")),
        damaged(lambda d: d["columns"]["op"].append(7)),
        damaged(lambda d: d["columns"].update(op="abc")),
        damaged(lambda d: d["columns"].update(op=[[1], [2], [3]])),
        damaged(lambda d: d["columns"].update(op=[1, 2, 10**30])),
        damaged(lambda d: d["columns"].update(end_ns=[0, 0, 0])),
        damaged(lambda d: d["columns"].update(start_ns=[-(10**18)] * 3)),
        damaged(lambda d: d.update(meta=3)),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, data) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=r"broken\.json"):
        Trace.load(path)


def test_a_missing_file_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        Trace.load(tmp_path / "nowhere.json")


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_a_trace_error(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("trace") / "any"
    path.write_bytes(data)
    with pytest.raises(TraceError):
        Trace.load(path)


def test_a_recorder_numbers_ops_and_tells_what_is_new() -> None:
    recorder = Recorder()
    assert [recorder.next_op(), recorder.next_op()] == [0, 1]
    assert recorder.ops == 2
    for span in SPANS:
        recorder.add(span)
    assert recorder.since(2) == SPANS[2:]


def test_a_part_of_a_trace_keeps_the_stamp() -> None:
    part = made().where(np.array([True, False, False]))
    assert len(part) == 1
    assert part.stamp == made().stamp
