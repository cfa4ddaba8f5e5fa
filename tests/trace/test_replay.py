"""A recorded trace of any device opens in every view, and says that it is replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import heterolab as hl
from heterolab.errors import InputError
from heterolab.trace.compare import ops
from heterolab.trace.trace import Span, Trace
from heterolab.view.charts import balance_bars
from heterolab.view.compared import compare
from heterolab.view.still import svg
from heterolab.view.timeline import save_html, timeline

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
TIMES = st.integers(-(10**12), 10**12)
KINDS = st.sampled_from(["cpu", "api", "sync", "wait", "h2d", "d2h", "kernel", "memset", ""])
LANES = st.sampled_from(["host", "worker 0", "worker 11", "h2d", "d2h", "gpu", "npu", "<b>", ""])


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(TIMES)
    return Span(
        draw(st.integers(-3, 40)),
        draw(KINDS),
        draw(TEXTS),
        draw(LANES),
        draw(st.integers(-2, 5)),
        draw(st.integers(-1, 3)),
        draw(TIMES),
        start,
        start + draw(st.integers(0, 10**9)),
        draw(st.integers(0, 2**40)),
        draw(st.integers(-1, 4)),
        draw(st.integers(-1, 40)),
    )


SOURCES = st.sampled_from(["simulated", "cuda-events", "cupti", "cpu-clock", "another"])


def made(found: list[Span], source: str, device: str) -> Trace:
    """A trace with these spans, whatever their numbers are."""
    return Trace.from_spans(found, source, device, first_op=-(10**9), origin_ns=0)


@settings(max_examples=60, deadline=None)
@given(st.lists(spans(), max_size=12), SOURCES, TEXTS, st.booleans())
def test_saved_and_loaded_it_has_the_same_spans_and_is_stamped_replayed(
    tmp_path_factory: pytest.TempPathFactory, found: list[Span], source: str, device: str, zipped: bool
) -> None:
    trace = made(found, source, device)
    path = tmp_path_factory.mktemp("replay") / ("run.json.gz" if zipped else "run.json")
    loaded = Trace.load(trace.save(path))
    assert list(loaded) == list(trace)
    assert loaded.stamp == f"replayed, {trace.stamp}"
    again = Trace.load(loaded.save(path))
    assert list(again) == list(trace)
    assert again.stamp == loaded.stamp, "replayed once, not twice"


@settings(max_examples=40, deadline=None)
@given(st.lists(spans(), max_size=10), SOURCES, st.sampled_from(["three", "all"]))
def test_every_view_opens_whatever_a_file_holds(
    tmp_path_factory: pytest.TempPathFactory, found: list[Span], source: str, lanes: str
) -> None:
    loaded = Trace.load(made(found, source, "a device").save(tmp_path_factory.mktemp("replay") / "run.json"))
    assert "replayed" in hl.describe(loaded).sentences[0] or not loaded.wall_ns
    assert "replayed" in timeline(loaded, lanes=lanes, bound=True).layout.annotations[0].text  # type: ignore[arg-type]
    assert "replayed" in svg(loaded)
    assert "replayed" in balance_bars({"it": loaded}).layout.title.text
    hl.metrics.gpu_idle_by_cause(loaded)
    if not ops(loaded.where(loaded["op"] >= 0)):
        with pytest.raises(InputError, match="no op in common"):
            compare(loaded, loaded)
        return
    comparison = compare(loaded, loaded)
    assert comparison.found.wall_error in (0, None)
    assert "replayed" in comparison.figure(lanes=lanes).layout.annotations[0].text  # type: ignore[arg-type]


def test_a_simulated_run_and_its_recording_are_the_same_in_every_view(tmp_path: Path) -> None:
    run = hl.Pipeline(hl.models.encoder(), batch=4).run(
        hl.poisson(rate=300, n=12, seed=0), on=hl.open_device("sim:t4")
    )
    loaded = Trace.load(run.trace.save(tmp_path / "run.json.gz"))
    for name, column in loaded.columns.items():
        assert np.array_equal(column, run.trace[name])
    assert hl.metrics.gpu_idle_by_cause(loaded) == hl.metrics.gpu_idle_by_cause(run.trace)
    stamp = "replayed, simulated · NVIDIA T4 (datasheet estimate)"
    assert loaded.stamp == stamp
    for mine, fresh in zip(timeline(loaded).data, timeline(run.trace).data, strict=True):
        assert np.array_equal(mine.x, fresh.x, equal_nan=True)
        assert np.array_equal(mine.y, fresh.y, equal_nan=True)
    assert stamp in timeline(loaded).layout.annotations[0].text
    assert hl.compare(loaded, run).wall_error == 0
    assert hl.compare(loaded, run).throughput_error == pytest.approx(0, abs=1e-3)
    page = save_html(loaded, tmp_path / "run.html").read_text(encoding="utf-8")
    assert stamp in page


@pytest.mark.parametrize("name", ["03-chunks-8", "05-ids-pinned", "05-images_float32-pageable"])
def test_the_recordings_of_a_gpu_open_in_every_view(name: str) -> None:
    recorded = hl.lab.recording(name)
    assert recorded.stamp.startswith("replayed, measured")
    assert "NVIDIA" in recorded.stamp
    assert recorded.stamp in timeline(recorded).layout.annotations[0].text
    assert "replayed" in repr(hl.lab.show(recorded))
    assert compare(recorded, replace(recorded, source="simulated")).wall_error == 0
