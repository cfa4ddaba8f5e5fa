"""The colours of spans, told apart by the colour-blind too (Okabe and Ito's palette)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "wait": "#DDDDDD",
    "sync": "#E69F00",
    "cpu": "#0072B2",
    "api": "#56B4E9",
    "h2d": "#009E73",
    "d2h": "#D55E00",
    "kernel": "#CC79A7",
    "other": "#777777",  # kinds that this version does not know
}

#: The same, darker.
EDGES = {
    kind: "#" + "".join(f"{int(colour[i : i + 2], 16) * 2 // 3:02X}" for i in (1, 3, 5))
    for kind, colour in COLOURS.items()
}


def drawn_as(kinds: NDArray[Any]) -> NDArray[Any]:
    """For each span's kind the one whose colour it gets: its own, or ``other``."""
    return np.where(np.isin(kinds, list(COLOURS)), kinds, "other")
