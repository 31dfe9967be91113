"""Decides advantages as GiGPO does: each episode against its group, and each call against calls in the same state."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import groupby
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.estimators.base import EstimatorBase
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, LaterCalls, in_order
from flexmarl.credit.returns import discounted_returns, own_rewards
from flexmarl.credit.rows import also, group_rows
from flexmarl.credit.shaping.shape import PART as PENALTY
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, SampleId

ANCHOR, ENV_STEP, STEP_REWARD = "anchor", "env_step", "step_reward"
"""Tags that a workflow gives: the observation of the environment, its step number, and the reward of that step if
`reply.reward` does not give it."""


class GiGpo(EstimatorBase):
    """GiGPO (arXiv 2505.10978): A = E + w S.

    E   rewards, compared in the groups of `key`
    S   returns from an environment step on, compared inside those groups between calls with the same `anchor`

    A step's reward is its tag `step_reward`, the same for all its calls, minus the penalties of its invalid calls.
    Without the tag it is the sum of the rewards of its acts and calls themselves, each counted once; the reward of a
    call's agent or team then comes after the last step.
    """

    follows_calls: ClassVar[bool] = True

    type: Literal["gigpo"] = "gigpo"
    key: GroupKey = ("task", "agent")
    """Tags whose equal values form a group. A key must hold `task`: states of two tasks are never the same."""
    unit: Literal["row", "trajectory_first"] = "row"
    """Observations of E: every row, or each episode's first row."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    """Both parts minus their mean; or also divided by the standard deviation (ddof 1) plus `eps`."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    step_weight: float = Field(default=1.0, ge=0)
    """w: weight of S."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per environment step, in S."""
    similarity: float | None = Field(default=None, gt=0, lt=1)
    """Anchors at least this similar (difflib's ratio) count as the same. The time is quadratic in their number."""

    @property
    def later_calls(self) -> LaterCalls:
        """The returns S."""
        return LaterCalls(scope="team", gamma=self.gamma)

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True with a discount: of episodes with equal rewards, the quicker ones are better."""
        return self.step_weight > 0 and self.gamma < 1

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """E + w S. Weights and report are those of E."""
        ordered = in_order(rows)
        scores = self._step_scores([row for row in ordered if row.num_tokens])
        steps = [replace(row, reward=scores[row.sample_id]) for row in ordered if row.num_tokens]
        whole = self._compare(self.key, unit=self.unit, singleton="raw").estimate(rows)
        part = self._compare(also(self.key, ANCHOR), unit="row", singleton="zero").estimate(self._anchored(steps))
        advantages = {
            sample_id: advantage + self.step_weight * part.advantages.get(sample_id, 0.0)
            for sample_id, advantage in whole.advantages.items()
        }
        return replace(whole, advantages=advantages)

    def _compare(
        self, key: GroupKey, *, unit: Literal["row", "trajectory_first"], singleton: Literal["raw", "zero"]
    ) -> GroupRelative:
        scale = "std" if self.mode == "mean_std_norm" else "none"
        return GroupRelative(key=key, unit=unit, scale=scale, eps=self.eps, ddof=1, singleton=singleton)

    def _step_scores(self, ordered: Sequence[CreditRow]) -> dict[SampleId, float]:
        """The return of each row's step: R_k = r_k + gamma R_next over the environment steps of its episode."""
        scores: dict[SampleId, float] = {}
        for _, of_episode in groupby(ordered, key=lambda row: (row.task, row.episode)):
            played = list(of_episode)
            own = dict(zip((row.sample_id for row in played), own_rewards(played).tolist(), strict=True))
            steps = [list(calls) for _, calls in groupby(sorted(played, key=_env_step), key=_env_step)]
            returns = discounted_returns([_reward_of(calls, own) for calls in steps], gamma=self.gamma)
            for k, calls in enumerate(steps):
                left = self.gamma ** (len(steps) - 1 - k)
                for row in calls:
                    after = 0.0 if STEP_REWARD in row.tags else left * row.shared_reward
                    scores[row.sample_id] = float(returns[k]) + after
        return scores

    def _anchored(self, rows: Sequence[CreditRow]) -> list[CreditRow]:
        """The rows, where each anchor is replaced by the first similar anchor of its group."""
        if self.similarity is None:
            return list(rows)
        found: list[CreditRow] = []
        for members in group_rows(rows, self.key).values():
            anchors: list[str] = []
            for row in members:
                anchor = str(row.tag(ANCHOR))
                same = next((known for known in anchors if self._similar(anchor, known)), None)
                if same is None:
                    anchors.append(anchor)
                found.append(replace(row, tags={**row.tags, ANCHOR: anchor if same is None else same}))
        return found

    def _similar(self, anchor: str, known: str) -> bool:
        assert self.similarity is not None
        return SequenceMatcher(None, anchor, known).ratio() >= self.similarity


def _env_step(row: CreditRow) -> int:
    step = row.tag(ENV_STEP)
    if not isinstance(step, int):
        raise CreditError(f"sample {row.sample_id} of agent {row.agent} has {ENV_STEP} {step!r}; it must be a number")
    return step


def _reward_of(calls: Sequence[CreditRow], own: Mapping[SampleId, float]) -> float:
    given = {row.tags[STEP_REWARD] for row in calls if STEP_REWARD in row.tags}
    if not given:
        return sum(own[row.sample_id] for row in calls)
    if len(given) > 1 or any(STEP_REWARD not in row.tags for row in calls):
        raise CreditError(
            f"{STEP_REWARD}: the calls of environment step {_env_step(calls[0])} of episode {calls[0].episode} do not "
            f"agree on it: {', '.join(map(str, sorted(given, key=str)))}; give all of them what the step earned"
        )
    (earned,) = map(float, given)
    if not abs(earned) <= LARGEST_REWARD:
        raise CreditError(
            f"{STEP_REWARD}: environment step {_env_step(calls[0])} of episode {calls[0].episode} has {earned:g}; it "
            f"must be finite, and at most {LARGEST_REWARD:g}, as rewards are"
        )
    return earned + sum(row.parts.get(PENALTY, 0.0) for row in calls)
