"""Lab 05 as a student has it: opened in JupyterLab, run, its batch slider moved."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

LAB = Path(__file__).parent.parent.parent / "labs" / "05_the_whole_pipeline.ipynb"
_X = "plot => plot.data.map(trace => Array.from(trace.x?._inputArray ?? trace.x ?? []))"


def test_lab_05_runs_and_its_batch_slider_changes_picture_and_numbers(lab_page, monkeypatch) -> None:
    monkeypatch.setenv("HETEROLAB_DEVICE", "sim:h200")
    lab = lab_page(LAB)
    lab.run_all()
    panel = lab.page.locator(".jp-OutputArea", has=lab.page.locator(".noUi-handle")).first
    panel.scroll_into_view_if_needed()
    batch = panel.locator(".widget-hslider", has_text="batch").locator(".noUi-handle")
    plot, table = panel.locator(".js-plotly-plot").first, panel.locator("table.heterolab").first
    lab.until(lambda: plot.count() and plot.evaluate(_X), "the panel drew no timeline")
    before, figures = plot.evaluate(_X), table.inner_text()
    assert "simulated" in panel.inner_text()

    batch.focus()
    batch.press("ArrowLeft")

    lab.until(lambda: plot.evaluate(_X) != before, "the timeline did not change")
    lab.until(lambda: table.inner_text() != figures, "the numbers did not change")
