"""Decides what to expect of a policy's requests, from those it has answered: how long they are, how fast they go.

    tokens to expect of a request that waits     E[L]
    tokens to expect of a request that runs      E[L^2] / 2 E[L]: long ones are met running more often

Nothing is known of the lengths of the requests at hand; all of this is observed.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.records import PolicyName

KEPT_PER_STEP = 0.95
"""What a step's answers still count when the next one ends: about twenty steps are remembered. Tasks differ so much
that five steps allocate by chance."""


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
    """Estimates for one policy."""

    tokens: float
    """Of a request that waits."""
    tokens_left: float
    """Of a request that runs."""
    tokens_per_s: float
    """Of one request while an instance serves it."""


class Demand:
    """What was seen of every policy's requests, older steps fading."""

    def __init__(self) -> None:
        self._sums: dict[PolicyName, _Sums] = defaultdict(_Sums)
        self._steps = 0.0

    def answered(self, policy: PolicyName, *, tokens: int, serving_s: float) -> None:
        """An instance sampled `tokens` for one request and served it for so long."""
        if tokens and serving_s > 0:
            sums = self._sums[policy]
            sums.answers += 1
            sums.tokens += tokens
            sums.squares += tokens**2
            sums.serving_s += serving_s

    def step_ended(self) -> None:
        """What was seen up to now fades."""
        for sums in self._sums.values():
            sums.fade()
        self._steps = KEPT_PER_STEP * (self._steps + 1)

    def expected(self, policy: PolicyName) -> Expectation | None:
        """What to expect of the policy's requests; None: it has answered none yet."""
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
        """Seconds of serving that a step asked of each policy, on average over the last steps; ask between steps."""
        return {policy: sums.serving_s / self._steps for policy, sums in self._sums.items() if self._steps}
