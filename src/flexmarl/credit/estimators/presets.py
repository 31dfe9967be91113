"""Decides advantages under the names of papers and projects: the group-relative estimator with their defaults.

Most classes only set defaults of `GroupRelative`; docs/math.md section 5 has them in a table. `ReinforcePPBaseline`,
`Gpg` and `AtGrpo` add a step of their own, `Hierarchical` derives its key, and `PassAtK` has its own formula.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from flexmarl.credit.estimators.base import Grouped, Scores, Singleton, rewards_of
from flexmarl.credit.estimators.group_relative import Centre, GroupRelative, Scale, Unit
from flexmarl.credit.interface import Credit, CreditRow, GroupKey, Needs
from flexmarl.credit.order import Scope, whiten
from flexmarl.credit.rows import Group, Requirement, also, group_rows, led, means_of_acts, places_of_acts
from flexmarl.records import AgentName


class Default(GroupRelative):
    """Our recommendation: each agent's turns on a task against their mean, not scaled. A lone row has advantage 0.

    These are the base class's defaults. Advantages are not scaled because dividing by the standard deviation favours
    nearly solved and nearly hopeless tasks, and magnifies small penalties.
    """

    type: Literal["default"] = "default"


class Grpo(GroupRelative):
    """GRPO (arXiv 2402.03300) over all agents' turns on a task.

    Conventions are verl's: std with ddof 1, eps 1e-6; a lone row keeps its reward.
    """

    type: Literal["grpo"] = "grpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"


class DrMas(GroupRelative):
    """Dr.MAS: GRPO with each agent's own mean and deviation, so that other agents' reward scales do not disturb it."""

    type: Literal["drmas"] = "drmas"
    scale: Scale = "std"
    singleton: Singleton = "raw"


class DrGrpo(GroupRelative):
    """Dr.GRPO (arXiv 2503.20783): GRPO without the division by the standard deviation.

    Its paper also sums losses over tokens and divides by a constant horizon, which is a setting of the loss.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"


class Rllm(GroupRelative):
    """rLLM's GRPO over task and agent, with the population's standard deviation: ddof 0, eps 1e-6."""

    type: Literal["rllm"] = "rllm"
    scale: Scale = "std"
    ddof: Literal[0, 1] = 0
    singleton: Singleton = "raw"


class GrpoTrajectory(GroupRelative):
    """GRPO with one observation per episode, the mean of its turns: long episodes weigh no more than short ones."""

    type: Literal["grpo_trajectory"] = "grpo_trajectory"
    key: GroupKey = ("task",)
    unit: Unit = "trajectory_mean"
    scale: Scale = "std"
    singleton: Singleton = "raw"


class Rloo(GroupRelative):
    """RLOO (arXiv 2402.14740): a turn's reward minus the mean of the other turns' rewards.

    It is unbiased, since a row's own reward is not in its baseline.
    """

    type: Literal["rloo"] = "rloo"
    key: GroupKey = ("task",)
    centre: Centre = "leave_one_out"
    singleton: Singleton = "raw"


class RlooTrajectory(GroupRelative):
    """Dr.MAS's RLOO over whole episodes: A = n/(n-1) (reward - mean of the episodes' first rewards)."""

    type: Literal["rloo_trajectory"] = "rloo_trajectory"
    key: GroupKey = ("task",)
    unit: Unit = "trajectory_first"
    centre: Centre = "leave_one_out"
    singleton: Singleton = "raw"


class MaxRl(GroupRelative):
    """MaxRL: A = (r - mean) / mean, so rare successes count most. No reward may be negative; A = 0 if all are 0."""

    type: Literal["max_rl"] = "max_rl"
    key: GroupKey = ("task",)
    scale: Scale = "mean"


class Opo(GroupRelative):
    """OPO (arXiv 2505.23585): the baseline is the mean reward per token, so a group's token advantages sum to 0."""

    type: Literal["opo"] = "opo"
    key: GroupKey = ("task",)
    centre: Centre = "length_weighted"
    singleton: Singleton = "raw"


class ReinforcePPBaseline(GroupRelative):
    """REINFORCE++-baseline (arXiv 2501.03262): centred in the group, then whitened.

    All groups thus have one scale, instead of each group's own deviation.
    """

    type: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"
    whiten: Scope = "policy"
    """Tokens that share one mean and variance. The paper has one policy and takes the batch."""

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages, whitened."""
        return whiten(super().estimate(rows, memory), rows, self.whiten)


class Gpg(GroupRelative):
    """GPG (arXiv 2504.02546): A = alpha (r - mean), alpha = rows of the step / those with an outcome other than 0.

    alpha counts outcomes and not rewards: with rewards, a price of a millionth would turn every failure into a row that
    counts.
    """

    type: Literal["gpg"] = "gpg"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"

    @property
    def needs(self) -> Needs:
        """The whole step, whose outcomes are counted."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages times alpha."""
        credit = super().estimate(rows, memory)
        outcomes = [row.reward if row.outcome is None else row.outcome for row in rows if row.num_tokens]
        alpha = len(outcomes) / max(sum(map(bool, outcomes)), 1)
        return replace(credit, advantages={name: alpha * value for name, value in credit.advantages.items()})


class AtGrpo(GroupRelative):
    """AT-GRPO (arXiv 2510.11062): GRPO inside each agent and turn, among acts with the same prompt.

    If one context is required, each context is a group of its own, so that branches and episodes are compared only with
    their like. After the first turn, only tree sampling gives several acts with the same prompt. With flat sampling,
    `require: [one_task]` compares later turns although their prompts differ.
    """

    type: Literal["atgrpo"] = "atgrpo"
    key: GroupKey = ("task", "agent", "turn")
    require: tuple[Requirement, ...] = ("one_task", "one_context")
    unit: Unit = "act"
    scale: Scale = "std"
    singleton: Singleton = "zero_unless_all"

    @property
    def needs_branches(self) -> bool:
        """True if one context is required: without candidates, only first turns share a context."""
        return "one_context" in self.require

    @property
    def grouping(self) -> GroupKey:
        """The key, and the context if one context is required."""
        return also(self.key, "context_hash") if "one_context" in self.require else self.key

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups. Raises CreditError if candidates of one branch have different contexts."""
        branched = led([row for row in rows if row.num_tokens and row.path])
        group_rows(branched, ("task", "episode", "branch"), [each for each in self.require if each == "one_context"])
        return super().groups(rows)


class PassAtK(Grouped):
    """The best act of a group gets (best - second best) / (std + eps) in all its calls. All others, and ties, get 0.

    The group achieves what its best act achieves, and the lead of that act is what it contributed (arXiv 2503.19595).
    """

    type: Literal["pass@k"] = "pass@k"
    key: GroupKey = ("task",)
    scale: Literal["none", "std"] = "std"
    """Divide the lead by the group's standard deviation (std) or not (none)."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation; 0: the population's."""
    singleton: Singleton = "error"

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Number of acts, so that the calls of the best act do not tie with one another."""
        return len(places_of_acts(members))

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        x, act_of_row = means_of_acts(members, rewards_of(members))
        second, best = np.sort(x)[-2:]
        if best == second:
            return np.zeros(len(members))
        divisor = x.std(ddof=self.ddof) + self.eps if self.scale == "std" else 1.0
        return np.where(x == best, (best - second) / divisor, 0.0)[act_of_row]


class Hierarchical(GroupRelative):
    """Compares a proposer's turns across the task, and its solvers' turns inside the episode of their proposal.

    It is for teams in which some agents play several times an episode, and others once.
    """

    type: Literal["hierarchical"] = "hierarchical"
    episode_roles: tuple[AgentName, ...] = ()
    """Agents that are compared inside their episode. `key` follows from them unless it is given."""

    @model_validator(mode="before")
    @classmethod
    def _key_follows_from_roles(cls, given: Any) -> Any:
        roles = given.get("episode_roles", ()) if isinstance(given, dict) else None
        # Invalid roles are refused later, by the validation of their own field.
        if not isinstance(roles, list | tuple) or not all(isinstance(role, str) for role in roles) or "key" in given:
            return given
        return {**given, "key": {**dict.fromkeys(roles, ("episode", "agent")), "*": ("task", "agent")}}
