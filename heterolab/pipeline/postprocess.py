"""Stage 5, on the CPU: from a batch's result to answers, and the session's record of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from heterolab.pipeline.batch import Batch
from heterolab.pipeline.payload import ANSWERS

if TYPE_CHECKING:
    from heterolab.models.knowledge import KnowledgeBase


@dataclass(frozen=True)
class Answer:
    """What the client gets.

    Attributes
    ----------
    id, session, question
        Of the request; the question is its clean text.
    answer
        The answer of the nearest known question.
    confidence
        Cosine similarity to that question, 0 to 1.
    nearest
        Rows of the knowledge base, best first.
    trained
        False where the model's weights are random: the answer then means nothing.
    """

    id: int
    session: str
    question: str
    answer: str
    confidence: float
    nearest: tuple[int, ...]
    trained: bool

    def response(self) -> str:
        """The JSON body of the response."""
        note = {} if self.trained else {"note": "untrained model: this answer means nothing"}
        return json.dumps({"answer": self.answer, "confidence": round(self.confidence, 4)} | note)


class Sessions:
    """Who said what: the database of the six steps, in memory or in a file.

    Parameters
    ----------
    path
        A JSONL file to append to, opened and closed with every batch. None keeps the record in memory.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.history: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._path = Path(path) if path else None

    def write(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self.history[answer.session].append((answer.question, answer.answer))
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(_line(answer) for answer in answers)


def _line(answer: Answer) -> str:
    record = {"session": answer.session, "question": answer.question, "answer": answer.answer}
    return json.dumps(record) + "\n"


def postprocess(
    batch: Batch, result: NDArray[Any], returned: str, knowledge: KnowledgeBase, trained: bool
) -> list[Answer]:
    """Answers of a batch, in its order.

    Parameters
    ----------
    result
        What came back: float32, (batch, 2, k) best rows and scores for ``topk``,
        (batch, dim) for ``vectors``, (batch, vocabulary) for ``logits``.
    returned
        Which of the three it is: for the last two the search is done here, on the CPU.
    """
    if returned == "topk":
        nearest, scores = result[:, 0].astype(np.int64), result[:, 1]
    else:
        similarities = result @ knowledge.vectors.T if returned == "vectors" else result[:, : len(knowledge)]
        nearest = np.argsort(-similarities, axis=1, kind="stable")[:, :ANSWERS]
        scores = np.take_along_axis(similarities, nearest, axis=1)
    return [
        Answer(
            item.request.id,
            item.request.session,
            item.text,
            knowledge.answers[rows[0]],
            min(max(float(row_scores[0]), 0.0), 1.0),
            tuple(int(row) for row in rows),
            trained,
        )
        for item, rows, row_scores in zip(batch.items, nearest, scores, strict=True)
    ]
