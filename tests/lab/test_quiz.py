"""The gap quiz: three gaps of one's own run, the same for the same seed, marked with evidence."""

from __future__ import annotations

from typing import Any

import pytest

import heterolab as hl
from heterolab.errors import InputError
from heterolab.lab.quiz import QUESTIONS, picked
from heterolab.trace.trace import KERNEL, NO_STREAM, NONE, Span, Trace
from heterolab.view.words import cause_name


@pytest.fixture(scope="module")
def run() -> Any:
    pipe = hl.Pipeline(hl.models.encoder(), batch=4)
    return pipe.run(hl.poisson(rate=400, n=32, seed=0), on=hl.open_device("sim:h200", values=False))


def test_the_same_seed_asks_the_same_and_seeds_differ(run: Any) -> None:
    asked = {seed: hl.gap_quiz(run, seed).gaps for seed in range(6)}
    assert all(hl.gap_quiz(run, seed).gaps == gaps for seed, gaps in asked.items())
    assert len(set(asked.values())) > 3


@pytest.mark.parametrize("seed", range(5))
def test_three_gaps_of_different_causes_in_the_order_of_time(run: Any, seed: int) -> None:
    quiz = hl.gap_quiz(run, seed)
    assert len(quiz.gaps) == QUESTIONS
    assert len({gap.cause for gap in quiz.gaps}) == QUESTIONS
    assert list(quiz.gaps) == sorted(quiz.gaps, key=lambda gap: gap.start_ns)
    assert all(gap in hl.explain(run).gaps for gap in quiz.gaps)
    assert all(gap.took_ns >= run.trace.wall_ns / 1000 for gap in quiz.gaps), "none too short to see"
    assert all(cause_name(gap.cause) in quiz.choices for gap in quiz.gaps)


def test_the_questions_do_not_give_the_answers_away(run: Any) -> None:
    quiz = hl.gap_quiz(run, 3)
    told = repr(quiz).partition("Choose from")[0]
    assert run.trace.stamp in told
    for gap in quiz.gaps:
        assert cause_name(gap.cause) not in told
        assert f"before {gap.kernel} (op {gap.op}" in told or "after its last kernel" in told
    assert "Evidence" not in repr(quiz)


def test_a_right_and_a_wrong_answer_are_marked_with_the_evidence(run: Any) -> None:
    quiz = hl.gap_quiz(run, 1)
    first, second, third = quiz.gaps
    right = quiz.answer(1, cause_name(first.cause).upper())
    assert right
    assert repr(right).startswith("✓ Right. ")
    wrong = quiz.answer(2, next(c for c in quiz.choices if c != cause_name(second.cause)))
    assert not wrong
    assert cause_name(second.cause) in repr(wrong)
    assert quiz.answer(3, third.cause), "the cause's own name is as good"
    evidence = [gap for gap in quiz.gaps if gap.evidence]
    assert repr(quiz).count("Evidence:") == len(evidence)
    assert "2 of 3 right." in repr(quiz)


def test_the_first_answer_counts(run: Any) -> None:
    quiz = hl.gap_quiz(run, 1)
    wrong = next(c for c in quiz.choices if c != cause_name(quiz.gaps[0].cause))
    quiz.answer(1, wrong)
    again = quiz.answer(1, cause_name(quiz.gaps[0].cause))
    assert not again
    assert "answered already" in repr(again)


@pytest.mark.parametrize(("number", "cause", "said"), [
    (0, "no requests", "1 to 3"), (4, "no requests", "1 to 3"), (True, "no requests", "1 to 3"),
    ("1", "no requests", "1 to 3"), (1, "gremlins", "Choose from"), (1, None, "Choose from"),
])  # fmt: skip
def test_nonsense_is_refused_with_what_there_is(run: Any, number: Any, cause: Any, said: str) -> None:
    quiz = hl.gap_quiz(run)
    with pytest.raises(InputError, match=said):
        quiz.answer(number, cause)
    assert not quiz.marks


def test_a_choice_in_the_notebook_is_an_answer_and_is_locked(run: Any) -> None:
    import ipywidgets

    quiz = hl.gap_quiz(run, 2)
    boxes = [child for child in quiz.children if isinstance(child, ipywidgets.Dropdown)]
    assert len(boxes) == QUESTIONS
    assert boxes[0].options[1:] == quiz.choices
    boxes[0].value = cause_name(quiz.gaps[0].cause)
    assert quiz.marks[1].right
    assert boxes[0].disabled
    shown = [child.value for child in quiz.children if isinstance(child, ipywidgets.HTML)]
    assert any("✓ Right." in html for html in shown)
    assert quiz._repr_mimebundle_()["text/plain"] == repr(quiz)


def test_the_figure_marks_the_gaps(run: Any) -> None:
    quiz = hl.gap_quiz(run, 2)
    shapes = quiz.figure().layout.shapes
    assert [round(shape.x0 * 1e6) for shape in shapes] == [gap.start_ns for gap in quiz.gaps]
    labels = [note.text for note in quiz.figure().layout.annotations]
    assert {"<b>1</b>", "<b>2</b>", "<b>3</b>"} <= set(labels)


def test_fewer_gaps_than_three_are_said() -> None:
    def kernel(op: int, start: int, end: int) -> Span:
        return Span(op, KERNEL, "<b>f</b>", "gpu", 0, 0, 0, start, end)

    two = Trace.from_spans([kernel(1, 10, 20), kernel(2, 25, 30), kernel(3, 34, 40)], "simulated", "<i>x</i>")
    quiz = hl.gap_quiz(two)
    assert len(quiz.gaps) == 2
    assert "Only 2 of 3 questions" in repr(quiz)
    one = hl.gap_quiz(Trace.from_spans([kernel(1, 0, 20), kernel(2, 25, 30)], "simulated", "<i>x</i>"))
    assert "Only 1 of 3 questions: this run has no more gaps to ask about." in repr(one)
    assert one.answer(1, "hand_over")
    assert "<i>" not in one.children[0].value
    assert all("<b>f" not in child.value for child in one.children if hasattr(child, "value"))
    none = hl.gap_quiz(Trace.from_spans([kernel(1, 0, 20)], "simulated", "x"))
    assert "no gap to ask about" in repr(none)
    assert none.gaps == ()
    with pytest.raises(InputError, match="questions"):
        none.answer(1, "hand_over")


def test_what_the_trace_does_not_tell_is_not_asked() -> None:
    spans = [
        Span(0, "wait", "wait", "host", NO_STREAM, NONE, 0, 0, 90),
        Span(1, KERNEL, "f", "gpu", 0, 0, 95, 95, 99),
    ]
    quiz = hl.gap_quiz(Trace.from_spans(spans, "cupti", "x"))
    assert [gap.cause for gap in quiz.gaps] == ["unrecorded"]


@pytest.mark.parametrize("seed", ["1", 1.5, None, True])
def test_a_seed_is_a_whole_number(run: Any, seed: Any) -> None:
    with pytest.raises(InputError, match="seed="):
        hl.gap_quiz(run, seed)


def test_picking_changes_nothing(run: Any) -> None:
    why = hl.explain(run)
    gaps = why.gaps
    picked(why, 0)
    assert why.gaps == gaps
