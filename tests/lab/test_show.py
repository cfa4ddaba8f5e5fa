"""What cells end in: stable text with or without a front end, tables, recordings, report rows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest

import heterolab as hl
from heterolab.device.base import Device
from heterolab.errors import InputError, TraceError
from heterolab.lab import Table, curve, decide, recordings, replay, report, show, streams, streams_panel
from heterolab.pipeline.kernels import rounds
from heterolab.trace.trace import Trace


@pytest.fixture(scope="module")
def job() -> streams.Job:
    return streams.job(hl.open_device("sim:h200"), rounds(500), mib=4)


@pytest.fixture(scope="module")
def trace(job: streams.Job) -> Trace:
    return streams.timed(job.d.device, streams.in_chunks, job, 4, job.d.device.streams(4))


def test_a_timeline_reads_as_text_and_as_a_still_picture(trace: Trace) -> None:
    shown = show(trace, "four chunks")
    bundle = shown._repr_mimebundle_()
    assert bundle["text/plain"] == repr(shown)
    assert repr(shown).startswith("[figure] four chunks: simulated · NVIDIA H200")
    assert "GPU" in repr(shown)
    assert bundle["image/svg+xml"].startswith("<svg")
    assert repr(show(trace, "four chunks")) == repr(shown)


def test_two_timelines_are_both_told(trace: Trace) -> None:
    assert repr(show([trace, trace], "twice")).count("simulated · NVIDIA H200") == 2


def test_any_figure_can_be_shown() -> None:
    assert repr(show(go.Figure(), "a figure")) == "[figure] a figure"


def test_a_curve_tells_its_points() -> None:
    shown = curve({"a": {1: 1.0, 2: 1.5}, "limit": {1: 3.0, 2: 3.0}}, x="n", y="y", title="t", dashed="limit")
    assert repr(shown) == "[figure] t. a: 1 → 1.00, 2 → 1.50; limit: 1 → 3.00, 2 → 3.00"
    assert shown.figure.data[1].line.dash == "dash"


def test_a_table_is_aligned() -> None:
    assert repr(Table(["name", "ms"], [("a", 1.234), ("long name", 12)])).splitlines() == [
        "name         ms",
        "---------------",
        "a          1.23",
        "long name    12",
    ]
    assert repr(Table(["empty"], [])).splitlines()[0] == "empty"


# -- lab 03's panel ------------------------------------------------------------------------------


def test_the_streams_panel_shows_speed_up_and_bound(job: streams.Job) -> None:
    panel = streams_panel(job.d.device, job)
    assert panel.speed_up == pytest.approx(1, abs=0.02)
    panel.set(chunks=4, streams=4)
    assert 1.2 < panel.speed_up <= 2.05
    assert "at most × 2.00" in repr(panel)
    assert f"× {panel.speed_up:.2f}" in panel._repr_mimebundle_()["text/plain"]
    panel.set(memory="pageable")
    assert panel.speed_up < 1


# -- jobs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, -1, 2.0, True, 10**9])
def test_a_job_is_cut_into_a_whole_number_of_chunks(job: streams.Job, chunks: object) -> None:
    with pytest.raises(InputError, match="whole number of chunks"):
        job.parts(chunks)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [1, 3, 7, 256])
def test_parts_cover_the_job_once(job: streams.Job, chunks: int) -> None:
    parts = job.parts(chunks)
    assert len(parts) == chunks
    assert parts[0].start == 0
    assert parts[-1].stop == len(job.d)
    assert all(a.stop == b.start for a, b in pairwise(parts))


def test_a_result_is_right_only_while_it_is_all_there(job: streams.Job) -> None:
    streams.timed(job.d.device, streams.serial, job)
    assert job.right()
    job.h_out.write()[-1] += 1
    assert job.first_wrong() == len(job.d) - 1
    job.clear()
    assert job.first_wrong() == 0


# -- recordings and the report ---------------------------------------------------------------------


def test_a_recording_is_shown_as_replayed(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recordings").mkdir()
    trace.save(tmp_path / "recordings" / "here.json.gz")
    monkeypatch.chdir(tmp_path)
    assert "replayed, simulated · NVIDIA H200" in repr(replay("here", "recorded"))
    assert repr(replay("here", "both", beside=trace)).count("NVIDIA H200") == 2
    assert "No recording called nothing" in repr(replay("nothing"))


def test_a_damaged_recording_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recordings").mkdir()
    (tmp_path / "recordings" / "bad.json.gz").write_bytes(b"{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match=r"bad\.json\.gz"):
        replay("bad")


def test_all_recordings_that_are_here_can_be_loaded() -> None:
    place = recordings.folder()
    assert place is not None
    for path in place.glob("0*.json.gz"):
        trace = Trace.load(path)
        assert trace.replayed
        assert trace.source != "simulated", f"{path.name} was not recorded on real hardware"


def test_a_decision_becomes_a_row_with_its_card(trace: Trace) -> None:
    row = decide("99", "measure first", trace)
    assert "measure first" in repr(row)
    assert "link" in repr(row)
    assert "no decision yet" in repr(decide("98", "…", trace))
    assert [r.lab for r in report.rows()][-2:] == ["98", "99"]


def test_a_row_that_does_not_fit_its_head_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(1, 2\) has 2 cells, the head 1"):
        Table(["a"], [(1, 2)])


def test_lab_03s_panel_lays_simulation_over_recording_and_predicts_a_real_run(cpu_device: Device) -> None:
    dev = hl.open_device("sim:h200")
    panel = streams_panel(dev, streams.job(dev, rounds(8), mib=64)).panel
    panel.set(chunks=8, streams=4, memory="pinned")
    comparison = panel.compare()
    assert comparison.found.measured.replayed
    assert not comparison.found.only_measured
    panel.set(memory="pageable")
    assert panel.comparison is None
    assert "pinned memory on four streams" in panel._switch.words.value

    real = streams_panel(cpu_device, streams.job(cpu_device, rounds(1), mib=1)).panel
    cpu_device.name = hl.DeviceProfile.load("cpu").name
    found = real.compare().found
    assert (found.measured.source, found.predicted.source) == ("cpu-clock", "simulated")
