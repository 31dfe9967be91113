"""Decides advantages by presets of the group-relative estimator: what each paper compares, centres and scales by.

Decides advantages as we recommend: compared per agent, centred, not scaled, a lone row teaches nothing.

Decides advantages as GRPO does over all turns of a task, whoever spoke.

Decides advantages as Dr.MAS does: GRPO inside each agent.

Decides advantages as Dr.GRPO does: GRPO without the division by the standard deviation.

Decides advantages as rLLM does: GRPO inside each agent, with the population's standard deviation.

Decides advantages as GRPO does over the episodes of a task, however many turns each took.

Decides advantages as RLOO does: a turn's reward less the mean of the others'.

Decides advantages as RLOO does with one observation per episode, the reward of its first turn.

Decides advantages as MaxRL does: distance from the group's mean in units of that mean.

Decides advantages as OPO does: against the mean reward of a token, not of a turn.

Decides advantages as REINFORCE++-baseline does: centred in the group, then whitened over the step.

Decides advantages as GPG does: centred, and larger the more rewards of the step are 0.

Decides advantages as AT-GRPO does: GRPO inside each agent and turn, among acts with one and the same prompt.

Decides advantages for the best of k: the best turn is reinforced by its lead over the second best.

Decides advantages for teams in which some agents play several times an episode, and others once.
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
    """Each agent's turns on a task against their mean. The base class's defaults, unchanged.

    Why not scaled: dividing by the standard deviation favours nearly solved and nearly hopeless tasks and magnifies
    small penalties.
    """

    type: Literal["default"] = "default"


class Grpo(GroupRelative):
    """GRPO (arXiv 2402.03300) with verl's conventions: std with ddof 1, eps 1e-6, a lone row keeps its reward."""

    type: Literal["grpo"] = "grpo"
    key: GroupKey = ("task",)
    scale: Scale = "std"
    singleton: Singleton = "raw"


class DrMas(GroupRelative):
    """GRPO with each agent's own mean and deviation, so that agents on other reward scales do not disturb it."""

    type: Literal["drmas"] = "drmas"
    scale: Scale = "std"
    singleton: Singleton = "raw"


class DrGrpo(GroupRelative):
    """Dr.GRPO (arXiv 2503.20783); its paper sums losses over tokens and divides by a constant horizon."""

    type: Literal["dr_grpo"] = "dr_grpo"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"


class Rllm(GroupRelative):
    """rLLM's GRPO over task and agent: ddof 0, eps 1e-6."""

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
    """RLOO (arXiv 2402.14740): unbiased, since a row's own reward is not in its baseline."""

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
    """A = (r - mean) / mean: rare successes count most. Rewards must not be negative; 0 where all of them are 0."""

    type: Literal["max_rl"] = "max_rl"
    key: GroupKey = ("task",)
    scale: Scale = "mean"


class Opo(GroupRelative):
    """OPO (arXiv 2505.23585): with rewards weighted by length, advantages of all tokens of a group sum to 0."""

    type: Literal["opo"] = "opo"
    key: GroupKey = ("task",)
    centre: Centre = "length_weighted"
    singleton: Singleton = "raw"


class ReinforcePPBaseline(GroupRelative):
    """REINFORCE++-baseline (arXiv 2501.03262): one scale for all groups, instead of each group's own deviation."""

    type: Literal["reinforce++_baseline"] = "reinforce++_baseline"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"
    whiten: Scope = "policy"
    """Whose tokens share one mean and variance; the paper has one policy, and takes the batch."""

    @property
    def needs(self) -> Needs:
        """The whole step, over which it whitens."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages, whitened."""
        return whiten(super().estimate(rows, memory), rows, self.whiten)


class Gpg(GroupRelative):
    """GPG (arXiv 2504.02546): A = alpha (r - mean), alpha = rows of the step / those with an outcome other than 0.

    The outcome, and not the reward: else a price of a millionth would turn every failure into a row that counts.
    """

    type: Literal["gpg"] = "gpg"
    key: GroupKey = ("task",)
    singleton: Singleton = "raw"

    @property
    def needs(self) -> Needs:
        """The whole step, whose rewards are counted."""
        return "batch"

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """The group-relative advantages times alpha."""
        credit = super().estimate(rows, memory)
        outcomes = [row.reward if row.outcome is None else row.outcome for row in rows if row.num_tokens]
        alpha = len(outcomes) / max(sum(map(bool, outcomes)), 1)
        return replace(credit, advantages={name: alpha * value for name, value in credit.advantages.items()})


class AtGrpo(GroupRelative):
    """AT-GRPO (arXiv 2510.11062). After the first turn only tree sampling gives several acts with equal prompts.

    Where one context is required, each context is a group of its own: several branches or episodes are compared with
    their like. With flat sampling later turns differ in their prompts; `require: [one_task]` compares them all the
    same.
    """

    type: Literal["atgrpo"] = "atgrpo"
    key: GroupKey = ("task", "agent", "turn")
    require: tuple[Requirement, ...] = ("one_task", "one_context")
    unit: Unit = "act"
    scale: Scale = "std"
    singleton: Singleton = "zero_unless_all"

    @property
    def needs_branches(self) -> bool:
        """Without them only first turns have one context."""
        return "one_context" in self.require

    @property
    def grouping(self) -> GroupKey:
        """The key and the context, where one is required."""
        return also(self.key, "context_hash") if "one_context" in self.require else self.key

    def groups(self, rows: Sequence[CreditRow]) -> dict[Group, list[CreditRow]]:
        """The groups. Raises CreditError where candidates of one branch have seen different things."""
        branched = led([row for row in rows if row.num_tokens and "path" in row.tags])
        group_rows(branched, ("task", "episode", "branch"), [each for each in self.require if each == "one_context"])
        return super().groups(rows)


class PassAtK(Grouped):
    """The best act of a group gets (best - second best) / (std + eps), in all its calls, every other 0; so do ties.

    What the group as a whole achieves is its best act, and only that one's lead says who made it (arXiv 2503.19595).
    """

    type: Literal["pass@k"] = "pass@k"
    key: GroupKey = ("task",)
    scale: Literal["none", "std"] = "std"
    """Whether the lead is divided by the group's standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    ddof: Literal[0, 1] = 1
    """1: the sample's standard deviation; 0: the population's."""
    singleton: Singleton = "error"

    def num_observations(self, members: Sequence[CreditRow]) -> int:
        """Acts: the calls of the best one are no ties."""
        return len(places_of_acts(members))

    def _compare(self, members: Sequence[CreditRow]) -> Scores:
        x, act_of_row = means_of_acts(members, rewards_of(members))
        second, best = np.sort(x)[-2:]
        if best == second:
            return np.zeros(len(members))
        divisor = x.std(ddof=self.ddof) + self.eps if self.scale == "std" else 1.0
        return np.where(x == best, (best - second) / divisor, 0.0)[act_of_row]


class Hierarchical(GroupRelative):
    """A proposer's turns are compared across the task, those of its solvers inside the episode of their proposal."""

    type: Literal["hierarchical"] = "hierarchical"
    episode_roles: tuple[AgentName, ...] = ()
    """Agents compared inside their episode; `key` follows from it, unless it is given."""

    @model_validator(mode="before")
    @classmethod
    def _key_follows_from_roles(cls, given: Any) -> Any:
        roles = given.get("episode_roles", ()) if isinstance(given, dict) else None
        # Roles that are no names are refused by their own field.
        if not isinstance(roles, list | tuple) or not all(isinstance(role, str) for role in roles) or "key" in given:
            return given
        return {**given, "key": {**dict.fromkeys(roles, ("episode", "agent")), "*": ("task", "agent")}}
