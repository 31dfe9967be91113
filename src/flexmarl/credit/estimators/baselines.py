"""Decides advantages without comparing the rows of a group: against nothing, the step, the past, or a greedy play.

`Reinforce`     the reward itself, compared with nothing (Williams 1992)
`ReinforcePP`   the discounted return of each token, whitened over the step
`Rae`           each reward against a moving average of its agent's rewards over all tasks
`ReMax`         each reward against that of a greedy play of the same task
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
    """A = reward. A row needs no other row, so it may be trained as soon as its own episode has ended.

    There is no baseline, so positive rewards make every sampled token more likely. Give rewards of both signs.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["reinforce"] = "reinforce"

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True: nothing is subtracted, so a reply that is always right is reinforced too."""
        return True

    @property
    def needs(self) -> Needs:
        """Each row alone."""
        return "row"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Every row's own reward. Rows without sampled tokens have weight 0."""
        ordered = in_order(rows)
        return weighted(ordered, {row.sample_id: row.reward or 0.0 for row in ordered if row.num_tokens})


class ReinforcePP(Ungrouped):
    """REINFORCE++ (arXiv 2501.03262): G_t = r_t + gamma G_next, then whitened, so that the step is its own baseline."""

    type: Literal["reinforce++"] = "reinforce++"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    whiten: Scope = "policy"
    """Tokens that share one mean and variance. The paper has one policy and takes the batch."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True: rewards are compared with those of other tasks."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Whitened returns, as advantages per token."""
        ordered = in_order(rows)
        followed = {
            row.sample_id: discounted_returns(token_rewards(row), gamma=self.gamma) for row in ordered if row.num_tokens
        }
        credit = weighted(ordered, {sample_id: float(of_row.mean()) for sample_id, of_row in followed.items()})
        return whiten(replace(credit, token_advantages=tokens_of(followed)), rows, self.whiten)


class Rae(Ungrouped):
    """Role-conditioned advantages (arXiv 2506.24119), for games in which agents are on different sides.

    Each agent has a baseline b, which is 0 before its first episode. Episodes come in the order of task and episode,
    and r is the mean reward of the agent's turns in an episode:

    A   r - b
    b   d b + (1 - d) r     afterwards
    """

    type: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """d: share of the baseline that remains after an episode."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True: past episodes may have had other rewards."""
        return True

    @property
    def needs(self) -> Needs:
        """The whole step, in order, and the baselines after the step before."""
        return "state"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """One advantage per agent and episode. `memory` holds the baseline of each agent."""
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
    """ReMax (arXiv 2310.10505): A_t = the return from token t on, minus the mean reward of the greedy play's turns.

    The whole team plays each task greedily once, in addition to the episodes. If an agent has no turn in that play, its
    rows on that task have no baseline, and their weight is 0.
    """

    has_fixed_baseline: ClassVar[bool] = True

    type: Literal["remax"] = "remax"
    key: GroupKey = ("task", "agent")
    """Groups that share a baseline: the same agent's turns of the greedy play; or, with [task], the whole team's."""

    @property
    def learns_from_equal_rewards(self) -> bool:
        """True: the greedy play may have another reward."""
        return True

    @property
    def uses(self) -> frozenset[Extra]:
        """One greedy play per group."""
        return frozenset[Extra]({"greedy"})

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Advantages per token. Greedy rows, and rows without a baseline, have weight 0."""
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
