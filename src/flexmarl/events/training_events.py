"""Events of trainers: micro-batches, updates, publications, and who holds training devices.

In: nothing. Out: the types that journal, monitor and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.ids import PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchDone(Timed):
    """A micro-batch is in the gradient sums of a policy."""

    name: ClassVar[str] = "micro_batch"
    policy: PolicyName
    """The policy."""
    micro_batch: str
    """Id of the micro-batch."""
    rows: int
    """How many rows it had."""
    tokens: float
    """Weighted sampled tokens."""
    duration_s: float
    """Seconds that the trainer was busy with it, by the trainer's own clock."""


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
    """A policy had nothing to be updated with."""

    name: ClassVar[str] = "update_skipped"
    policy: PolicyName
    """The policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published(Timed):
    """All instances of a policy serve new weights. It began when the trainer set them."""

    name: ClassVar[str] = "published"
    policy: PolicyName
    """The policy."""
    version: Version
    """The version."""
    checksum: str
    """Of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceCharged(Event):
    """A batch's rewards paid for their distance from the reference; the coefficient may follow."""

    name: ClassVar[str] = "kl_in_reward"
    policy: PolicyName
    """The policy."""
    kl: float
    """Mean divergence of the batch's rows from the reference."""
    coef: float
    """What a unit of it cost in this batch."""
    next_coef: float
    """What it costs in the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swapped(Timed):
    """A policy's training state came onto devices (`resume`), or was set aside (`suspend`)."""

    name: ClassVar[str] = "swapped"
    policy: PolicyName
    """The policy."""
    direction: str
    """`resume` or `suspend`."""
    place: int
    """The number of the devices' place."""
