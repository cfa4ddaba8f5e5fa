"""The Chrome trace: valid, complete, and the same bytes for the same trace."""

import gzip
import json

from heterolab.trace.export import chrome_events, save_chrome
from heterolab.trace.trace import DEFAULT_STREAM, NO_STREAM, NONE, Span, Trace

TRACE = Trace.from_spans(
    [
        Span(0, "api", "copy", "host", 1, NONE, 0, 0, 2_000),
        Span(0, "h2d", "copy", "h2d", 1, 0, 1_000, 2_000, 9_000, 64, 3),
        Span(1, "kernel", "encode", "gpu", 1, 0, 3_000, 9_500, 12_000, 0, 3, 0),
        Span(2, "kernel", "topk", "gpu", DEFAULT_STREAM, 0, 3_000, 12_000, 13_000),
        Span(3, "wait", "wait", "host", NO_STREAM, NONE, 3_000, 3_000, 13_000),
    ],
    "simulated",
    "a GPU",
)


def test_every_span_is_there_in_microseconds_on_a_named_track():
    events = chrome_events(TRACE)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(tracks.values()) == ["default stream", "h2d", "host", "stream 1"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(TRACE)
    copy = next(e for e in bars if e["cat"] == "h2d")
    assert (copy["ts"], copy["dur"], tracks[copy["tid"]]) == (2.0, 7.0, "h2d")
    assert copy["args"] == {"op": 0, "bytes": 64, "batch": 3}
    assert events[0]["args"]["name"] == "simulated · a GPU"


def test_an_arrow_leads_from_the_call_to_its_op():
    arrows = [e for e in chrome_events(TRACE) if e["ph"] in "sf"]
    assert [(e["ph"], e["id"], e["ts"]) for e in arrows] == [("s", 0, 0.0), ("f", 0, 2.0)]


def test_files_are_json_and_the_same_bytes(tmp_path):
    plain = save_chrome(TRACE, tmp_path / "t.json").read_bytes()
    zipped = save_chrome(TRACE, tmp_path / "t.json.gz").read_bytes()
    assert gzip.decompress(zipped) == plain
    assert save_chrome(TRACE, tmp_path / "again.json.gz").read_bytes() == zipped
    assert len(json.loads(plain)["traceEvents"]) == len(chrome_events(TRACE))
