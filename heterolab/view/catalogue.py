"""The view's words come from the labs' message catalogue."""

from __future__ import annotations

from typing import Any


def text(key: str, **values: Any) -> str:
    """The message `key`; see :func:`heterolab.lab.messages.text`."""
    # Imported when it is needed: the labs build on the view, so the view cannot start with them.
    from heterolab.lab.messages import text

    return text(key, **values)
