"""Decides which costs, none below zero, explain measured seconds best."""

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


def nonnegative(columns: Floats, seconds: Floats) -> Floats:
    """Coefficients x >= 0 that make `columns @ x` closest to `seconds` in least squares.

    Exact for the few columns there are: of all choices of columns, the best one whose plain solution is feasible.

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
            # What is left, but for the constant |seconds|^2; of two choices that explain as much, the smaller one.
            left = -float(target[chosen] @ found)
            if (found >= 0).all() and left < least - 1e-9 * abs(least):
                best, least = np.zeros(columns.shape[1]), left
                best[chosen] = found
    return best / scale


def relative_error(predicted: Floats, measured: Floats) -> float:
    """Mean absolute error by mean; 0 for nothing.

    >>> relative_error(np.array([1.0, 3.0]), np.array([2.0, 3.0]))
    0.2
    """
    total = float(np.abs(measured).sum())
    return float(np.abs(predicted - measured).sum()) / total if total else 0.0


def rounded(value: float) -> float:
    """Four digits: more were never measured.

    >>> rounded(0.00123456)
    0.001235
    """
    return float(f"{value:.4g}")
