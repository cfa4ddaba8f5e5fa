"""A notebook with panels and no browser: strict nbval passes with no sanitizer, and never waits."""

import subprocess
import sys

CELLS = (
    """
import heterolab as hl
from heterolab.trace.trace import Span, Trace

def job(batch):
    starts = range(0, 5000 * batch, 1000 * batch)
    spans = [Span(i, "kernel", "k", "gpu", 0, 0, 0, s, s + 900) for i, s in enumerate(starts)]
    return Trace.from_spans(spans, "simulated", "a GPU on paper")
""",
    'panel = hl.Panel(job, knobs={"batch": [1, 2, 4]})\npanel',
    "panel.set(batch=4)",
    "hl.describe(panel.last)",
    'hl.Panel(job, knobs={"batch": (1, 4)}, live=lambda batch: None)',
)


def test_panels_pass_strict_nbval(need, tmp_path):
    for module in ("nbval", "nbclient", "ipykernel"):
        need(module)
    import nbclient
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell.strip()) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3", store_widget_state=False).execute()
    outputs = [cell.outputs[0]["data"] for cell in notebook.cells[1:]]
    assert outputs[0]["text/plain"] == "<Panel batch=1; simulated · a GPU on paper>"
    assert outputs[1]["text/plain"] == "<Panel batch=4; simulated · a GPU on paper>"
    assert "<svg" in outputs[1]["image/svg+xml"]
    assert outputs[3]["text/plain"] == "<Panel batch=1>"
    path = tmp_path / "panels.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "5 passed" in done.stdout
