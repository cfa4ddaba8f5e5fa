"""The panel in a real browser: a knob moved by keyboard, a live run started and stopped."""

import nbformat
import pytest

pytestmark = pytest.mark.browser

SIMULATED = """
import heterolab as hl
dev = hl.open_device("sim:h200")
load = hl.closed_loop(n=64, in_flight=64, seed=0)
enc = hl.models.encoder()
hl.pipeline_panel(enc, load, on=dev, knobs={"batch": [1, 2, 4, 8, 16], "memory": ["pageable", "pinned"]})
"""
COMPARED = """
import heterolab as hl
from heterolab.workload import questions
dev = hl.open_device("sim:h200")
load = hl.closed_loop(n=128, in_flight=128, texts=questions()[:32])
enc = hl.models.encoder()
hl.pipeline_panel(enc, load, on=dev, knobs={"batch": [8, 32]}, batch=32, chunk=32)
"""
LIVE = """
import heterolab as hl
dev = hl.open_device("cpu")
load = hl.poisson(rate=50, n=5000, seed=0)
enc = hl.models.encoder()
hl.pipeline_panel(enc, load, on=dev, knobs={"batch": [1, 2, 4, 8]})
"""


@pytest.fixture
def notebook(tmp_path):
    def make(*cells):
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in cells])
        made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = tmp_path / "panel.ipynb"
        nbformat.write(made, path)
        return path

    return make


def numbers(lab):
    return lab.text("table.heterolab")


def test_a_knob_moved_by_keyboard_changes_picture_and_numbers(lab_page, notebook):
    lab = lab_page(notebook(SIMULATED))
    lab.run_all()
    before = lab.until(lambda: lab.plot() and lab.plot()["paths"] and lab.plot(), "no timeline was drawn")
    assert any("simulated" in note for note in before["notes"])
    figures = numbers(lab)
    assert "requests/s" in figures

    handle = lab.page.locator(".noUi-handle").first
    handle.focus()
    handle.press("ArrowRight")

    lab.until(lambda: lab.plot()["x"] != before["x"], "the timeline did not change")
    lab.until(lambda: numbers(lab) != figures, "the numbers did not change")
    assert "batch=16" in lab.text("code >> text=hl.Pipeline")


def test_the_switch_lays_the_prediction_over_a_recording(lab_page, notebook):
    lab = lab_page(notebook(COMPARED))
    lab.run_all()
    before = lab.until(lambda: lab.plot() and lab.plot()["paths"] and lab.plot(), "no timeline was drawn")
    switch = lab.page.get_by_role("checkbox")
    switch.press("Space")
    compared = lab.until(
        lambda: lab.plot() and any("hatched" in note for note in lab.plot()["notes"]) and lab.plot(),
        "the switch did not change the picture",
    )
    assert compared["x"] != before["x"]
    assert any("replayed, measured" in note for note in compared["notes"])
    assert "Wall time: measured" in lab.page.locator(".gtitle").first.text_content()
    lab.until(lambda: "Ops that differ most" in lab.page.content(), "no errors were printed")
    switch.press("Space")
    lab.until(lambda: lab.plot() and lab.plot()["notes"] == before["notes"], "the timeline did not return")


def test_a_live_run_is_watched_and_stopped(lab_page, notebook):
    lab = lab_page(notebook(LIVE))
    lab.run_all()
    lab.page.get_by_role("button", name="Run", exact=True).last.click()
    first = lab.until(lambda: lab.plot() and lab.plot()["paths"] and lab.plot(), "nothing was drawn live")
    assert any("measured (CPU)" in note for note in first["notes"])
    lab.until(lambda: lab.plot()["x"] != first["x"], "the live timeline stands still")
    lab.page.get_by_role("button", name="Stop", exact=True).last.click()
    status = lab.page.locator("span[role=status]")
    lab.until(lambda: "Stopped" in status.first.inner_text(), "the run did not stop")
    assert lab.page.get_by_role("button", name="Run", exact=True).last.is_enabled()
