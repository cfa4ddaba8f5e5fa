"""Predictions are locked once, politely, and shown beside their result."""

import pytest

from heterolab.lab.predict import Predictions


@pytest.fixture
def mine() -> Predictions:
    return Predictions()


def test_the_first_prediction_counts(mine: Predictions) -> None:
    assert mine.predict("gain", 1.9, "two lanes instead of one.").locked
    again = mine.predict("gain", 1.03, "I have seen the result.")
    assert again.value == 1.9
    assert "1.90" in repr(again)
    assert "1.03 was not taken" in repr(again)
    assert "Locked already" in repr(mine.predict("gain", 1.9, "the same."))


@pytest.mark.parametrize(
    ("value", "because", "said"),
    [
        (None, "why not", "put your prediction"),
        (..., "why not", "put your prediction"),
        (1.5, "", "needs a reason"),
        (1.5, "…", "needs a reason"),
        (1.5, ..., "needs a reason"),
        (1.5, None, "needs a reason"),
        ([1, 2], "a list", "neither a number nor a word"),
        (float("inf"), "a lot", "no number to compare with"),
        (float("nan"), "who knows", "no number to compare with"),
        (10**400, "a lot", "no number to compare with"),
        pytest.param(10**5000, "a lot", "no number to compare with", id="too long to write"),
    ],
)
def test_what_cannot_be_locked_is_said_and_can_be_mended(
    mine: Predictions, value: object, because: str, said: str
) -> None:
    first = mine.predict("gain", value, because)  # type: ignore[arg-type]
    assert not first.locked
    assert said in repr(first)
    assert mine.predict("gain", 2, "now with a reason.").locked


@pytest.mark.parametrize(
    ("guess", "result", "said"),
    [
        (2.0, 2.1, "Close"),
        (2.0, 1.03, "less, by a factor of 1.94"),
        (1, 6.5, "more, by a factor of 6.50"),
        ("cpu", "cpu", "Right"),
        ("gpu", "cpu", "Not what you said"),
    ],
)
def test_reveal_puts_both_side_by_side(
    mine: Predictions, guess: float | str, result: float | str, said: str
) -> None:
    mine.predict("q", guess, "a reason.")
    told = repr(mine.reveal("q", result))
    assert said in told
    assert "a reason." in told


def test_reveal_without_a_prediction_says_so(mine: Predictions) -> None:
    assert "no prediction" in repr(mine.reveal("q", 2.0))


@pytest.mark.parametrize("result", [float("inf"), float("nan"), 10**400, 1e-320])
def test_any_result_can_be_revealed(mine: Predictions, result: float) -> None:
    mine.predict("q", 1e300, "it is a lot")
    assert "because it is a lot. Result:" in repr(mine.reveal("q", result))
