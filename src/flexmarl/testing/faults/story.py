"""The story of a run in all its lives. It leaves out what a resumption took back."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from flexmarl.config import RunSettings
from flexmarl.errors import FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.group_events import GroupAdmitted, GroupExpired, GroupFailed, GroupFiltered, GroupReady
from flexmarl.events.run_events import CheckpointSaved, Resumed, StepEnded, StoreRewound
from flexmarl.experience.interface import Row
from flexmarl.records import EpisodeId, InstanceId, PolicyName, SampleId, Version, split_sample_id, split_trajectory_id
from flexmarl.testing.faults.watched import WatchedEngine, WatchedTrainer

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Life:
    """One process of the run, from its start to its death or to the end of the run."""

    events: Sequence[Event]
    error: BaseException | None
    """The error that ended this life; None after a kill or a normal end."""
    killed: bool
    hung: bool
    engines: Mapping[InstanceId, WatchedEngine]
    """Engines by instance name."""
    trainers: Mapping[PolicyName, WatchedTrainer]
    read: Mapping[EpisodeId, int] = field(default_factory=dict)
    """The most replies that programs have got, by episode."""

    @property
    def finished(self) -> bool:
        """True if the run ended in this life."""
        return self.error is None and not self.killed and not self.hung

    def of(self, *kinds: type[E]) -> list[E]:
        """Returns the life's events of these types."""
        return [event for event in self.events if isinstance(event, kinds)]

    def same_end_as(self, other: "Life") -> bool:
        """Returns True if both died of the same error, and this life saved no checkpoint."""
        return (
            isinstance(self.error, FlexmarlError)
            and str(self.error) == str(other.error)
            and type(self.error) is type(other.error)
            and not self.of(CheckpointSaved)
        )


@dataclass(slots=True, eq=False)
class GroupStory:
    """The events of one group that no resumption took back."""

    admitted: list[GroupAdmitted] = field(default_factory=list)
    ready: Mapping[PolicyName, int] = field(default_factory=dict)
    """Number of samples that credit made ready, by policy."""
    ends: list[str] = field(default_factory=list)
    """The ways in which the group ended, such as `trained`. A sound run has one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Story:
    """A run: its settings, its lives, and the rows that it left in the store."""

    settings: RunSettings
    chance: bool = False
    """True if episodes may fail by chance. Such a run may end because it has no samples."""
    programs: bool = False
    """True if programs play the seats."""
    lives: Sequence[Life]
    rows: Sequence[Row] = field(repr=False)
    folder: str = ""
    """The folder that its checkpoints were in."""

    @property
    def finished(self) -> bool:
        """True if the last life reached the end of the run."""
        return self.lives[-1].finished

    @property
    def per_policy(self) -> bool:
        """True if every policy is updated when its own batch is full."""
        return not self.settings.mode.synchronous and self.settings.pipeline.updates == "per_policy"

    @property
    def refills(self) -> bool:
        """True if a step admits more groups in place of those that it filtered."""
        kept = self.settings.credit.filter
        return kept is not None and kept.refill

    @property
    def estimator(self) -> str:
        """The name of the estimator of credit."""
        return str(getattr(self.settings.credit.estimator, "type"))  # noqa: B009  # A union of classes.

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Policies that are updated."""
        return tuple(sorted(self.settings.trained))

    @property
    def initial(self) -> tuple[InstanceId, ...]:
        """The instances with which a life begins."""
        policies = self.settings.policies
        return tuple(InstanceId(name, n) for name, policy in policies.items() for n in range(policy.instances))

    @cached_property
    def events(self) -> list[Event]:
        """The events of all lives, in order."""
        return [event for life in self.lives for event in life.events]

    @cached_property
    def groups(self) -> Mapping[int, "GroupStory"]:
        """Every group, by its id. A resumption removes all events after the checkpoint that it starts from.

        A group that was active at the checkpoint stays admitted. If it is played again, its admission is replaced.
        """
        groups: dict[int, GroupStory] = {}
        active: dict[int, GroupStory] = {}
        for life in self.lives:
            for event in life.events:
                if isinstance(event, StoreRewound):
                    again = set(event.replay)
                    active = {g: GroupStory(admitted=[*story.admitted]) for g, story in groups.items() if g in again}
                    groups = {g: told for g, told in groups.items() if g < event.next_group and g not in again}
                elif isinstance(event, GroupAdmitted):
                    active.pop(event.group, None)
                    groups.setdefault(event.group, GroupStory()).admitted.append(event)
                elif isinstance(event, GroupReady):
                    groups.setdefault(event.group, GroupStory()).ready = event.samples
                for group in ended_by(event):
                    groups.setdefault(group, active.pop(group, None) or GroupStory()).ends.append(_END[type(event)])
        return groups

    @cached_property
    def updates(self) -> Mapping[PolicyName, Mapping[Version, Sequence[Sequence[SampleId]]]]:
        """The sample ids of the micro-batches that went into each version, by policy. Trainers remember them."""
        made: dict[PolicyName, dict[Version, Sequence[Sequence[SampleId]]]] = {}
        for life in self.lives:
            for policy, trainer in life.trainers.items():
                before = {version: ids for version, ids in made.get(policy, {}).items() if version <= trainer.base}
                made[policy] = before | {version: list(ids.values()) for version, ids in trainer.updates.items()}
        return made

    @cached_property
    def steps(self) -> Mapping[int, Sequence[int]]:
        """The groups that each step trained. A later life repeats the steps that were not saved."""
        steps: dict[int, Sequence[int]] = {}
        for life in self.lives:
            for event in life.of(Resumed):
                steps = {step: groups for step, groups in steps.items() if step < event.step}
            steps |= {event.step: event.trained for event in life.of(StepEnded)}
        return steps

    def trained(self) -> Iterator[SampleId]:
        """Yields every sample in `updates`, as often as it is there."""
        for of_policy in self.updates.values():
            for batches in of_policy.values():
                for batch in batches:
                    yield from batch


_END: Mapping[type[Event], str] = {
    GroupFailed: "failed",
    GroupFiltered: "filtered",
    GroupExpired: "expired",
    StepEnded: "trained",
}
"""The way in which an event of each type ends a group."""


def ended_by(event: Event) -> Sequence[int]:
    """Returns the groups that end with an event."""
    if isinstance(event, StepEnded):
        return event.trained
    return [event.group] if isinstance(event, GroupFailed | GroupFiltered | GroupExpired) else []


def group_of(sample_id: str) -> int:
    """Returns the group to which a sample belongs."""
    return split_trajectory_id(split_sample_id(sample_id)[2])[0]
