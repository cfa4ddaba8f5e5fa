"""A cost over a size from scattered measurements: a smooth correction to a simple shape.

Nobody measures every size, and measurements scatter. So the cost is written as *shape × ratio*:
the shape is physics one can write down (a latency plus bytes at a rate), and the ratio says
by how much the machine differs from it. It is one number a knot, and prefers to change slowly
from knot to knot. Where nothing was measured it goes on as it was: a cost beyond the largest
size grows with the shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heterolab.device.profile import Table

#: Rounds of reweighting, in which measurements that lie far off lose their say.
ROUNDS = 12
#: A relative residual up to which a measurement counts in full.
CLOSE = 0.03


def fit_curve(
    sizes: ArrayLike,
    values: ArrayLike,
    knots: Sequence[float],
    shape: Callable[[float], float],
    weights: ArrayLike = 1.0,
    stiffness: ArrayLike = 0.1,
    quantile: ArrayLike = 0.5,
) -> Table:
    """A table through `knots` that follows the measured `values` at `sizes`.

    Minimises the sum of weight × (relative residual)², where a residual above :data:`CLOSE`
    counts linearly (Huber), plus `stiffness` × the squared differences of the ratios of
    neighbouring knots. The table is then made non-decreasing.

    Parameters
    ----------
    sizes, values, weights
        Measurements, shape (n,); n may be 0: the result is the shape itself.
    knots
        Sizes of the table, rising.
    shape
        Size → cost, above 0; linear between knots or nearly so.
    stiffness
        How many measurements' say the smoothness has; one number, or one a step between knots.
    quantile
        Which share of the measurements is to lie below the curve: 0.5 follows the middle, less
        the fast ones. One number, or one a measurement.
    """
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    weight = np.broadcast_to(np.asarray(weights, float), x.shape)
    base = np.array([shape(knot) for knot in knots])
    design = _interpolation(x, np.asarray(knots, float)) * base / y[:, None]  # ratio → value / y
    steps = np.broadcast_to(np.asarray(stiffness, float), (len(knots) - 1,))
    smooth = np.diff(np.eye(len(knots)), axis=0) * np.sqrt(steps)[:, None]
    below = np.broadcast_to(np.asarray(quantile, float), x.shape)
    anchor = np.eye(len(knots)) * 1e-4  # all ratios are 1 where nothing says otherwise
    ratio = np.ones(len(knots))
    for _ in range(ROUNDS):
        residual = design @ ratio - 1  # above 0: the curve is too slow
        side = 2 * np.where(residual > 0, 1 - below, below)
        close = np.minimum(1.0, CLOSE / np.maximum(np.abs(residual), CLOSE / 1e3))
        root = np.sqrt(weight * side * close)
        matrix = np.vstack((design * root[:, None], smooth, anchor))
        target = np.concatenate((root, np.zeros(len(smooth)), np.full(len(knots), 1e-4)))
        ratio = np.linalg.lstsq(matrix, target, rcond=None)[0]
    costs = np.maximum.accumulate(np.maximum(base * ratio, 0.0))
    return Table(tuple(knots), tuple(float(f"{cost:.4g}") for cost in costs))


def _interpolation(x: NDArray[np.float64], knots: NDArray[np.float64]) -> NDArray[np.float64]:
    """Matrix that takes values at `knots` to those at `x` as :class:`Table` does, (n, knots)."""
    right = np.clip(np.searchsorted(knots, x, side="right"), 1, len(knots) - 1)
    share = np.maximum((x - knots[right - 1]) / (knots[right] - knots[right - 1]), 0.0)
    matrix = np.zeros((len(x), len(knots)))
    rows = np.arange(len(x))
    matrix[rows, right - 1] = 1 - share
    matrix[rows, right] += share
    return matrix


def octaves(first: float, last: float, per_octave: int = 1) -> list[float]:
    """Sizes from `first` to `last` (at least), a factor of 2 ** (1 / `per_octave`) apart."""
    count = int(np.ceil(np.log2(last / first) * per_octave - 1e-9))
    return [float(round(first * 2 ** (i / per_octave))) for i in range(count + 1)]
