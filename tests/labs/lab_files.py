"""Where the built notebooks are, and how to read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LABS = Path(__file__).parents[2] / "labs"


def notebook(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


STUDENT = sorted(LABS.glob("[0-9]*.ipynb"))
SOLUTIONS = sorted((LABS / "solutions").glob("[0-9]*.ipynb"))
