"""The knowledge base that ships: sound by itself, and what the encoder makes of its questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from heterolab.errors import HeteroLabError
from heterolab.models import knowledge
from heterolab.models.encoder import Encoder
from heterolab.models.knowledge import DATA, ROWS_FILE, VECTORS_FILE, KnowledgeBase


@pytest.fixture(scope="module")
def shipped() -> KnowledgeBase:
    return KnowledgeBase.load()


def test_rows_are_whole_and_distinct(shipped: KnowledgeBase) -> None:
    assert len(shipped) > 700
    assert len(shipped.answers) == len(shipped.categories) == len(shipped.vectors) == len(shipped)
    assert len({question.lower() for question in shipped.questions}) == len(shipped)
    assert all(question.strip() for question in shipped.questions)
    assert all(answer for answers in shipped.all_answers for answer in answers)
    assert set(shipped.categories) == set(knowledge.CATEGORIES)


def test_vectors_have_length_one_and_find_themselves(shipped: KnowledgeBase) -> None:
    np.testing.assert_allclose(np.linalg.norm(shipped.vectors, axis=1), 1, atol=1e-6)
    similarity = shipped.vectors @ shipped.vectors.T
    assert (similarity.argmax(axis=1) == np.arange(len(shipped))).all()


def test_vectors_are_what_the_encoder_makes(shipped: KnowledgeBase, trained: Encoder) -> None:
    sample = np.random.default_rng(0).choice(len(shipped), 24, replace=False)
    made = trained.encode([shipped.questions[row] for row in sample])
    stored = np.load(DATA / VECTORS_FILE)[sample]
    np.testing.assert_allclose(made, stored.astype(np.float32), atol=2e-4, rtol=1e-3)


def test_provenance_travels_with_the_data() -> None:
    provenance = json.loads((DATA / ROWS_FILE).read_text(encoding="utf-8"))["provenance"]
    assert provenance["sha256"] == knowledge.CORPUS.sha256
    assert (DATA / "LICENSE-chatterbot-corpus.txt").is_file()


def test_rebuilding_needs_trained_weights(
    untrained: Encoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    monkeypatch.setattr(sys.modules["heterolab.models.encoder"], "encoder", lambda: untrained)
    with pytest.raises(HeteroLabError, match="need the trained encoder"):
        knowledge.rebuild(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "not json", "rows and vectors differ"])
def test_damaged_data_says_how_to_repair_it(damage: str, tmp_path: Path) -> None:
    if damage != "missing":
        np.save(tmp_path / VECTORS_FILE, np.ones((3, 384), np.float16))
        text = "{" if damage == "not json" else '{"rows": []}'
        (tmp_path / ROWS_FILE).write_text(text)
    with pytest.raises(HeteroLabError, match=r"python -m heterolab\.models rebuild"):
        KnowledgeBase.load(tmp_path)


def test_near_duplicates_are_found() -> None:
    rows = np.eye(3, 384, dtype=np.float32)
    assert knowledge._different(np.stack([rows[0], rows[1], rows[0], rows[2], rows[1]])) == [0, 1, 3]
