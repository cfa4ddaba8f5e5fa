from __future__ import annotations

import os

import pytest

from heterolab.models import weights
from heterolab.models.encoder import Encoder


@pytest.fixture(scope="session")
def trained() -> Encoder:
    """The trained encoder; the test is skipped where its weights cannot be had."""
    loaded = weights.load()
    if loaded.untrained_because:
        reason = f"needs MiniLM's weights: {loaded.untrained_because}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    return Encoder(loaded)


@pytest.fixture(scope="session")
def untrained() -> Encoder:
    return Encoder(weights.Loaded(weights.random_arrays(), None, weights.ASKED_FOR))
