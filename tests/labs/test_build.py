"""The build: gaps, markers, numbers; canonical and current files."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

SOURCE = """# %% name="numbers" build=true
numbers = {"gain": "2.21"}
provenance = "made up for a test"

# %% [markdown] name="title" part="core" minutes=5
# ## Title
#
# It was {{gain}} times faster ({{provenance}}).

# %% name="gap"
def answer():
    ### BEGIN SOLUTION
    return 42
    ### END SOLUTION


### BEGIN HIDDEN TESTS
assert answer() == 42
### END HIDDEN TESTS
answer()

# %% name="broken"
### BEGIN SOLUTION
memory = "pinned"
### STUDENT
# memory = "pageable"
### END SOLUTION
memory
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "99_test.py"
    path.write_text(SOURCE)
    return path


def test_the_student_gets_gaps_and_no_solution(build: ModuleType, source: Path) -> None:
    student, solution = build.build(source)
    _, gap, broken = (cell.source for cell in student.cells)
    assert gap == "def answer():\n    ...  # your code here\n\n\nanswer()"
    assert broken == 'memory = "pageable"\nmemory'
    _, kept, repaired = (cell.source for cell in solution.cells)
    assert kept == "def answer():\n    return 42\n\n\nassert answer() == 42\nanswer()"
    assert repaired == 'memory = "pinned"\nmemory'


def test_prose_gets_its_numbers_and_minutes(build: ModuleType, source: Path) -> None:
    student, _ = build.build(source)
    assert student.cells[0].source == (
        "## Title\n*core · 5 minutes*\n\nIt was 2.21 times faster (made up for a test)."
    )


def test_cell_ids_come_from_names_alone(build: ModuleType, source: Path) -> None:
    before = [cell.id for cell in build.build(source)[0].cells]
    source.write_text(SOURCE.replace("42", "43").replace("It was", "Here it was"))
    assert [cell.id for cell in build.build(source)[0].cells] == before
    assert before == ["lab99-title", "lab99-gap", "lab99-broken"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("{{gain}}", "{{loss}}", "loss"),
        ('name="gap"', 'name="title"', "name of its own"),
        (' name="gap"', "", "name of its own"),
        ('part="core"', 'part="extra"', "stretch"),
        (" minutes=5", "", "minutes"),
        ('# memory = "pageable"', 'memory = "pageable"', "STUDENT"),
    ],
)
def test_a_source_that_breaks_a_rule_is_refused(
    build: ModuleType, source: Path, old: str, new: str, said: str
) -> None:
    source.write_text(SOURCE.replace(old, new))
    with pytest.raises(build.BuildError, match=said):
        build.build(source)


def test_the_same_source_gives_the_same_bytes(build: ModuleType, source: Path) -> None:
    first, second = (build.dumps(build.build(source)[1]) for _ in range(2))
    assert first == second


def test_the_built_files_are_current(build: ModuleType) -> None:
    stale = [name for path in build.sources() for name in build.stale(path)]
    assert not stale, f"stale: {stale}. Run python labs/build.py"


def test_a_changed_source_is_found_stale(
    build: ModuleType, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "LABS", source.parent)
    assert len(build.stale(source)) == 2
    for path, made in zip(build.outputs_of(source), build.build(source), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text(build.dumps(made), encoding="utf-8")
    assert build.stale(source) == []
    source.write_text(SOURCE.replace("42", "43"))
    assert len(build.stale(source)) == 1  # the student's copy holds no solution, so it is the same
