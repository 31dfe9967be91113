"""Decides advantages against what each agent is used to: a moving average of its rewards over all tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from pydantic import Field

from flexmarl.credit.estimators.grouped import rewards_of
from flexmarl.credit.estimators.ungrouped import Ungrouped, weighted
from flexmarl.credit.interface import Credit, CreditRow, Needs, in_order
from flexmarl.records import SampleId


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
