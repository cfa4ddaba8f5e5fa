"""The gap quiz: why was the GPU idle here, here and here, in your own run?

The questions are gaps of the student's own run, and the truth is what :func:`heterolab.explain` says
of them, so nobody can hand on the answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from random import Random
from typing import TYPE_CHECKING, Any

import ipywidgets
import plotly.graph_objects as go

from heterolab.errors import InputError
from heterolab.lab.messages import text
from heterolab.trace import metrics
from heterolab.trace.explain import Gap
from heterolab.view.explained import Explanation, explain, where, why
from heterolab.view.timeline import timeline
from heterolab.view.words import cause_name

if TYPE_CHECKING:
    from heterolab.view.words import Shown

#: How many gaps are asked about.
QUESTIONS = 3
#: A gap is worth a question from this part of the run on, if there are enough of them.
WORTH_ASKING = 1 / 1000

#: Causes that are always on offer, whether the run has them or not.
ALWAYS = (
    metrics.CPU_WORK + "preprocess",
    metrics.LAUNCH_CALL,
    metrics.PAGEABLE,
    metrics.INPUT_COPY,
    metrics.OUTPUT_COPY,
    metrics.EVENT,
    metrics.HAND_OVER,
    metrics.ARRIVALS,
    metrics.BATCH_DELAY,
    metrics.UNRECORDED,
    metrics.END,
)


@dataclass(frozen=True, repr=False)
class Mark:
    """What became of an answer; `told` says it with the evidence."""

    number: int
    said: str
    right: bool
    told: str

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        return f"{'✓' if self.right else '✗'} {self.told}"


class GapQuiz(ipywidgets.VBox):  # type: ignore[misc]
    """The quiz: widgets in a front end, text everywhere; see :func:`gap_quiz`.

    Attributes
    ----------
    gaps
        The gaps asked about, in the order of time.
    choices
        The causes to choose from, in words.
    marks
        The answers so far, by number.
    """

    def __init__(self, explanation: Explanation, gaps: list[Gap]) -> None:
        self._explanation, self.gaps = explanation, tuple(gaps)
        causes = dict.fromkeys([*ALWAYS, *(cause for cause in explanation.by_cause if _told(cause))])
        self._causes = {cause_name(cause): cause for cause in causes}
        self.choices = tuple(self._causes)
        self.marks: dict[int, Mark] = {}
        self._results = [ipywidgets.HTML() for _ in gaps]
        super().__init__(self._widgets())

    # -- what a student calls --------------------------------------------------------------

    def answer(self, number: int, cause: str) -> Mark:
        """Answer question `number` (from 1) with one of :attr:`choices`; the first answer counts.

        Raises
        ------
        InputError
            There is no such question, or no such cause.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.gaps):
            raise InputError(f"answer({number!r}, …): the questions are 1 to {len(self.gaps)}.")
        chosen = self._chosen(cause)
        gap = self.gaps[number - 1]
        if number in self.marks:
            first = self.marks[number]
            told = f"{text('quiz.answered', number=number)} {first.told}"
            return Mark(number, first.said, first.right, told)
        right = chosen == gap.cause
        said, was = cause_name(chosen), cause_name(gap.cause)
        told = text("quiz.right" if right else "quiz.wrong", said=said, cause=was, why=why(gap))
        mark = self.marks[number] = Mark(number, said, right, told)
        self._results[number - 1].value = f'<p role="status">{escape(repr(mark))}</p>'
        return mark

    def _chosen(self, cause: str) -> str:
        """The cause meant: by its words, in any case, or by its name in ``.by_cause``."""
        wanted = str(cause).strip().casefold()
        for words, name in self._causes.items():
            if wanted in (words.casefold(), name.casefold()):
                return name
        raise InputError(f"answer(…, {cause!r}): there is no such cause. {self._offer}")

    def figure(self) -> go.Figure:
        """The timeline with the gaps marked 1, 2, 3."""
        figure = timeline(self._explanation.found.trace, title=self._title)
        unit_ns = 1e6 if self._explanation.found.trace.end_ns >= 10_000_000 else 1e3
        for number, gap in enumerate(self.gaps, 1):
            figure.add_vrect(
                x0=gap.start_ns / unit_ns,
                x1=gap.end_ns / unit_ns,
                fillcolor="#000000",
                opacity=0.12,
                line_width=1,
                annotation_text=f"<b>{number}</b>",
                annotation_position="bottom",
            )
        return figure

    # -- words and widgets -------------------------------------------------------------------

    @property
    def _title(self) -> str:
        stamp = self._explanation.found.trace.stamp
        if not self.gaps:
            return text("quiz.none")
        return text("quiz.head", count=len(self.gaps), stamp=stamp)

    @property
    def _offer(self) -> str:
        return text("quiz.choices", choices="; ".join(self.choices))

    @property
    def _few(self) -> str:
        """What to say where there are fewer questions than there should be."""
        few = 0 < len(self.gaps) < QUESTIONS
        return text("quiz.few", count=len(self.gaps), wanted=QUESTIONS) if few else ""

    def _questions(self) -> list[str]:
        name = self._explanation.gpu_name
        return [
            text("quiz.question", number=number, where=where(gap, name(gap.device)))
            for number, gap in enumerate(self.gaps, 1)
        ]

    def __repr__(self) -> str:
        lines = [self._title, *([self._few] if self._few else [])]
        for number, question in enumerate(self._questions(), 1):
            lines.append(question)
            if number in self.marks:
                lines.append(f"   {self.marks[number]!r}")
        if self.gaps:
            lines.append(self._offer)
            right = sum(mark.right for mark in self.marks.values())
            done = len(self.marks) == len(self.gaps)
            lines.append(text("quiz.score", right=right, count=len(self.gaps)) if done else text("quiz.how"))
        return "\n".join(lines)

    def _repr_mimebundle_(self, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(**options)
        return {**bundle, "text/plain": repr(self)}

    def _widgets(self) -> list[Any]:
        parts: list[Any] = [ipywidgets.HTML(f"<p>{escape(' '.join([self._title, self._few]))}</p>")]
        if self.gaps:
            parts.append(go.FigureWidget(self.figure()))
        for number, question in enumerate(self._questions(), 1):
            parts += [ipywidgets.HTML(f"<p>{escape(question)}</p>"), self._dropdown(number)]
            parts.append(self._results[number - 1])
        return parts

    def _dropdown(self, number: int) -> Any:
        nothing = text("quiz.choose")
        box = ipywidgets.Dropdown(options=[nothing, *self.choices], layout=ipywidgets.Layout(width="auto"))

        def chosen(change: dict[str, Any]) -> None:
            if change["new"] != nothing:
                self.answer(number, change["new"])
                box.disabled = True

        box.observe(chosen, names="value")
        return box


def gap_quiz(run: Shown, seed: int = 0) -> GapQuiz:
    """Three idle gaps of the GPU in your own run: what was the cause of each?

    Parameters
    ----------
    run
        A Run or a Trace. Gaps whose cause the trace does not tell are not asked about; a run with
        fewer than three others has fewer questions, and says so.
    seed
        Picks the gaps, of different causes where there are. Same run and seed, same questions.

    Returns
    -------
    GapQuiz
        In a notebook one chooses; everywhere ``quiz.answer(1, "the batch delay")`` works.

    >>> quiz = hl.gap_quiz(run, seed=7)  # doctest: +SKIP
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InputError(f"seed={seed!r} picks the questions: give a whole number.")
    explanation = explain(run)
    return GapQuiz(explanation, picked(explanation, seed))


def picked(explanation: Explanation, seed: int) -> list[Gap]:
    """The gaps to ask about: of as many causes as there are, else the same cause again."""
    known = [gap for gap in explanation.gaps if _told(gap.cause)]
    worth = [gap for gap in known if gap.took_ns >= WORTH_ASKING * explanation.found.trace.wall_ns]
    gaps = worth if len(worth) >= QUESTIONS else known
    Random(seed).shuffle(gaps)
    first = {gap.cause: gap for gap in reversed(gaps)}
    chosen = sorted(first.values(), key=gaps.index)[:QUESTIONS]
    chosen += [gap for gap in gaps if gap not in chosen][: QUESTIONS - len(chosen)]
    return sorted(chosen, key=lambda gap: (gap.start_ns, gap.device))


def _told(cause: str) -> bool:
    return cause != metrics.UNKNOWN


__all__ = ["GapQuiz", "Mark", "gap_quiz"]
