"""Build the notebooks: labs/src/NN_topic.py → labs/NN_topic.ipynb and labs/solutions/NN_topic.ipynb.

    python labs/build.py [NN ...] [--check]

A source is a percent-format script (jupytext reads it). Every cell has a ``name``, from which its
id is made, so that a translation can find it again. What the build does with a cell:

* ``### BEGIN SOLUTION`` … ``### END SOLUTION``: kept, without the markers, in the solution. The
  student gets a gap instead, or the commented lines that follow ``### STUDENT`` in it.
* ``### BEGIN HIDDEN TESTS`` … ``### END HIDDEN TESTS``: in the solution only.
* ``build=true``: a code cell that is run here and appears nowhere. It defines ``numbers`` (what
  fills ``{{name}}`` in the prose) and ``provenance`` (where they come from).
* ``part="core"|"stretch"|"home" minutes=N`` on a heading: shown under it.

The files are canonical: the same source gives the same bytes. Student notebooks hold no outputs.
Solutions hold the text of their outputs as the simulated H200 gives them, for a strict nbval.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

LABS = Path(__file__).parent
DEVICE = "sim:h200"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
#: What is kept of a cell's output: its text, and a still picture.
KEPT = ("text/plain", "image/svg+xml")
PARTS = ("core", "stretch", "home")

_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n(.*?)^[ \t]*### END SOLUTION\n?", re.M | re.S)
_HIDDEN = re.compile(r"^[ \t]*### BEGIN HIDDEN TESTS\n.*?^[ \t]*### END HIDDEN TESTS\n?", re.M | re.S)
_STUDENT = re.compile(r"^[ \t]*### STUDENT\n", re.M)
_MARKER = re.compile(r"^[ \t]*### (BEGIN|END) (SOLUTION|HIDDEN TESTS)\n?", re.M)
_NUMBER = re.compile(r"\{\{(\w+)\}\}")


class BuildError(Exception):
    """A source breaks a rule; the message names the cell."""


def sources(only: list[str] | None = None) -> Iterator[Path]:
    """The labs' sources, in order; `only` those whose names begin so."""
    for path in sorted((LABS / "src").glob("[0-9]*.py")):
        if not only or any(path.name.startswith(prefix) for prefix in only):
            yield path


def outputs_of(source: Path) -> tuple[Path, Path]:
    """Where the student's and the solution notebook of a source lie."""
    return LABS / f"{source.stem}.ipynb", LABS / "solutions" / f"{source.stem}.ipynb"


def student_text(source: str) -> str:
    """The cell with its solutions cut out, and a gap in the place of each."""

    def gap(match: re.Match[str]) -> str:
        indent, body = match.groups()
        parts = _STUDENT.split(body)
        if len(parts) == 2:
            if bad := [line for line in parts[1].splitlines() if not line.startswith(f"{indent}#")]:
                raise BuildError(f"after ### STUDENT, {bad[0]!r} must begin with {indent + '# '!r}.")
            return re.sub(rf"^{indent}# ?", indent, parts[1], flags=re.M)
        return f"{indent}...  # your code here\n"

    return _HIDDEN.sub("", _SOLUTION.sub(gap, source + "\n")).rstrip("\n")


def solution_text(source: str) -> str:
    """The cell with its solutions, without markers and without the student's text."""

    def kept(match: re.Match[str]) -> str:
        return _STUDENT.split(match.group(2))[0]

    return _MARKER.sub("", _SOLUTION.sub(kept, source + "\n")).rstrip("\n")


def fill(prose: str, numbers: dict[str, str], where: str) -> str:
    """`prose` with its ``{{name}}`` placeholders filled."""

    def value(match: re.Match[str]) -> str:
        if match.group(1) not in numbers:
            raise BuildError(f"{where}: the number {match.group(0)} is not defined by a build cell.")
        return str(numbers[match.group(1)])

    return _NUMBER.sub(value, prose)


def build(source: Path) -> tuple[Any, Any]:
    """The student's notebook and the solution's, the latter not yet run."""
    cells = jupytext.read(source, fmt="py:percent").cells
    numbers = run_build_cells(source, cells)
    student, solution = nbformat.v4.new_notebook(), nbformat.v4.new_notebook()
    names: set[str] = set()
    for cell in cells:
        if cell.metadata.get("build"):
            continue
        name = cell.metadata.get("name")
        where = f"{source.name}, cell {name or cell.source[:40]!r}"
        if not name or name in names:
            raise BuildError(f"{where}: every cell needs a name of its own.")
        names.add(name)
        for notebook, cut in ((student, student_text), (solution, solution_text)):
            notebook.cells.append(make_cell(source.stem[:2], name, cell, cut, numbers, where))
    for notebook in (student, solution):
        notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return student, solution


def make_cell(lab: str, name: str, cell: Any, cut: Any, numbers: dict[str, str], where: str) -> Any:
    """One cell of a notebook: text as the reader is to see it, and a stable id."""
    metadata = {key: cell.metadata[key] for key in ("part", "minutes") if key in cell.metadata}
    if cell.cell_type == "markdown":
        prose = fill(cell.source, numbers, where)
        if "part" in metadata:
            if metadata["part"] not in PARTS or not isinstance(metadata.get("minutes"), int):
                raise BuildError(f'{where}: a section needs part="core", "stretch" or "home", and minutes=N.')
            heading, _, rest = prose.partition("\n")
            prose = f"{heading}\n*{metadata['part']} · {metadata['minutes']} minutes*\n{rest}".rstrip("\n")
        made = nbformat.v4.new_markdown_cell(prose, metadata=metadata)
    else:
        made = nbformat.v4.new_code_cell(cut(cell.source), metadata=metadata)
    made.id = f"lab{lab}-{name}"
    return made


def run_build_cells(source: Path, cells: list[Any]) -> dict[str, str]:
    """The numbers of the prose, from the source's build cells."""
    scope: dict[str, Any] = {"DEVICE": DEVICE, "RECORDINGS": LABS / "recordings"}
    for cell in cells:
        if cell.metadata.get("build"):
            exec(compile(cell.source, str(source), "exec"), scope)
    numbers = dict(scope.get("numbers", {}))
    if numbers:
        numbers["provenance"] = scope["provenance"]
    return numbers


def run(notebook: Any) -> Any:
    """Execute on the simulator, and keep the text of the outputs only."""
    from nbclient import NotebookClient

    before = os.environ.get("HETEROLAB_DEVICE")
    os.environ["HETEROLAB_DEVICE"] = DEVICE
    try:
        client = NotebookClient(
            notebook, timeout=120, kernel_name="python3", record_timing=False, resources=at(LABS)
        )
        client.execute()
    finally:
        os.environ.pop("HETEROLAB_DEVICE")
        if before is not None:
            os.environ["HETEROLAB_DEVICE"] = before
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [text_only(output, cell.id) for output in cell.outputs]
    return notebook


def at(folder: Path) -> dict[str, Any]:
    """Where a notebook runs."""
    return {"metadata": {"path": str(folder)}}


def text_only(output: Any, where: str) -> Any:
    """An output without what differs from run to run: widgets' ids, live figures."""
    if output.output_type == "stream":
        if output.name == "stderr":
            raise BuildError(f"{where}: wrote to stderr: {output.text[:400]}")
        return output
    if output.output_type == "error":
        raise BuildError(f"{where}: raised {output.ename}: {output.evalue}")
    output.data = {kind: output.data[kind] for kind in KEPT if kind in output.data}
    output.metadata = {}
    return output


def dumps(notebook: Any) -> str:
    """Canonical text of a notebook."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    plain = nbformat.v4.rwbase.split_lines(nbformat.from_dict(json.loads(json.dumps(notebook))))
    return json.dumps(plain, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def without_outputs(text: str) -> Any:
    """A notebook's JSON without outputs and execution counts, for comparison."""
    data = json.loads(text)
    for cell in data["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    return data


def stale(source: Path) -> list[str]:
    """Names of the built files that do not fit their source. Outputs are nbval's business."""
    found = []
    for path, notebook in zip(outputs_of(source), build(source), strict=True):
        text = path.read_text(encoding="utf-8") if path.exists() else "{}"
        wanted = dumps(notebook)
        same = text == wanted if path.parent == LABS else text != "{}" and _alike(text, wanted)
        if not same:
            found.append(str(path.relative_to(LABS.parent)))
    return found


def _alike(text: str, wanted: str) -> bool:
    return bool(without_outputs(text) == without_outputs(wanted))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the labs' notebooks from labs/src.")
    parser.add_argument("labs", nargs="*", help="numbers of the labs to build, e.g. 03; all by default")
    parser.add_argument("--check", action="store_true", help="build nothing; exit 1 if a built file is stale")
    options = parser.parse_args(argv)
    old: list[str] = []
    for source in sources(options.labs):
        if options.check:
            old += stale(source)
            continue
        student, solution = build(source)
        for path, notebook in zip(outputs_of(source), (student, run(solution)), strict=True):
            path.parent.mkdir(exist_ok=True)
            path.write_text(dumps(notebook), encoding="utf-8")
            print(path.relative_to(LABS.parent))
    for path in old:
        print(f"{path} is stale: run python labs/build.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
