"""Events of the pool: answered calls, and loads, losses and moves of instances.

In: nothing. Out: the types that journal, monitor, balance and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.episode import FinishReason, Purpose
from flexmarl.records.ids import GroupId, InstanceId, PolicyName, Version, split_sample_id, split_trajectory_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Timed):
    """An instance answered a call. `began` is when this instance was given the call."""

    name: ClassVar[str] = "call"
    policy: PolicyName
    """The policy that was asked."""
    request: str
    """Id of the request; for a turn, its sample id."""
    version: Version
    """The version that sampled the first token of the answer."""
    prompt_tokens: int
    """Number of tokens of the prompt."""
    reused_tokens: int
    """Number of prompt tokens, and of tokens that a move kept, whose keys and values the instance still had."""
    sampled_tokens: int
    """Number of tokens of the answer."""
    finish: FinishReason
    """Why the answer ended."""
    purpose: Purpose = Purpose.TRAINING
    """Why the call's episode was played."""
    kept_tokens: int = 0
    """Number of tokens of the answer that earlier instances sampled, before they were moved."""
    waited_s: float = 0.0
    """Seconds that the call waited in the pool for an instance; 0 if earlier instances sampled a part of the answer."""

    @property
    def instance(self) -> InstanceId:
        """The instance that answered."""
        return self.process.instance

    @property
    def computed_tokens(self) -> int:
        """Tokens that the instance had to compute before it sampled: the prompt's, and those that a move kept."""
        return self.prompt_tokens + self.kept_tokens - self.reused_tokens

    @property
    def trajectory(self) -> str:
        """The trajectory id of the episode that the call belongs to."""
        return split_sample_id(self.request)[2]

    @property
    def group(self) -> GroupId:
        """The group that the call belongs to."""
        return GroupId(split_trajectory_id(self.trajectory)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Timed):
    """An instance serves new weights. Their checksum matches the published one."""

    name: ClassVar[str] = "loaded"
    policy: PolicyName
    """The policy that the weights belong to."""
    version: Version
    """The version of the weights."""
    checksum: str
    """The checksum that the instance computed."""

    @property
    def instance(self) -> InstanceId:
        """The instance."""
        return self.process.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost(Event):
    """The pool gave up an instance, or a replacement that could not be started."""

    name: ClassVar[str] = "instance_lost"
    instance: InstanceId
    """The instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReplaced(Timed):
    """An instance serves in place of a lost one. `began` is when the pool lost the instance."""

    name: ClassVar[str] = "instance_replaced"
    instance: InstanceId
    """The new instance."""
    replaces: InstanceId
    """The lost instance."""
    version: Version
    """The version that the new instance serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Timed):
    """An instance serves another policy from now on."""

    name: ClassVar[str] = "moved"
    instance: InstanceId
    """Its id before the move."""
    to: PolicyName
    """The policy that it was moved to."""
    became: InstanceId
    """Its id after the move."""
    expected_s: float = 0.0
    """Seconds that the rule which decided it expected it to take; 0 if no rule did."""
    starts: bool = False
    """True if the engine ended and another one was started in its place, as it could not load the other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFailed(Event):
    """An instance could not be moved. `because` says why, and what became of it."""

    name: ClassVar[str] = "move_failed"
    instance: InstanceId
    """The instance."""
    to: PolicyName
    """The policy that it was meant to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceDecided(Event):
    """The balancer decided: with loads that have changed and requests that wait, or at the end of a rollout.

    The line has all inputs of the decision, so that `flexmarl simulate --loads` can decide again.
    """

    name: ClassVar[str] = "balance_decided"
    rule: str
    """`balance.rule` for the queues, `balance.start` at the end of a rollout, `grow` for a further instance."""
    loads: Mapping[PolicyName, Any]
    """By policy, the fields of a `PolicyLoad` (inference/scaling.py)."""
    move_s: float = 0.0
    """Seconds that a move was expected to take."""
    basis: Mapping[PolicyName, float] = field(default_factory=dict)
    """At the end of a rollout, by policy: configured instances, or seconds of work per step."""
    room: tuple[PolicyName, ...] = ()
    """For `grow`, the policies whose instances had room."""
    moves: tuple[Mapping[str, Any], ...] = ()
    """The moves that were decided: instance, target and reason of each."""
    grows: str = ""
    """The policy that got a further instance; empty if none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceGrown(Timed):
    """A policy has an instance more than it began with. `began` is when its start was decided."""

    name: ClassVar[str] = "instance_grown"
    instance: InstanceId
    """The new instance."""
    version: Version
    """The version that it serves."""
    expected_s: float = 0.0
    """Seconds that the rule which decided it expected until it serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthFailed(Event):
    """A further instance could not be started. Its policy gets none until the next step."""

    name: ClassVar[str] = "growth_failed"
    policy: PolicyName
    """The policy that it was meant to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceRetired(Timed):
    """A grown instance ended, because its room was missed elsewhere. `began` is when that was decided."""

    name: ClassVar[str] = "instance_retired"
    instance: InstanceId
    """The instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueCounts(Event):
    """The queues changed since the monitor last counted them. The counts hold until the next event."""

    name: ClassVar[str] = "queues"
    running: Mapping[str, int]
    """Calls that engines compute, by policy."""
    queued: Mapping[str, int]
    """Calls that wait in the pool or at their instance, by policy."""
    lag_ms: float
    """The longest delay since then with which the event loop woke a sleeping task, in milliseconds."""
