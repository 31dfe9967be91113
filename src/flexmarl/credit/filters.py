"""Decides which tasks are worth training on, by whether the rewards of their groups differ (docs/math.md section 6).

`effect_of`       judges one group: effective, too easy, too hard or flat
`describe`        reports a group, and whether only penalties make its rewards differ
`OutcomeFilter`   drops tasks without an effective group (DAPO's dynamic sampling)
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from flexmarl.credit.interface import AgentReport, CreditRow, GroupKey, in_order
from flexmarl.credit.rows import group_rows
from flexmarl.records import AgentName
from flexmarl.settings import Settings


def _ordered(given: tuple[float, float]) -> tuple[float, float]:
    bottom, top = given
    if bottom >= top:
        raise ValueError(f"reward_range: {bottom} is not below {top}; give the worst reward, then the best")
    return given


RewardRange = Annotated[tuple[float, float], AfterValidator(_ordered)]
"""Worst and best reward."""


class Effect(StrEnum):
    """Verdict on a group: its rewards differ, or all are at the top, all at the bottom, or all equal in between."""

    EFFECTIVE = "effective"
    TOO_EASY = "too_easy"
    TOO_HARD = "too_hard"
    FLAT = "flat"


def effect_of(rewards: Sequence[float], *, tol: float, bottom: float, top: float) -> Effect:
    """EFFECTIVE if max - min > tol. Otherwise TOO_EASY at `top` or above, TOO_HARD at `bottom` or below, else FLAT.

    >>> str(effect_of([1.0, 1.0], tol=1e-6, bottom=0.0, top=1.0))
    'too_easy'
    """
    if max(rewards) - min(rewards) > tol:
        return Effect.EFFECTIVE
    if min(rewards) >= top - tol:
        return Effect.TOO_EASY
    if max(rewards) <= bottom + tol:
        return Effect.TOO_HARD
    return Effect.FLAT


def describe(members: Sequence[CreditRow], *, size: int, tol: float, reward_range: tuple[float, float]) -> AgentReport:
    """Reports one group of `size` observations. All rows of `members` have rewards."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterDecision:
    """Decision to train on a task or to drop it."""

    task: str
    kept: bool
    reason: Effect
    """EFFECTIVE if the task is kept. Otherwise the verdict on its groups if they agree, else FLAT."""
    because: str
    """The reason in words, for the journal."""
    effects: Mapping[AgentName, Mapping[Effect, int]]
    """Number of each agent's groups with each verdict."""


class OutcomeFilter(Settings):
    """Keeps a task if a trained agent has a group whose rewards differ, or its estimator learns from equal rewards."""

    filter_on: Literal["outcome", "final"] = "outcome"
    """outcome: compare rewards before penalties, time and process terms, so that a penalty alone keeps no solved task.
    final: compare rewards after them."""
    tol: float = Field(default=1e-6, ge=0)
    """Rewards that differ by at most this much count as equal."""
    reward_range: RewardRange = (0.0, 1.0)
    """Worst and best reward. A group with the worst alone is too hard, with the best alone too easy."""
    refill: bool = Field(
        default=False,
        description="sync, microbatch, colocated: play other tasks in place of those that are dropped. The "
        "asynchronous modes always do.",
    )
    max_gen_batches: int = Field(
        default=10, ge=1, description="refill: a step plays at most this many times batch.groups tasks."
    )
    on_shortfall: Literal["train_short", "error", "unfiltered"] = Field(
        default="train_short",
        description="refill: what follows when that many were played and too few are kept: train on fewer, end the "
        "run, or keep those that were dropped last, unfiltered.",
    )

    @model_validator(mode="after")
    def _shortfall_needs_refill(self) -> "OutcomeFilter":
        if self.on_shortfall != "train_short" and not self.refill:
            raise ValueError(
                f"on_shortfall: '{self.on_shortfall}' applies when refill does not suffice, but refill is "
                f"false; use refill=true, or on_shortfall=train_short"
            )
        return self

    def decide(
        self,
        rows: Sequence[CreditRow],
        *,
        key: GroupKey = ("task", "agent"),
        learn_from_equal: Callable[[AgentName], bool] = lambda agent: False,
    ) -> tuple[FilterDecision, ...]:
        """One decision per task of the rows, in the order of the tasks.

        Each agent is judged separately, in the groups of `key`, the estimator's key. Groups never span tasks here, even
        if they do in `key`. A task without sampled tokens in rows that train is FLAT. `learn_from_equal(agent)` is True
        if the agent's estimator learns from groups whose rewards are equal.
        """
        tasks: dict[str, list[CreditRow]] = {}
        for row in in_order(rows):
            tasks.setdefault(row.task, []).append(row)
        decisions = [_decision(task, self._effects(members, key), learn_from_equal) for task, members in tasks.items()]
        return tuple(self._with_hint(decision, tasks[decision.task], key) for decision in decisions)

    def _with_hint(self, decision: FilterDecision, rows: Sequence[CreditRow], key: GroupKey) -> FilterDecision:
        """Says of a task that is dropped if the workflow's own parts of the rewards differ, though outcomes do not."""
        if decision.kept or self.filter_on == "final":
            return decision
        asked = [replace(row, outcome=(row.reward or 0.0) - sum(row.prices.values())) for row in rows]
        effects = self._effects(asked, key)
        differing = ", ".join(agent for agent, counts in effects.items() if counts[Effect.EFFECTIVE])
        outcomes = decision.because.replace("rewards differ", "outcomes differ")
        hint = f"{outcomes}; rewards with their other parts do, for {differing}: credit.filter.filter_on=final"
        return replace(decision, because=hint) if differing else decision

    def _effects(self, rows: Sequence[CreditRow], key: GroupKey) -> dict[AgentName, Counter[Effect]]:
        effects: dict[AgentName, Counter[Effect]] = {}
        bottom, top = self.reward_range
        for members in group_rows([row for row in rows if row.num_tokens], key).values():
            for agent in {row.agent: None for row in members}:
                own = [row for row in members if row.agent == agent]
                if any(row.trains for row in own):
                    effect = effect_of([self.compared(row) for row in own], tol=self.tol, bottom=bottom, top=top)
                    effects.setdefault(agent, Counter())[effect] += 1
        return effects

    def compared(self, row: CreditRow) -> float:
        """The reward by which the row's group is judged."""
        chosen = row.reward if self.filter_on == "final" or row.outcome is None else row.outcome
        assert chosen is not None, "in_order refuses rows without a reward"
        return chosen


def _decision(
    task: str, effects: Mapping[AgentName, Counter[Effect]], learn_from_equal: Callable[[AgentName], bool]
) -> FilterDecision:
    total = sum(effects.values(), Counter[Effect]())
    if total[Effect.EFFECTIVE]:
        reason = Effect.EFFECTIVE
        learning = ", ".join(agent for agent, counts in effects.items() if counts[Effect.EFFECTIVE])
        because = f"rewards differ for {learning}"
    elif learning := ", ".join(filter(learn_from_equal, effects)):
        reason = Effect.EFFECTIVE
        because = f"rewards are equal, from which {learning} may learn too"
    else:
        reason = next(iter(total)) if len(total) == 1 else Effect.FLAT
        counted = ", ".join(f"{count} {effect}" for effect, count in sorted(total.items())) or "no sampled tokens"
        because = f"no group's rewards differ: {counted}"
    return FilterDecision(task=task, kept=reason is Effect.EFFECTIVE, reason=reason, because=because, effects=effects)
