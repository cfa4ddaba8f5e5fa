"""The public names, the import's cost, and what the core must not need."""

import subprocess
import sys

import pytest

import heterolab as hl

HEAVY = ("cupy", "torch", "plotly", "ipywidgets", "IPython", "tokenizers", "pandas")


def test_public_names_are_sorted_and_there() -> None:
    assert list(hl.__all__) == sorted(hl.__all__)
    for name in hl.__all__:
        assert getattr(hl, name) is not None, name


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="timeline"):
        hl.timelime  # noqa: B018


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; t = time.perf_counter(); import heterolab; s = time.perf_counter() - t; "
        f"print(min(s, 9), [m for m in {HEAVY!r} if m in sys.modules])"
    )
    times = []
    for _ in range(3):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        seconds, _, loaded = out.partition(" ")
        assert loaded.strip() == "[]"
        times.append(float(seconds))
    assert min(times) <= 0.5
