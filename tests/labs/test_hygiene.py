"""What every notebook keeps to: small cells, no leftovers, the glossary, plain words."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from lab_files import LABS, SOLUTIONS, STUDENT, notebook

GLOSSARY: dict[str, dict[str, str]] = json.loads((LABS / "glossary.json").read_text(encoding="utf-8"))
ORDER = sorted({word["lab"] for word in GLOSSARY.values()})
EVERY = [pytest.param(path, id=f"{path.parent.name}-{path.stem[:2]}") for path in [*STUDENT, *SOLUTIONS]]
STUDENTS = [pytest.param(path, id=path.stem[:2]) for path in STUDENT]
#: A lab's minutes, from the course's table.
MINUTES = {"03": 35, "05": 40}


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in notebook(path)["cells"] if cell["cell_type"] == kind]


def text(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_are_labs_and_each_has_a_solution() -> None:
    assert [path.name for path in STUDENT] == [path.name for path in SOLUTIONS]
    assert len(STUDENT) >= 2


@pytest.mark.parametrize("path", EVERY)
def test_cells_are_small_and_end_in_something_to_look_at(path: Path) -> None:
    lines = []
    for cell in cells(path, "code"):
        source = text(cell)
        lines.append(sum(1 for line in source.split("\n") if line.strip()))
        assert lines[-1] <= 15, f"{cell['id']} has {lines[-1]} lines"
        assert isinstance(ast.parse(source).body[-1], ast.Expr), f"{cell['id']} ends in nothing to look at"
    assert median(lines) <= 6


@pytest.mark.parametrize("path", EVERY)
def test_no_leftovers(path: Path) -> None:
    book = notebook(path)
    assert set(book["metadata"]) == {"kernelspec", "language_info"}
    for cell in book["cells"]:
        assert re.fullmatch(r"lab\d\d-[\w-]+", cell["id"])
        assert set(cell["metadata"]) <= {"part", "minutes"}
    assert "{{" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", STUDENTS)
def test_student_notebooks_hold_neither_outputs_nor_solutions(path: Path) -> None:
    for cell in cells(path, "code"):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    whole = path.read_text(encoding="utf-8")
    assert "SOLUTION" not in whole
    assert "HIDDEN" not in whole


@pytest.mark.parametrize("path", STUDENTS)
def test_nobody_looks_at_a_clock_or_asks_what_the_device_is(path: Path) -> None:
    for cell in cells(path, "code"):
        source = text(cell)
        assert not re.search(r"import time|simulat|\.source\b|@interact|Output\(", source), cell["id"]


@pytest.mark.parametrize("path", STUDENTS)
def test_the_frame_is_complete(path: Path) -> None:
    prose = "\n".join(text(cell) for cell in cells(path, "markdown"))
    code = "\n".join(text(cell) for cell in cells(path, "code"))
    for heading in ("question", "Predict", "Explain", "does not help", "Decide"):
        assert heading in prose, heading
    assert prose.count("## Exercise") >= 2
    assert len(re.findall(r"lab\.check\(", code)) >= 2
    for call in ("lab.predict(", "lab.reveal(", "panel(", "lab.decide("):
        assert call in code, call
    predict, first = code.index("lab.predict("), code.index("lab.reveal(")
    assert predict < first


@pytest.mark.parametrize("path", STUDENTS)
def test_the_core_fits_the_minutes(path: Path) -> None:
    minutes = sum(
        cell["metadata"]["minutes"]
        for cell in cells(path, "markdown")
        if cell["metadata"].get("part") == "core"
    )
    wanted = MINUTES[path.stem[:2]]
    assert 0.85 * wanted <= minutes <= wanted


@pytest.mark.parametrize("path", STUDENTS)
def test_words_come_after_the_lab_that_defines_them(path: Path) -> None:
    number = path.stem[:2]
    prose = "\n".join(text(cell) for cell in cells(path, "markdown")).lower()
    prose = re.sub(r"`[^`]*`", "", prose)
    mine = [word for word, entry in GLOSSARY.items() if entry["lab"] == number]
    assert 1 <= len(mine) <= 6
    for word in mine:
        assert f"**{word}" in prose, f"{word!r} is not set in bold where it is defined"
        first = re.search(rf"\b{re.escape(word)}", prose.split("\n## ", 1)[1])
        assert first is not None
    for word, entry in GLOSSARY.items():
        if ORDER.index(entry["lab"]) > ORDER.index(number):
            assert not re.search(rf"\b{re.escape(word)}s?\b", prose), (
                f"{word!r} belongs to lab {entry['lab']}"
            )


@pytest.mark.parametrize("path", STUDENTS)
def test_sentences_are_short_and_plain(path: Path) -> None:
    for cell in cells(path, "markdown"):
        prose = re.sub(r"[*#`]", "", text(cell))
        for block in re.split(r"\n\s*\n|\n(?=  )|\n(?=\S)", prose):
            for sentence in re.split(r"(?<=[.!?:;]) ", " ".join(block.split())):
                words = [w for w in sentence.split() if re.search(r"[A-Za-z]", w)]
                assert len(words) <= 20, f"{cell['id']}: {sentence}"
        assert not re.search("[\U0001f300-\U0001faff]", prose), cell["id"]


@pytest.mark.parametrize("path", STUDENTS)
def test_no_measured_number_is_typed_in_the_source(path: Path) -> None:
    """Numbers with a decimal point or a unit of time come from placeholders."""
    source = (LABS / "src" / f"{path.stem}.py").read_text(encoding="utf-8")
    for block in re.findall(r"# %% \[markdown\].*?\n(.*?)(?=\n# %%|\Z)", source, re.S):
        prose = re.sub(r"`[^`]*`", "", block)
        found = re.findall(r"\d+\.\d+|\d+ ?(?:µs|ms)\b|× ?\d", prose)
        allowed = {"1.0", "1.2", "0.8", "0.9"}  # bounds that a check states
        assert not set(found) - allowed, f"typed in: {found} in {block[:80]!r}"
