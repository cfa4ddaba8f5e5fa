"""The notebooks run: solutions as stored, students' copies with failing checks, all within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lab_files import LABS, SOLUTIONS, STUDENT

#: A cell's longest time on the simulator, and the memory of the whole process tree.
CELL_S, TREE_BYTES = 10, 2 * 2**30

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


class MemoryWatch:
    """Samples the resident memory of this process's children while a block runs."""

    def __init__(self) -> None:
        self.psutil = pytest.importorskip("psutil", reason="needs psutil (pip install '.[test]')")
        self.most, self._ended = 0, threading.Event()

    def __enter__(self) -> MemoryWatch:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        me = self.psutil.Process()
        while not self._ended.wait(0.1):
            total = 0
            for child in me.children(recursive=True):
                try:
                    total += child.memory_info().rss
                except self.psutil.NoSuchProcess:
                    continue
            self.most = max(self.most, total)


def execute(path: Path) -> Any:
    """Run a notebook as nbval and graders do: no front end, a fresh kernel."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient (pip install '.[test]')")
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    return book


def code_cells(book: Any) -> Iterator[Any]:
    return (cell for cell in book.cells if cell.cell_type == "code")


def seconds(cell: Any) -> float:
    times = cell.metadata["execution"]
    start, end = (times[key] for key in ("iopub.status.busy", "shell.execute_reply"))
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


@pytest.mark.parametrize("path", SOLUTIONS, ids=lambda path: path.stem[:2])
def test_solutions_give_what_is_stored(
    path: Path, build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("HETEROLAB_DEVICE", "sim:h200")
    with MemoryWatch() as memory:
        ran = execute(path)
    stored = nbformat.read(path, as_version=4)
    for now, before in zip(code_cells(ran), code_cells(stored), strict=True):
        got = [build.text_only(output, now.id) for output in now.outputs]
        assert got == before.outputs, now.id
        assert seconds(now) < CELL_S, f"{now.id} took {seconds(now):.1f} s"
    assert 0 < memory.most < TREE_BYTES, f"{memory.most / 2**30:.2f} GiB"


@pytest.mark.parametrize("path", STUDENT, ids=lambda path: path.stem[:2])
def test_a_students_copy_runs_and_fails_every_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Untouched, it raises nowhere, no check passes, and nothing is predicted."""
    monkeypatch.setenv("HETEROLAB_DEVICE", "sim:h200")
    verdicts = []
    for cell in code_cells(execute(path)):
        shown = "".join(o.data.get("text/plain", "") for o in cell.outputs if "data" in o)
        assert cell.outputs, f"{cell.id} shows nothing"
        if "lab.check(" in cell.source:
            verdicts.append(shown.split(" ·")[0])
        if "lab.predict(" in cell.source:
            assert "Not locked yet" in shown
    assert verdicts == ["✗ not yet"] * len(verdicts)
    assert len(verdicts) >= 2


def test_the_lab_folder_is_found_from_both_kinds_of_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    from heterolab.lab.recordings import folder

    for place in (LABS, LABS / "solutions"):
        monkeypatch.chdir(place)
        assert folder() is not None
