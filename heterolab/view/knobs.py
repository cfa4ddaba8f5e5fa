"""Knobs: the widget for a set of choices, and which values it takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import ipywidgets as widgets

from heterolab.errors import InputError
from heterolab.view.catalogue import text

#: A panel with more knobs than this teaches searching, not thinking.
MOST_KNOBS = 3

Choices = Sequence[Any]


class Knob:
    """A named choice.

    Parameters
    ----------
    name
        The job's keyword argument.
    choices
        A list of values; or a range ``(low, high)`` or ``(low, high, step)`` of numbers.
    value
        Where it stands at first. None: the first choice.
    """

    def __init__(self, name: str, choices: Choices, value: Any = None) -> None:
        check_choices({name: choices})
        self.name, self.is_range = name, _is_range(choices)
        self.choices = tuple(choices) if self.is_range else list(choices)
        value = self.choices[0] if value is None else value
        self.check(value)
        self.widget = self._make(value)

    def _make(self, value: Any) -> Any:
        common = {"description": self.name, "value": value, "style": {"description_width": "90px"}}
        if self.is_range:
            low, high, *step = self.choices
            whole = _is_whole(self.choices)
            kind = widgets.IntSlider if whole else widgets.FloatSlider
            return kind(
                min=low, max=high, step=step[0] if step else (1 if whole else (high - low) / 20),
                continuous_update=False, **common,
            )  # fmt: skip
        if all(map(_is_number, self.choices)):
            return widgets.SelectionSlider(options=self.choices, continuous_update=False, **common)
        style = common["style"] | {"button_width": "auto"}
        return widgets.ToggleButtons(options=self.choices, **common | {"style": style})

    @property
    def value(self) -> Any:
        return self.widget.value

    def check(self, value: Any) -> None:
        """Refuse a value that this knob does not have, and name those it has."""
        if not allowed(self.choices, value):
            shown = ", ".join(map(repr, self.choices))
            if self.is_range:
                key = "panel.whole_range" if _is_whole(self.choices) else "panel.range"
                shown = text(key, low=self.choices[0], high=self.choices[1])
            raise InputError(text("panel.bad_value", name=self.name, value=repr(value), choices=shown))


class Knobs:
    """The knobs of a panel; `moved` is called when one of them has moved."""

    def __init__(
        self,
        choices: Mapping[str, Choices],
        start: Mapping[str, Any],
        moved: Callable[[], None],
    ) -> None:
        if not 1 <= len(choices) <= MOST_KNOBS:
            names = ", ".join(choices)
            raise InputError(text("panel.too_many", count=len(choices), names=names))
        self._moved, self._quiet = moved, False
        self._knobs = {name: Knob(name, values, start.get(name)) for name, values in choices.items()}
        self._start = self.settings
        for knob in self._knobs.values():
            knob.widget.observe(self._on_change, names="value")

    @property
    def widgets(self) -> list[Any]:
        return [knob.widget for knob in self._knobs.values()]

    @property
    def settings(self) -> dict[str, Any]:
        """The job's keyword arguments as the knobs stand."""
        return {name: knob.value for name, knob in self._knobs.items()}

    def code(self) -> str:
        """The same, as one would type it."""
        return arguments(self.settings)

    def set(self, values: Mapping[str, Any]) -> None:
        """Move knobs; all or none of them, and `moved` is called once."""
        for name, value in values.items():
            if name not in self._knobs:
                raise InputError(text("panel.unknown_knob", name=name, names=", ".join(self._knobs)))
            self._knobs[name].check(value)
        before = self.settings
        self._quiet = True
        try:
            for name, value in values.items():
                self._knobs[name].widget.value = value
        finally:
            self._quiet = False
        if self.settings != before:
            self._moved()

    def reset(self) -> None:
        """Back to where they stood at first."""
        self.set(self._start)

    def _on_change(self, _change: Any) -> None:
        if not self._quiet:
            self._moved()


def check_choices(knobs: Mapping[str, Choices]) -> None:
    """Refuse what is neither a list of values nor a range with a step that fits into it."""
    for name, choices in knobs.items():
        shown = {"name": name, "choices": repr(choices)}
        listed = isinstance(choices, Sequence) and not isinstance(choices, str | bytes) and len(choices)
        if not listed or (_is_range(choices) and not choices[0] < choices[1] < inf):
            raise InputError(text("panel.bad_choices", **shown))
        if _is_range(choices) and len(choices) == 3 and not 0 < choices[2] <= choices[1] - choices[0]:
            raise InputError(text("panel.bad_step", **shown))


def allowed(choices: Choices, value: Any) -> bool:
    """Whether a knob with these choices can stand at `value`."""
    if _is_range(choices):
        fits = _is_number(value) and choices[0] <= value <= choices[1]
        return fits and (not _is_whole(choices) or value == int(value))
    return any(value == choice and type(value) is type(choice) for choice in choices)


def _is_range(choices: Choices) -> bool:
    return isinstance(choices, tuple) and 2 <= len(choices) <= 3 and all(map(_is_number, choices))


def _is_whole(choices: Choices) -> bool:
    """Whether a range is one of whole numbers: its slider knows no others."""
    return all(isinstance(choice, int) for choice in choices)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def arguments(settings: Mapping[str, Any]) -> str:
    """Keyword arguments as one would type them."""
    return ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
        for name, value in settings.items()
    )
