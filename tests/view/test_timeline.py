"""The timeline: where spans lie, what is written on it, and what never gets into it unescaped."""

from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_by_hand import EVIL, run, trace

from heterolab.pipeline.run import Run
from heterolab.trace.trace import Span, Trace
from heterolab.view.colours import COLOURS
from heterolab.view.still import svg
from heterolab.view.timeline import MOST_CARDS, save_html, timeline


def bars(figure, kind):
    """(start, end, bottom, top) of the rectangles of a kind."""
    drawn = figure.data[list(COLOURS).index(kind)]
    x, y = np.asarray(drawn.x).reshape(-1, 6), np.asarray(drawn.y).reshape(-1, 6)
    return [(a[0], a[2], b[0], b[1]) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def annotations(figure):
    return [note.text for note in figure.layout.annotations]


def test_spans_are_drawn_from_start_to_end_in_their_lane():
    figure = timeline(trace())
    assert figure.layout.yaxis.ticktext == ("CPU", "link", "GPU")
    kernels = bars(figure, "kernel")
    assert [(a, b) for a, b, _, _ in kernels] == [(8, 14), (12, 18)]
    assert all(-2.5 < low < high < -1.5 for _, _, low, high in kernels)
    assert "µs" in figure.layout.xaxis.title.text


def test_what_runs_at_once_does_not_cover_each_other():
    (_, _, low, high), (_, _, other_low, other_high) = bars(timeline(trace()), "kernel")
    assert high <= other_low or other_high <= low
    (_, _, h2d_low, _), *_ = bars(timeline(trace()), "h2d")
    assert all(top <= h2d_low for _, _, _, top in bars(timeline(trace()), "d2h"))


def test_all_lanes_unfold_to_workers_directions_and_streams():
    labels = timeline(trace(), lanes="all").layout.yaxis.ticktext
    assert labels == ("host thread", "worker 0", "copy to GPU", "copy to host", "stream 0", "stream 1")


def test_every_picture_is_stamped():
    assert annotations(timeline(trace())) == ["<b>simulated · a GPU on paper</b>"]
    empty = Trace.from_spans([], "cpu-clock", "this CPU")
    assert annotations(timeline(empty)) == ["<b>measured (CPU) · this CPU · nothing was recorded</b>"]


def test_the_same_trace_gives_the_same_figure():
    assert timeline(trace()).to_json() == timeline(trace()).to_json()


def test_hover_cards_tell_op_batch_bytes_rate_and_cause():
    cards = timeline(trace()).data[-1].text
    copy = next(card for card in cards if "copy to GPU" in card)
    assert "op 3" in copy
    assert "batch 0" in copy
    assert "4.00 KiB · 1.4 GB/s" in copy
    assert "issued 1.00 µs before" in copy
    assert any("<b>encode</b>" in card and "after op 3" in card for card in cards)


def test_long_spans_can_be_touched_along_their_length():
    points = timeline(trace()).data[-1]
    cards = list(points.text)
    assert cards.count(next(card for card in cards if "host asleep" in card)) > 3


def test_names_are_escaped():
    figure = timeline(trace(name=EVIL, device=EVIL), title=EVIL)
    assert "<img" not in "".join([*figure.data[-1].text, *annotations(figure), figure.layout.title.text])
    assert "&lt;img" in annotations(figure)[0]


def test_the_bound_is_where_the_busiest_lane_would_end():
    figure = timeline(trace(), bound=True)
    assert figure.layout.shapes[0].x0 == 10.0  # two kernels that overlap: 8 to 18
    assert "GPU alone needs 10.0 µs" in annotations(figure)[1]


def test_two_traces_lie_on_one_scale_each_with_its_stamp():
    slower = trace(scale=1500)
    figure = timeline([trace(), slower])
    assert len(figure.layout.yaxis.ticktext) == 6
    assert len(annotations(figure)) == 2
    assert len(bars(figure, "kernel")) == 4
    assert figure.layout.xaxis.range[1] == pytest.approx(30 * 1.01)


def test_a_long_run_can_be_cut_to_its_end():
    figure = timeline(trace(), last_ns=3000)
    assert [(a, b) for a, b, _, _ in bars(figure, "kernel")] == [(12, 18)]
    assert figure.layout.xaxis.range[0] == 12


def test_ten_thousand_spans_are_eight_plotly_traces():
    spans = [Span(i, "kernel", "k", "gpu", 0, 0, 0, 10 * i, 10 * i + 9) for i in range(10_000)]
    figure = timeline(Trace.from_spans(spans, "simulated", "x"))
    assert len(figure.data) == 9
    assert figure.data[list(COLOURS).index("kernel")].x.dtype == np.float32
    assert len(figure.data[-1].text) == MOST_CARDS
    assert not figure.layout.shapes


def test_where_cards_are_scarce_the_longest_spans_have_them(monkeypatch):
    monkeypatch.setattr("heterolab.view.timeline.MOST_CARDS", 1)
    assert {card.partition(" ·")[0] for card in timeline(trace()).data[-1].text} == {"<b>encode</b>"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_kernels_that_run_at_once_never_share_a_strip(times):
    spans = [Span(i, "kernel", "k", "gpu", i, 0, s, s, s + d) for i, (s, d) in enumerate(times)]
    drawn = bars(timeline(Trace.from_spans(spans, "simulated", "x")), "kernel")
    for i, (a, b, low, high) in enumerate(drawn):
        for c, d, other_low, other_high in drawn[:i]:
            at_once = a < d - 1e-6 and c < b - 1e-6
            assert not at_once or high <= other_low + 1e-6 or other_high <= low + 1e-6


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_holds_all_it_needs_and_shows_texts_as_text(tmp_path):
    page = save_html(run(trace(name=EVIL), question=EVIL, answer=EVIL), tmp_path / "t.html", title=EVIL)
    parser = Tags()
    html = page.read_text(encoding="utf-8")
    parser.feed(html)
    assert not [tag for tag, attrs in parser.tags if tag == "img" or "onerror" in attrs]
    assert not [
        attrs
        for tag, attrs in parser.tags
        if tag in ("script", "link") and ("src" in attrs or "href" in attrs)
    ]
    assert parser.text.count(EVIL) >= 5
    assert "throughput" in parser.text
    assert any(attrs.get("role") == "img" and "2 requests" in attrs["aria-label"] for _, attrs in parser.tags)


def test_the_page_of_a_trace_has_no_requests(tmp_path):
    assert "<h2>Requests" not in save_html(trace(), tmp_path / "t.html").read_text(encoding="utf-8")
    assert "<h2>Requests" in save_html(run(), tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_page_of_very_many_requests_says_how_many_it_left_out(tmp_path):
    one = run()
    many = Run(
        one.settings,
        {i: replace(one.answers[0], id=i) for i in range(600)},
        dict.fromkeys(range(600), one.timings[0]),
        one.trace,
    )
    assert "and 100 more" in save_html(many, tmp_path / "t.html").read_text(encoding="utf-8")


def test_a_kind_and_a_lane_that_are_unknown_are_drawn_under_their_own_names():
    spans = [*trace(), Span(99, "zzz", "odd", "npu", 0, 0, 0, 0, 5000)]
    odd = Trace.from_spans(spans, "simulated", "a GPU on paper")
    figure = timeline(odd, lanes="all", bound=True)
    drawn = figure.data[list(COLOURS).index("other")]
    assert drawn.showlegend
    assert max(drawn.x[:4]) == 5
    assert any("zzz" in card for card in figure.data[-1].text)
    assert "npu" in figure.layout.yaxis.ticktext
    assert COLOURS["other"] in svg(odd)
