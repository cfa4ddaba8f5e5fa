"""The small charts: the right points, and the stamp on each."""

import pytest
from made_by_hand import EVIL, run, trace

from heterolab.errors import InputError
from heterolab.view import charts


def test_throughput_against_latency_has_a_labelled_point_a_setting():
    figure = charts.throughput_and_latency({1: run(), 2: run(trace(scale=2000))}, knob="batch")
    assert list(figure.data[0].text) == ["batch=1", "batch=2"]
    assert list(figure.data[0].x) == [0.017, 0.017]
    assert list(figure.data[0].y) == [100_000, 100_000]
    assert "simulated · a GPU on paper" in figure.layout.title.text


def test_batch_sizes_stand_beside_the_limit():
    figure = charts.batch_size_histogram(run(), limit=4)
    assert list(figure.data[0].x) == [1, 2, 3, 4]
    assert list(figure.data[0].y) == [2, 0, 0, 0]
    assert figure.layout.annotations[0].text == "limit 4"


def test_latencies_with_percentiles_that_rest_on_too_few():
    figure = charts.latency_histogram(run(), qs=(50, 99))
    assert list(figure.data[0].x) == [0.015, 0.019]
    assert [note.text for note in figure.layout.annotations] == [
        "p50: 15.0 µs (too few samples)",
        "p99: 19.0 µs (too few samples)",
    ]


def test_balance_cards_side_by_side():
    figure = charts.balance_bars({"here": run(), EVIL: trace(device="another")})
    assert [bar.name for bar in figure.data] == ["CPU", "link", "GPU"]
    assert list(figure.data[2].y) == [0.005, 0.01]
    assert "<img" not in figure.to_json()
    assert "a GPU on paper + simulated · another" in figure.layout.title.text


def test_a_chart_of_nothing_is_refused():
    with pytest.raises(InputError, match="at least one run"):
        charts.balance_bars({})
