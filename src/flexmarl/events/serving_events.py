"""Events of the pool: every answered call, and what becomes of instances.

In: nothing. Out: the types that journal, monitor, balance and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.episode import FinishReason
from flexmarl.records.ids import (
    GroupId,
    InstanceId,
    PolicyName,
    Version,
    split_sample_id,
    split_trajectory_id,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Timed):
    """An instance answered a call. It began when this instance was given it."""

    name: ClassVar[str] = "call"
    policy: PolicyName
    """The policy that was asked."""
    request: str
    """Id of the request: of a turn, its sample id."""
    version: Version
    """The version that began the answer."""
    prompt_tokens: int
    """All tokens of the prompt."""
    reused_tokens: int
    """Those of them whose keys and values the instance still had."""
    sampled_tokens: int
    """All tokens of the answer."""
    finish: FinishReason
    """Why it ended."""
    kept_tokens: int = 0
    """Of the answer's tokens, those that were sampled by instances that were moved then."""
    waited_s: float = 0.0
    """Seconds that the pool had no place for it; 0 for a call that goes on after an earlier part."""

    @property
    def instance(self) -> InstanceId:
        """The instance that answered."""
        return self.process.instance

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the instance had to compute."""
        return self.prompt_tokens - self.reused_tokens

    @property
    def trajectory(self) -> str:
        """The play of the task that the call is of."""
        return split_sample_id(self.request)[2]

    @property
    def group(self) -> GroupId:
        """The group that the call is of."""
        return GroupId(split_trajectory_id(self.trajectory)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Timed):
    """An instance serves new weights, whose checksum was the published one."""

    name: ClassVar[str] = "loaded"
    policy: PolicyName
    """Whose weights."""
    version: Version
    """Their version."""
    checksum: str
    """What the instance holds, by its own sum."""

    @property
    def instance(self) -> InstanceId:
        """The instance."""
        return self.process.instance


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost(Event):
    """The pool gave up an instance, or a replacement that never came to serve."""

    name: ClassVar[str] = "instance_lost"
    instance: InstanceId
    """The instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceReplaced(Timed):
    """An instance serves in place of a lost one. It began with the loss."""

    name: ClassVar[str] = "instance_replaced"
    instance: InstanceId
    """The new instance."""
    replaces: InstanceId
    """The lost one."""
    version: Version
    """What the new one serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved(Timed):
    """An instance serves another policy from now on."""

    name: ClassVar[str] = "moved"
    instance: InstanceId
    """Its id before."""
    to: PolicyName
    """The policy that it was moved to."""
    became: InstanceId
    """Its id now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveFailed(Event):
    """An instance could not be moved; `because` says why, and what became of it."""

    name: ClassVar[str] = "move_failed"
    instance: InstanceId
    """The instance."""
    to: PolicyName
    """The policy that it was to serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuesSeen(Event):
    """The monitor looked at the queues, and something had changed; it holds until the next look."""

    name: ClassVar[str] = "queues"
    running: Mapping[str, int]
    """Calls that engines compute, by policy."""
    queued: Mapping[str, int]
    """Calls that wait in the pool or at their instance, by policy."""
    lag_ms: float
    """The latest that the event loop woke somebody since the look before."""
