"""The message catalogue: every sentence that checks, predictions and panels show, keyed by id.

One flat JSON object a file; files are named ``TOPIC.LANGUAGE.json`` (or ``LANGUAGE.json``), and
all files of a language are one catalogue. A key without a translation is shown in English.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

FALLBACK = "en"


@cache
def catalogue(language: str = FALLBACK) -> dict[str, str]:
    """All messages of a language, by id. An id in two files is a mistake, and raises."""
    merged: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*.json")):
        if path.stem.split(".")[-1] != language:
            continue
        for key, value in json.loads(path.read_text(encoding="utf-8")).items():
            if key in merged:
                raise KeyError(f"message {key!r} is defined twice, the second time in {path.name}")
            merged[key] = value
    return merged


def text(key: str, **values: Any) -> str:
    """The message `key`, with `values` in its ``{placeholders}``, in the language that the
    environment's ``HETEROLAB_LANG`` names (English by default)."""
    message = catalogue(os.environ.get("HETEROLAB_LANG", FALLBACK)).get(key) or catalogue()[key]
    return message.format(**values)
