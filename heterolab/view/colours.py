"""The colours of spans, told apart by the colour-blind too (Okabe and Ito's palette)."""

COLOURS = {
    "wait": "#DDDDDD",
    "sync": "#E69F00",
    "cpu": "#0072B2",
    "api": "#56B4E9",
    "h2d": "#009E73",
    "d2h": "#D55E00",
    "kernel": "#CC79A7",
}

#: The same, darker.
EDGES = {
    kind: "#" + "".join(f"{int(colour[i : i + 2], 16) * 2 // 3:02X}" for i in (1, 3, 5))
    for kind, colour in COLOURS.items()
}
