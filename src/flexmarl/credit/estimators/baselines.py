"""Decides advantages without a group: against nothing, the step's mean, an agent's average, a greedy play.

Decides advantages as REINFORCE does: the reward itself, compared with nothing (Williams 1992).

Decides advantages as REINFORCE++ does: what follows each token, discounted, on one scale for the whole step.

Decides advantages against what each agent is used to: a moving average of its rewards over all tasks.

Decides advantages as ReMax does: each reward against that of a greedy play of the same task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from flexmarl.credit.estimators.base import EstimatorBase, Ungrouped, rewards_of, tokens_of, weighted
from flexmarl.credit.interface import Credit, CreditRow, Extra, GroupKey, Needs, in_order
from flexmarl.credit.order import Scope, whiten
from flexmarl.credit.returns import Steps, discounted_returns, token_rewards
from flexmarl.credit.rows import group_rows
from flexmarl.records import SampleId


class Reinforce(Ungrouped):
    """A = reward. Needs no other row, so that a row may be trained as soon as its own episode has ended.

    No baseline: rewards that are all positive push every sampled token up. Give rewards of both signs.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Nothing is taken off: what is always right is reinforced, too."""
        return True

    @property
    def needs(self) -> Needs:
        """Each row alone."""
        return "row"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Every row's own reward; rows without sampled tokens have weight 0."""
        ordered = in_order(rows)
        return weighted(ordered, {row.sample_id: row.reward or 0.0 for row in ordered if row.num_tokens})


class ReinforcePP(Ungrouped):
    """REINFORCE++ (arXiv 2501.03262): G_t = r_t + gamma G_next, then whitened; the step is its own baseline."""

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance; the paper has one policy, and takes the batch."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """They are compared with those of other tasks."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages per token."""
        ordered = in_order(rows)
        followed = {
            row.sample_id: discounted_returns(token_rewards(row), gamma=self.gamma) for row in ordered if row.num_tokens
        }
        credit = weighted(ordered, {sample_id: float(of_row.mean()) for sample_id, of_row in followed.items()})
        return whiten(replace(credit, token_advantages=tokens_of(followed)), rows, self.whiten)


class Rae(Ungrouped):
    """Role-conditioned advantages (arXiv 2506.24119), for games in which agents are on different sides.

    Episode by episode, in the order of task and episode, for each agent with the mean reward r of its turns in it:

    A   r - b               b is the agent's own, 0 before its first episode
    b   d b + (1 - d) r     afterwards
    """

    type: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """d: how much of the baseline an episode leaves in place."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """The past may have brought others."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, in order, and the baselines that the step before left."""
        return "state"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """One advantage per agent and episode; `memory` is the baseline of each agent."""
        ordered, baselines = in_order(rows), dict(memory)
        found: dict[SampleId, float] = {}
        for _, of_episode in groupby(ordered, key=lambda row: (row.task, row.episode)):
            turns = [row for row in of_episode if row.num_tokens]
            for agent in {row.agent: None for row in turns}:
                own = [row for row in turns if row.agent == agent]
                reward, baseline = float(rewards_of(own).mean()), baselines.get(agent, 0.0)
                found |= {row.sample_id: reward - baseline for row in own}
                baselines[agent] = self.decay * baseline + (1 - self.decay) * reward
        return replace(weighted(ordered, found), memory=baselines)


class ReMax(EstimatorBase):
    """ReMax (arXiv 2310.10505): A_t = what follows token t, less the mean reward of the greedy play's turns.

    The whole team plays greedily once per task, beside the episodes. An agent that had no turn in that play has nothing
    to be compared with on that task: its rows have weight 0.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["remax"] = "remax"
    key: GroupKey = ("task", "agent")
    """Whose turns of the greedy play are the baseline: the same agent's; or, with [task], the whole team's."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """The greedy play may have got another."""
        return True

    @property
    def uses(self) -> frozenset[Extra]:
        """A greedy play per group."""
        return frozenset[Extra]({"greedy"})

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages of all rows but the greedy ones, which have weight 0; per token where rewards are."""
        ordered = in_order(rows)
        found: dict[SampleId, Steps] = {}
        for members in group_rows([row for row in ordered if row.num_tokens], self.key).values():
            baseline = [row.reward for row in members if row.greedy and row.reward is not None]
            for row in members if baseline else ():
                if not row.greedy:
                    found[row.sample_id] = discounted_returns(token_rewards(row), gamma=1.0) - np.mean(baseline)
        credit = weighted(
            [row for row in ordered if not row.greedy],
            {sample_id: float(of_row.mean()) for sample_id, of_row in found.items()},
        )
        nothing = {row.sample_id: 0.0 for row in ordered if row.greedy}
        return replace(
            credit,
            advantages={**credit.advantages, **nothing},
            weights={**credit.weights, **nothing},
            token_advantages=tokens_of(found),
        )
