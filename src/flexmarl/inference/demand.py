"""Decides the expected length and speed of a policy's requests, from the requests that it has answered.

    expected tokens of a request that waits           E[L]
    expected tokens left of a request that runs       E[L^2] / 2 E[L]: longer requests are likelier to be running

L is the number of sampled tokens of an answer. The lengths of waiting and running requests themselves are unknown.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.records import PolicyName

KEPT_PER_STEP = 0.95
"""Factor by which the weight of earlier answers falls at the end of each step, so that about twenty steps count. With
about five, allocations followed chance, because tasks differ so much."""


@dataclass(slots=True)
class _Sums:
    answers: float = 0.0
    tokens: float = 0.0
    squares: float = 0.0
    serving_s: float = 0.0

    def fade(self) -> None:
        self.answers *= KEPT_PER_STEP
        self.tokens *= KEPT_PER_STEP
        self.squares *= KEPT_PER_STEP
        self.serving_s *= KEPT_PER_STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """Estimates for the requests of one policy."""

    tokens: float
    """Expected tokens of a request that waits."""
    tokens_left: float
    """Expected tokens that a running request has still to sample."""
    tokens_per_s: float
    """Tokens that one request gets per second while an instance serves it."""


class Demand:
    """Sums over the answered requests of each policy. Older steps count less and less."""

    def __init__(self) -> None:
        self._sums: dict[PolicyName, _Sums] = defaultdict(_Sums)
        self._steps = 0.0

    def answered(self, policy: PolicyName, *, tokens: int, serving_s: float) -> None:
        """Counts a request for which an instance sampled `tokens`, and which it served for `serving_s`."""
        if tokens and serving_s > 0:
            sums = self._sums[policy]
            sums.answers += 1
            sums.tokens += tokens
            sums.squares += tokens**2
            sums.serving_s += serving_s

    def step_ended(self) -> None:
        """Ends a step: the weight of all answers so far falls."""
        for sums in self._sums.values():
            sums.fade()
        self._steps = KEPT_PER_STEP * (self._steps + 1)

    def expected(self, policy: PolicyName) -> Expectation | None:
        """Estimates for the policy's requests; None if it has answered none yet."""
        sums = self._sums.get(policy)
        if sums is None or not sums.answers:
            return None
        return Expectation(
            tokens=sums.tokens / sums.answers,
            tokens_left=sums.squares / (2 * sums.tokens),
            tokens_per_s=sums.tokens / sums.serving_s,
        )

    @property
    def work(self) -> Mapping[PolicyName, float]:
        """Mean seconds of serving per step for each policy, over the last steps. Read it between steps."""
        return {policy: sums.serving_s / self._steps for policy, sums in self._sums.items() if self._steps}
