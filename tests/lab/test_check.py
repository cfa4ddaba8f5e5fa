"""Verdicts: in words and marks, one invariant after the other, and never an exception."""

from collections.abc import Iterator

import pytest

from heterolab.errors import InputError
from heterolab.lab.check import Found, attempt, check, examine, ratio


def test_the_first_failure_ends_a_check() -> None:
    def checking() -> Iterator[Found]:
        yield Found("one")
        yield Found("two", "two is wrong", "fail")
        raise AssertionError("looked on after a failure")

    verdict = examine("it", checking())
    assert not verdict
    assert verdict.problem == "two is wrong"
    assert repr(verdict).splitlines() == ["✗ not yet · it", "  ✓ one", "  ✗ two", "    two is wrong"]


def test_inconclusive_is_neither_pass_nor_fail() -> None:
    verdict = examine("it", iter([Found("one", "noise", "inconclusive"), Found("two")]))
    assert verdict.state == "inconclusive"
    assert not verdict.passed
    assert repr(verdict).startswith("? inconclusive")


def student_divides(x: int) -> float:
    return x / 0


def test_an_error_names_the_students_line() -> None:
    verdict = examine("it", (attempt(student_divides, 1) for _ in range(1)))
    assert verdict.state == "fail"
    assert "ZeroDivisionError" in verdict.problem
    assert "return x / 0" in verdict.problem


def test_an_error_inside_the_library_names_the_line_that_called_it() -> None:
    from heterolab.device.base import Memory

    def student() -> None:
        Memory.of("pined")

    verdict = examine("it", (attempt(student) for _ in range(1)))
    assert 'Memory.of("pined")' in verdict.problem
    assert "pinned" in verdict.problem


@pytest.mark.parametrize("wrong", [None, 3, "overlap"])
def test_not_a_function_is_said(wrong: object) -> None:
    verdict = examine("it", (attempt(wrong) for _ in range(1)))
    assert "needs your function" in verdict.problem


def test_leaving_python_does_not_leave_the_notebook() -> None:
    assert "SystemExit" in examine("it", (attempt(exit) for _ in range(1))).problem


@pytest.mark.parametrize(
    ("value", "source", "state"),
    [
        (1.0, "simulated", "pass"),
        (1.3, "simulated", "fail"),
        (0.5, "simulated", "fail"),
        (1.3, "cuda-events", "inconclusive"),
        (2.0, "cuda-events", "fail"),
        (0.5, "cuda-events", "fail"),
        (9.0, "cpu-clock", "inconclusive"),
    ],
)
def test_ratios_have_two_bounds_and_room_for_noise(value: float, source: str, state: str) -> None:
    words = {"wall": "2.00", "best": "1.00", "syncs": 1}
    found = ratio(
        "03.speed",
        value,
        0.9,
        1.2,
        below="03.speed.skipped",
        above="03.speed.slow",
        source=source,
        **words,
    )
    assert found.state == state


@pytest.mark.parametrize(
    ("value", "own", "state"),
    [
        (1.0, None, "pass"),  # nobody asks what the course's solution gets
        (1.6, 1.0, "fail"),  # this machine could do it
        (1.6, 1.6, "inconclusive"),  # this machine cannot
        (2.4, 1.6, "fail"),  # it can do better than that
        (1.3, 2.4, "fail"),  # another answer than the course's: not to be believed
        (0.5, 0.5, "inconclusive"),
        (0.5, 1.6, "fail"),
    ],
)
def test_a_machine_on_which_the_courses_own_solution_fails_proves_nothing(
    value: float, own: float | None, state: str
) -> None:
    asked: list[float] = []

    def reference() -> float:
        assert own is not None
        asked.append(own)
        return own

    words = {"wall": "2.00", "best": "1.00", "below": "03.speed.skipped", "above": "03.speed.slow"}
    found = ratio("03.speed", value, 0.9, 1.2, reference=reference, **words)  # type: ignore[arg-type]
    assert found.state == state
    assert ("this machine" in found.problem) == (state == "inconclusive")
    assert asked == ([] if own is None else [own])


def test_an_unknown_exercise_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match="03-1"):
        check("99-9")
