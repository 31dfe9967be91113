"""Events of trainers: micro-batches, updates, publications, and swaps of training state.

In: nothing. Out: the types that journal, monitor and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.ids import PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDone(Timed):
    """A micro-batch was added to the gradient sums of a policy."""

    name: ClassVar[str] = "micro_batch"
    policy: PolicyName
    """The policy."""
    micro_batch: str
    """Id of the micro-batch."""
    rows: int
    """How many rows it had."""
    tokens: float
    """Sum of its sampled tokens, each counted with its weight."""
    duration_s: float
    """Seconds that the trainer worked on it, by the trainer's own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Timed):
    """A policy was updated."""

    name: ClassVar[str] = "updated"
    policy: PolicyName
    """The policy."""
    version: Version
    """The version that the update made."""
    report: Mapping[str, Any]
    """Loss, gradient norm, learning rate, samples, tokens, and means per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSkipped(Event):
    """A policy was not updated, because the step had no token with a weight for it."""

    name: ClassVar[str] = "update_skipped"
    policy: PolicyName
    """The policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rested(Event):
    """A policy was not trained in a step, because `training.phases` lets it rest."""

    name: ClassVar[str] = "rested"
    policy: PolicyName
    """The policy."""
    step: int
    """The step, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Timed):
    """All instances of a policy serve new weights. `began` is when the trainer began to publish them."""

    name: ClassVar[str] = "published"
    policy: PolicyName
    """The policy."""
    version: Version
    """The version."""
    checksum: str
    """Checksum of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationDeferred(Event):
    """An update's weights do not reach the engines now: a later version will (`pipeline.publish`)."""

    name: ClassVar[str] = "publication_deferred"
    policy: PolicyName
    """The policy."""
    version: Version
    """The version that the update made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceCharged(Event):
    """The rewards of a batch were reduced by their divergence from the reference policy. The coefficient may change."""

    name: ClassVar[str] = "kl_in_reward"
    policy: PolicyName
    """The policy."""
    kl: float
    """Mean divergence of the batch's rows from the reference."""
    coef: float
    """The reward that a unit of divergence cost in this batch."""
    next_coef: float
    """The reward that a unit of divergence will cost in the next batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceReset(Event):
    """The reference of a policy became its present weights, and its optimiser began anew."""

    name: ClassVar[str] = "reference_reset"
    policy: PolicyName
    """The policy."""
    step: int
    """Number of completed steps."""
    version: Version
    """The version that is now the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Timed):
    """Micro-batches of several policies were accumulated in passes that they shared (`training.together`)."""

    name: ClassVar[str] = "joined"
    micro_batches: tuple[str, ...]
    """Their ids, one of each policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped(Timed):
    """A policy's training state came onto devices (`resume`), or was set aside (`suspend`)."""

    name: ClassVar[str] = "swapped"
    policy: PolicyName
    """The policy."""
    direction: str
    """`resume` or `suspend`."""
    place: int
    """Number of the place (the devices) that holds the state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesFreed(Timed):
    """Devices that engines and trainers hold in turn were given up by one side, so that the other may have them.

    Only in mode `colocated`. From `ended` on, nothing of this side is on them until the other side has given them up.
    """

    name: ClassVar[str] = "devices_freed"
    by: str
    """`engines` or `trainers`."""
