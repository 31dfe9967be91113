"""Decides how many parties were at work at any time, and for how much of it."""

from collections.abc import Iterable, Sequence

import numpy as np

from flexmarl.observability.overlap import Interval
from flexmarl.simulator.regression import Floats, Indices


class Crowd:
    """How many of several parties were at work, at any time."""

    def __init__(self, parties: Iterable[Sequence[Interval]]) -> None:
        spans = [interval for busy in parties for interval in busy]
        moments = np.array([moment for span in spans for moment in span])
        changes = np.array([change for _ in spans for change in (1.0, -1.0)])
        order = np.argsort(moments, kind="stable")
        self._moments = moments[order]
        level = np.cumsum(changes[order])
        # The integral of the level up to each moment, from which any mean follows.
        self._area = np.concatenate([[0.0], np.cumsum(level[:-1] * np.diff(self._moments))]) if len(spans) else level

    def mean(self, edges: Floats) -> Floats:
        """Mean number between each edge and the next."""
        if not len(self._moments):
            return np.zeros(len(edges) - 1)
        return np.diff(np.interp(edges, self._moments, self._area)) / np.maximum(np.diff(edges), 1e-12)


def level(first: Indices, last: Indices, weights: Floats, segments: int) -> Floats:
    """Sum of the weights of those that are there, segment by segment; each is there from its first to its last."""
    ups = np.bincount(first, weights, minlength=segments + 1)
    downs = np.bincount(last, weights, minlength=segments + 1)
    return np.cumsum((ups - downs).astype(np.float64))[:segments]
