"""A run in words, and the still picture."""

import xml.etree.ElementTree as ElementTree

import pytest
from made_by_hand import EVIL, run, trace

from heterolab.trace.trace import Span, Trace
from heterolab.view.still import svg
from heterolab.view.words import describe, diagnosis, duration, figures, sentences, size, table


@pytest.mark.parametrize(
    ("ns", "told"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1000, "1.00 µs"),
        (12_340, "12.3 µs"),
        (999_900, "1.00 ms"),
        (2.5e9, "2.50 s"),
    ],
)
def test_durations_as_one_would_say_them(ns, told):
    assert duration(ns) == told


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**26, "64.0 MiB")]
)
def test_sizes_as_one_would_say_them(count, told):
    assert size(count) == told


def test_five_sentences_of_at_most_twenty_words():
    for shown in (run(), trace()):
        told = sentences(shown)
        assert len(told) == 5
        assert all(len(sentence.split()) <= 20 for sentence in told), told
    assert "2 requests were answered in 20.0 µs" in sentences(run())[0]
    assert "GPU 50 %" in sentences(run())[1]
    assert "link and GPU 20 %" in sentences(run())[2]
    assert "because of CPU work: preprocess" in sentences(trace())[3]
    assert "GPU, worked for 10.0 µs" in sentences(trace())[4]


def test_figures_of_a_run_have_units_samples_and_the_bad_news():
    told = dict(figures(run()))
    assert told["throughput"] == "100000 requests/s"
    assert told["latency, mean"] == "17.0 µs, of it 3.50 µs waiting"
    assert "2 samples: too few for p99" in told["latency, p50 / p99"]
    assert told["not answered"] == "1 rejected, 0 failed, 0 unserved"
    assert "mean nothing" in told["model"]
    assert told["per request: CPU / link / GPU"] == "2.50 µs / 4.50 µs / 5.00 µs"
    assert told["busiest lane"] == "GPU, 50 % of the time"


def test_figures_of_a_trace_speak_of_no_requests():
    names = [name for name, _ in figures(trace())]
    assert "throughput" not in names
    assert "work: CPU / link / GPU" in names


def test_nothing_recorded_is_said_so():
    empty = Trace.from_spans([], "simulated", "x")
    assert sentences(empty) == ["Nothing was recorded."] == [diagnosis(empty)]
    assert dict(figures(empty))["wall time"] == "0 ns"


@pytest.mark.parametrize(
    ("busy", "told"),
    [(90, "The GPU limits"), (60, "is at work 60 % of the time. The GPU waits most"), (20, "No lane limits")],
)
def test_the_diagnosis_follows_the_share_of_the_busiest_lane(busy, told):
    spans = [
        Span(0, "wait", "wait", "host", -2, -1, 0, 0, 100),
        Span(1, "kernel", "k", "gpu", 0, 0, 100 - busy, 100 - busy, 100),
    ]
    assert told in diagnosis(Trace.from_spans(spans, "simulated", "x"))


def test_describe_reads_as_text_and_as_a_table():
    described = describe(run(trace(device=EVIL)))
    assert str(described) == repr(described)
    assert "throughput" in str(described)
    html = described._repr_html_()
    assert "<img" not in html
    assert "&lt;img" in html


def test_tables_escape_every_cell():
    assert EVIL not in table([(EVIL, EVIL)], [EVIL, EVIL])


def test_the_still_picture_is_valid_svg_with_the_sentences_and_no_live_names():
    hostile = trace(name=EVIL, device=EVIL)
    root = ElementTree.fromstring(svg(hostile))
    assert root.get("aria-label") == describe(hostile).alt
    kinds = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert kinds == {"svg", "rect", "text"}
    assert svg(hostile) == svg(hostile)


def test_the_still_picture_stays_small_however_many_spans_there_are():
    spans = [Span(i, "kernel", "k", "gpu", 0, 0, 0, 10 * i, 10 * i + 9) for i in range(20_000)]
    assert len(svg(Trace.from_spans(spans, "simulated", "x"))) < 100_000


def test_a_trace_counts_copies_and_kernels_and_not_calls():
    assert "6 copies and kernels took" in describe(trace()).alt
    assert "one copy or kernel took" in describe(trace().where(trace()["op"] == 4)).alt


def test_a_trace_without_work_promises_no_bound():
    held = Span(0, "sync", "synchronize", "host", 0, 0, 0, 0, 900)
    alt = describe(Trace.from_spans([held], "simulated", "a GPU on paper")).alt
    assert "no copy and no kernel" in alt
    assert "No lane did any work" in alt
    assert "for 0 ns" not in alt
