"""Decides which version sampled which token of a simulated engine: the loads are the borders."""

import math
from bisect import bisect_right

from flexmarl.records import Version, VersionRun


class Loads:
    """The versions that an engine has served, each from a step of its batch on.

    >>> loads = Loads(Version(3))
    >>> loads.add(10, Version(4))
    >>> [(run.start, run.version) for run in loads.runs(first=8, num_tokens=5)]
    [(0, 3), (2, 4)]
    """

    def __init__(self, version: Version) -> None:
        self._loads: list[tuple[int, Version]] = [(0, version)]

    def add(self, step: int, version: Version) -> None:
        """From this step on, tokens are of this version."""
        self._loads.append((step, version))

    def forget(self) -> None:
        """No token of before the next load will be asked for."""
        self._loads.clear()

    def runs(self, first: float, num_tokens: int) -> tuple[VersionRun, ...]:
        """The version runs of a response whose first token is of step `first`."""
        if first >= self._loads[-1][0]:
            return (VersionRun(0, self._loads[-1][1]),)
        began = bisect_right(self._loads, first, key=lambda load: load[0]) - 1
        later = ((math.ceil(step - first), version) for step, version in self._loads[began + 1 :])
        return (
            VersionRun(0, self._loads[began][1]),
            *(VersionRun(start, version) for start, version in later if start < num_tokens),
        )
