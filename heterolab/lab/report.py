"""The report: one row a lab, with the decision and the balance card."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from heterolab.lab.messages import text
from heterolab.trace import metrics


@dataclass(frozen=True)
class Row:
    """What one lab leaves in the report.

    Attributes
    ----------
    lab
        Its number.
    decision
        What you would do, in a line.
    card
        CPU, link and GPU milliseconds per request, and the lane that limits.
    stamp
        Where the numbers come from.
    """

    lab: str
    decision: str
    card: metrics.BalanceCard
    stamp: str
    note: str = field(default="", compare=False)

    def __repr__(self) -> str:
        return self.note


_rows: dict[str, Row] = {}


def decide(lab: str, decision: str, shown: Any, requests: int | None = None) -> Row:
    """Put the lab's row into the report: your decision, and the balance card of a run or trace."""
    card = metrics.balance_card(shown, requests)
    made = decision if isinstance(decision, str) and decision.strip(" .…") else text("report.undecided")
    numbers = {name: f"{value:.3g}" for name, value in card.as_dict().items()}
    note = text("report.row", lab=lab, decision=made, lane=card.lane, **numbers, stamp=shown.stamp)
    _rows[lab] = Row(lab, made, card, shown.stamp, note)
    return _rows[lab]


def rows() -> list[Row]:
    """The rows so far, by lab."""
    return [_rows[lab] for lab in sorted(_rows)]
