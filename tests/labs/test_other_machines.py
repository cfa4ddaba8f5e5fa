"""Every lab runs on every machine that there is a profile of, one that nobody has built included.

The solutions' cells are executed here, in this process. What must happen on an H200 need not
happen elsewhere: then a check says that the machine proves nothing, and why; it does not fail.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_files import SOLUTIONS, notebook

from heterolab.device.base import Device
from heterolab.device.profile import DeviceProfile
from heterolab.lab.check import Verdict
from heterolab.lab.predict import Predictions

#: What runs each time. The rest is `slow`: a lab takes up to half a minute.
QUICK = [("05", "one_memory")]
CASES = [
    pytest.param(path, name, id=f"{path.stem[:2]}-{name}", marks=[] if quick else [pytest.mark.slow])
    for path in SOLUTIONS
    for name in DeviceProfile.names()
    if name != "h200"  # what it shows is compared word by word elsewhere
    for quick in [(path.stem[:2], name) in QUICK]
]


def run(path: Path) -> Iterator[Any]:
    """What the last line of each code cell of a notebook gives."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook(path)["cells"]:
        if cell["cell_type"] == "code":
            source, file = "".join(cell["source"]), f"<{cell['id']}>"
            linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for inspect
            tree = ast.parse(source, file)
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, file, "exec"), names)
            yield eval(compile(ast.Expression(last.value), file, "eval"), names) if last else None


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_lab_runs_on_any_machine(path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETEROLAB_DEVICE", f"sim:{name}")
    monkeypatch.setattr(sys.modules["heterolab.lab.predict"], "_mine", Predictions())
    monkeypatch.chdir(path.parent)
    shown = list(run(path))
    (dev,) = [one for one in shown if isinstance(one, Device)]
    assert DeviceProfile.load(name).provenance.kind in repr(dev)
    verdicts = [one for one in shown if isinstance(one, Verdict)]
    assert len(verdicts) >= 2
    for verdict in verdicts:
        assert verdict.state != "fail", repr(verdict)
        if verdict.state == "inconclusive":
            assert "machine" in repr(verdict), "it says why"
