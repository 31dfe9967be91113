"""Decides which non-negative costs explain measured seconds best."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


def nonnegative(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients x >= 0 that make `columns @ x` closest to `seconds` in least squares.

    Tries every subset of the columns, so it is exact, but only for few columns. The result is the best unconstrained
    solution of a subset that has no negative coefficient.

    >>> nonnegative(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), np.array([2.0, 5.0, 8.0])).round(6).tolist()
    [2.0, 3.0]
    """
    scale = np.maximum(np.linalg.norm(columns, axis=0), 1e-300)
    scaled = columns / scale
    gram, target = scaled.T @ scaled, scaled.T @ seconds
    best, least = np.zeros(columns.shape[1]), 0.0
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), size)):
            found = np.linalg.lstsq(gram[np.ix_(chosen, chosen)], target[chosen], rcond=1e-10)[0]
            # The squared error without the constant |seconds|^2. If two subsets are equally good, the smaller one wins.
            left = -float(target[chosen] @ found)
            if (found >= 0).all() and left < least - 1e-9 * abs(least):
                best, least = np.zeros(columns.shape[1]), left
                best[chosen] = found
    return best / scale


def relative_error(predicted: Floats, measured: Floats) -> float:
    """Mean absolute error, divided by the mean of `measured`; 0 if that mean is 0.

    >>> relative_error(np.array([1.0, 3.0]), np.array([2.0, 3.0]))
    0.2
    """
    total = float(np.abs(measured).sum())
    return float(np.abs(predicted - measured).sum()) / total if total else 0.0


def rounded(value: float) -> float:
    """Rounds to four significant digits, since the measurements are no more precise.

    >>> rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.4g}")
