"""Smooth tables from scattered measurements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterolab.device.curves import fit_curve, octaves

KNOTS = octaves(1024, 2**20)


def line(nbytes: float) -> float:
    return 1000 + nbytes / 50


def test_without_measurements_the_curve_is_the_shape() -> None:
    table = fit_curve([], [], KNOTS, line)
    assert table.sizes == tuple(KNOTS)
    assert table.ns == pytest.approx([line(knot) for knot in KNOTS], rel=1e-3)


def test_it_follows_what_was_measured() -> None:
    sizes = np.geomspace(1024, 2**20, 60)
    ns = [1.3 * line(size) + 500 for size in sizes]
    table = fit_curve(sizes, ns, KNOTS, line)
    assert [table.at(size) for size in sizes] == pytest.approx(ns, rel=0.02)


def test_an_outlier_has_no_say() -> None:
    sizes = np.geomspace(1024, 2**20, 60)
    ns = np.array([line(size) for size in sizes])
    ns[30] *= 5
    table = fit_curve(sizes, ns, KNOTS, line)
    assert table.at(sizes[30]) == pytest.approx(line(sizes[30]), rel=0.05)


def test_where_nothing_was_measured_it_goes_on_as_it_was() -> None:
    """Twice as slow as the shape up to 64 KiB, so twice as slow beyond."""
    sizes = np.geomspace(1024, 2**16, 30)
    table = fit_curve(sizes, [2 * line(size) for size in sizes], KNOTS, line)
    assert table.at(2**20) == pytest.approx(2 * line(2**20), rel=0.02)
    assert table.at(2**21) == pytest.approx(2 * line(2**21), rel=0.02), "beyond the last knot"


def test_a_weight_counts_as_so_many_measurements() -> None:
    heavy = fit_curve([4096] * 2, [1000, 2000], KNOTS, line, weights=[1, 9])
    many = fit_curve([4096] * 10, [1000] + [2000] * 9, KNOTS, line)
    assert heavy.ns == many.ns


def test_a_low_quantile_follows_the_fast_ones() -> None:
    rng = np.random.default_rng(0)
    sizes = np.geomspace(1024, 2**20, 400)
    ns = np.array([line(size) for size in sizes]) * (1 + 0.5 * rng.random(400))
    for quantile in (0.1, 0.5):
        table = fit_curve(sizes, ns, KNOTS, line, quantile=quantile)
        below = np.mean([value < table.at(size) for size, value in zip(sizes, ns, strict=True)])
        assert below == pytest.approx(quantile, abs=0.1)


def test_stiffness_holds_steps_together() -> None:
    sizes, ns = [4096, 65536], [line(4096), 3 * line(65536)]
    loose, stiff = (fit_curve(sizes, ns, KNOTS, line, stiffness=s) for s in (1e-4, 100.0))

    def bend(table_at: float, size: float) -> float:
        return table_at / line(size)

    assert bend(loose.at(65536), 65536) > 2.8
    assert bend(stiff.at(65536), 65536) == pytest.approx(bend(stiff.at(4096), 4096), rel=0.1)


@given(st.lists(st.tuples(st.integers(1, 2**21), st.integers(1, 10**8)), max_size=30))
def test_a_larger_size_never_costs_less(points: list[tuple[int, int]]) -> None:
    table = fit_curve([size for size, _ in points], [ns for _, ns in points], KNOTS, line)
    assert list(table.ns) == sorted(table.ns)
    assert all(np.isfinite(table.ns))


def test_octaves() -> None:
    assert octaves(1, 8) == [1, 2, 4, 8]
    assert octaves(256, 1000) == [256, 512, 1024]
    assert octaves(128, 512, 2) == [128, 181, 256, 362, 512]
