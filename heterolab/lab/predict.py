"""Predict before you run: a prediction is locked for as long as the kernel lives.

The lock keeps the order of events honest in this kernel, and no more: a restart clears it.
Being wrong costs nothing. A prediction that you can explain afterwards is what is worth having.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from heterolab.lab.messages import text
from heterolab.view.words import sentence

Value = float | int | str | bool


@dataclass(frozen=True)
class Prediction:
    """A locked prediction; `note` is what to show when it is displayed."""

    id: str
    value: Value | None
    because: str = ""
    note: str = field(default="", compare=False)

    @property
    def locked(self) -> bool:
        return self.value is not None

    def __repr__(self) -> str:
        return self.note


@dataclass(frozen=True)
class Reveal:
    """A prediction beside its result."""

    id: str
    predicted: Value | None
    result: Value
    note: str = field(default="", compare=False)

    @property
    def ratio(self) -> float | None:
        """Result over prediction; None where either is not a number above zero."""
        return _ratio(self.predicted, self.result)

    def __repr__(self) -> str:
        return self.note


class Predictions:
    """The predictions of one kernel, in the order in which they were locked."""

    def __init__(self) -> None:
        self.locked: dict[str, Prediction] = {}
        self.revealed: dict[str, Reveal] = {}

    def predict(self, id: str, value: Any, because: Any = "") -> Prediction:
        """Lock `value` for the question `id`; see :func:`predict`."""
        old = self.locked.get(id)
        if old is not None:
            key = "predict.again" if value == old.value else "predict.refused"
            note = text(key, locked=_show(old.value), value=_show(value))
            return Prediction(id, old.value, old.because, note)
        if value is None or value is Ellipsis:
            return Prediction(id, None, note=text("predict.empty"))
        if not isinstance(value, int | float | str):
            return Prediction(id, None, note=text("predict.type", value=repr(value)))
        if not isinstance(value, str) and not _is_finite(value):
            return Prediction(id, None, note=text("predict.finite", value=_show(value)[:20]))
        if not isinstance(because, str) or not because.strip(" .…"):
            return Prediction(id, None, note=text("predict.why", value=_show(value)))
        note = text("predict.locked", value=_show(value), because=sentence(because))
        self.locked[id] = Prediction(id, value, because.strip(), note)
        return self.locked[id]

    def reveal(self, id: str, result: Value) -> Reveal:
        """Show the result beside the prediction; see :func:`reveal`."""
        guess = self.locked.get(id)
        if guess is None:
            note = text("reveal.none", result=_show(result))
        else:
            ratio = _ratio(guess.value, result)
            if ratio is None:
                key = "reveal.same" if guess.value == result else "reveal.other"
            elif 0.8 <= ratio <= 1.25:
                key = "reveal.close"
            else:
                key = "reveal.above" if ratio > 1 else "reveal.below"
            factor = "" if ratio is None else f"{max(ratio, 1 / ratio):.2f}"
            shown = {"value": _show(guess.value), "because": sentence(guess.because)}
            note = text(key, result=_show(result), factor=factor, **shown)
        self.revealed[id] = Reveal(id, guess.value if guess else None, result, note)
        return self.revealed[id]


def _ratio(predicted: Value | None, result: Value) -> float | None:
    numbers = [x for x in (predicted, result) if isinstance(x, int | float) and not isinstance(x, bool)]
    if len(numbers) < 2 or not all(map(_is_finite, numbers)) or min(numbers) <= 0:
        return None
    return (float(result) / float(predicted)) or None  # type: ignore[arg-type]


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    try:
        return str(value)
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "…"


_mine = Predictions()


def predict(id: str, value: Any, because: str = "") -> Prediction:
    """Lock a prediction before anything runs.

    Parameters
    ----------
    id
        The question's name, given in the cell.
    value
        A number, or one of the words on offer.
    because
        Your reason, in a sentence. Without one nothing is locked.

    Returns
    -------
    Prediction
        Says whether it is locked. A second, other value is refused: the first one counts.
    """
    return _mine.predict(id, value, because)


def reveal(id: str, result: Value) -> Reveal:
    """Put the result beside the prediction locked under `id`."""
    return _mine.reveal(id, result)
