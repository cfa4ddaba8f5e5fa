"""Prediction over measurement: the words, the tables and the picture."""

from dataclasses import replace

import numpy as np
import pytest
from made_by_hand import EVIL, run, trace

import heterolab as hl
from heterolab.trace.trace import Trace
from heterolab.view.colours import COLOURS
from heterolab.view.compared import compare


def measured(scale=1000, **options):
    return replace(trace(scale, **options), source="cupti")


def drawn(figure, kind, predicted):
    """(start, end, middle) of the bars of a kind, measured or predicted."""
    scatter = figure.data[2 * list(COLOURS).index(kind) + predicted]
    x, y = np.asarray(scatter.x).reshape(-1, 6), np.asarray(scatter.y).reshape(-1, 6)
    return [(a[0], a[2], (b[0] + b[1]) / 2) for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def lettering(figure):
    return " ".join(note.text for note in figure.layout.annotations)


def test_it_is_the_public_compare():
    assert hl.compare is compare


def test_the_words_tell_stamps_walls_lanes_worst_ops_and_order():
    told = str(compare(measured(), trace(scale=1100)))
    assert "measured: measured (CUPTI) · a GPU on paper" in told
    assert "predicted: simulated · a GPU on paper" in told
    assert "wall time" in told
    assert "20.0 µs    22.0 µs  +10.0 %" in told
    assert "GPU: at work" in told
    assert "Ops that differ most" in told
    assert "encode (kernel), batch 0" in told
    assert "in the same order" in told
    assert str(compare(measured(), trace(scale=1100))) == told


def test_runs_tell_the_error_of_their_throughput():
    comparison = compare(run(measured()), run(trace()))
    assert comparison.throughput_error == 0
    assert any(row[0] == "requests a second" for row in comparison.rows)


def test_the_upper_row_is_measured_and_the_lower_predicted_on_one_scale():
    figure = compare(measured(), trace(scale=1500)).figure()
    assert figure.layout.yaxis.ticktext[:2] == ("CPU, measured", "predicted, +50.0 %")
    assert len(figure.layout.yaxis.ticktext) == 6
    for (start, end, y), (later, latest, below) in zip(
        drawn(figure, "kernel", 0), drawn(figure, "kernel", 1), strict=True
    ):
        assert (later, latest) == pytest.approx((1.5 * start, 1.5 * end))
        assert 0.5 < y - below < 1.5
    ticks = figure.layout.yaxis.tickvals
    assert ticks == tuple(sorted(ticks, reverse=True))


def test_nobody_needs_the_colours_to_tell_them_apart():
    """Upper and lower row, words on both, and hatching."""
    figure = compare(measured(), trace()).figure()
    assert all(scatter.fillpattern.shape is None for scatter in figure.data[0:-1:2])
    assert all(scatter.fillpattern.shape == "/" for scatter in figure.data[1:-1:2])


def test_both_stamps_the_error_and_the_doubts_are_on_the_picture():
    other = replace(trace(scale=500), device="another GPU")
    figure = compare(measured(), other).figure()
    assert "measured (CUPTI) · a GPU on paper" in lettering(figure)
    assert "simulated · another GPU" in lettering(figure)
    assert "two machines" in lettering(figure)
    assert "-50.0 %" in figure.layout.title.text
    assert "two machines" in figure.layout.meta["alt"]


def test_lanes_unfold_and_one_that_only_one_trace_has_is_there():
    lone = trace()
    figure = compare(measured(), lone.where(lone["lane"] != "worker 0")).figure(lanes="all")
    labels = figure.layout.yaxis.ticktext
    assert "worker 0, measured" in labels
    assert "stream 1, measured" in labels
    assert labels[labels.index("worker 0, measured") + 1] == "predicted, -100.0 %"


def test_all_such_pictures_have_the_same_plotly_traces():
    first = compare(measured(), trace()).figure()
    part = measured()
    second = compare(part.kind("kernel"), trace()).figure()
    assert [scatter.name for scatter in first.data] == [scatter.name for scatter in second.data]


def test_names_are_escaped_everywhere():
    comparison = compare(measured(name=EVIL, device=EVIL), trace(name=EVIL, device="x"))
    assert "<img" not in comparison._repr_html_()
    figure = comparison.figure()
    assert "<img" not in lettering(figure)
    assert "<img" not in "".join(figure.data[-1].text)


def test_what_only_one_has_is_counted_by_name():
    whole = trace()
    told = compare(measured(), whole.where(whole["kind"] != "d2h")).notes
    assert any("Only in the measurement: 2 × copy" in note for note in told)


def test_a_replayed_trace_is_compared_with_its_stamp(tmp_path):
    loaded = Trace.load(measured().save(tmp_path / "run.json"))
    assert "replayed, measured (CUPTI)" in str(compare(loaded, trace()))


def test_a_simulated_run_is_not_called_measured() -> None:
    pipe, load = hl.Pipeline(hl.models.encoder(), batch=4), hl.closed_loop(n=8, in_flight=8)
    said = str(hl.compare(*(pipe.run(load, on=hl.open_device("sim:h200")) for _ in range(2))))
    assert said.startswith("simulated: simulated")
    assert " measured " not in said
