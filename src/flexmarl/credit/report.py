"""Decides what is reported of a group: whether its rewards can teach, and whether only penalties do."""

from collections.abc import Sequence

from flexmarl.credit.effect import Effect, effect_of
from flexmarl.credit.interface import AgentReport, CreditRow


def describe(members: Sequence[CreditRow], *, size: int, tol: float, reward_range: tuple[float, float]) -> AgentReport:
    """One group of `size` observations; all its rows have rewards."""
    bottom, top = reward_range
    rewards = [row.reward for row in members if row.reward is not None]
    outcomes = [reward if row.outcome is None else row.outcome for row, reward in zip(members, rewards, strict=True)]
    effect = effect_of(rewards, tol=tol, bottom=bottom, top=top)
    return AgentReport(
        groups=1,
        group_sizes=(size,),
        effective=effect is Effect.EFFECTIVE,
        too_easy=effect is Effect.TOO_EASY,
        too_hard=effect is Effect.TOO_HARD,
        flat=effect is Effect.FLAT,
        penalty_alone=effect is Effect.EFFECTIVE and max(outcomes) - min(outcomes) <= tol,
    )
