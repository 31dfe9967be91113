"""What happened to a run in all its lives, told apart into what counts and what was taken back."""

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
from flexmarl.records import InstanceId, PolicyName, SampleId, Version, split_sample_id, split_trajectory_id
from flexmarl.testing.faults.watched import WatchedEngine, WatchedTrainer
from flexmarl.testing.scripted_run import ScriptedRun

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Life:
    """One process of the run, from its start to its death or the run's end."""

    events: Sequence[Event]
    error: BaseException | None
    """What ended it, but for a kill."""
    killed: bool
    hung: bool
    engines: Mapping[str, WatchedEngine]
    """By instance."""
    trainers: Mapping[PolicyName, WatchedTrainer]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end in it."""
        return self.error is None and not self.killed and not self.hung

    def of(self, *kinds: type[E]) -> list[E]:
        """Its events of these types."""
        return [event for event in self.events if isinstance(event, kinds)]

    def same_end_as(self, other: "Life") -> bool:
        """Whether both died of the same, without having come any further."""
        return (
            isinstance(self.error, FlexmarlError)
            and str(self.error) == str(other.error)
            and type(self.error) is type(other.error)
            and not self.of(CheckpointSaved)
        )


@dataclass(slots=True, eq=False)
class GroupStory:
    """What counts of one group."""

    admitted: list[GroupAdmitted] = field(default_factory=list)
    ready: Mapping[PolicyName, int] = field(default_factory=dict)
    """Samples that its credit made ready, by policy."""
    ends: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class Story:
    """A run: what was to be, its lives, and the rows that it left behind."""

    settings: RunSettings
    chance: bool = False
    """Whether episodes may fail by chance, so that a run may end for want of samples."""
    lives: Sequence[Life]
    rows: Sequence[Row] = field(repr=False)
    folder: str = ""
    """Where its checkpoints were."""

    @property
    def finished(self) -> bool:
        """Whether it came to its end."""
        return self.lives[-1].finished

    @property
    def per_policy(self) -> bool:
        """Whether every policy is updated as its own batch fills."""
        return not self.settings.mode.synchronous and self.settings.pipeline.updates == "per_policy"

    @property
    def refills(self) -> bool:
        """Whether a step admits more groups in place of those that it filtered."""
        kept = self.settings.credit.filter
        return kept is not None and kept.refill

    @property
    def estimator(self) -> str:
        """The name of the estimator of credit."""
        return str(getattr(self.settings.credit.estimator, "type"))  # noqa: B009  # Of a union that is registered.

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Policies that are updated."""
        return tuple(sorted(self.settings.trained))

    @property
    def initial(self) -> tuple[InstanceId, ...]:
        """The instances that a life begins with."""
        policies = self.settings.policies
        return tuple(InstanceId(name, n) for name, policy in policies.items() for n in range(policy.instances))

    @cached_property
    def events(self) -> list[Event]:
        """Of all lives."""
        return [event for life in self.lives for event in life.events]

    @cached_property
    def groups(self) -> Mapping[int, "GroupStory"]:
        """Every group, without what a resumption took back: what a life did after the checkpoint it left is gone.

        A group that was active at the checkpoint stays admitted, and is admitted anew if it is played again.
        """
        groups: dict[int, GroupStory] = {}
        active: dict[int, GroupStory] = {}
        for life in self.lives:
            for event in life.events:
                if isinstance(event, StoreRewound):
                    again = set(event.replay)
                    active = {g: GroupStory(admitted=[*told.admitted]) for g, told in groups.items() if g in again}
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
        """What the trainers remember of each version that counts: the sample ids of its micro-batches."""
        made: dict[PolicyName, dict[Version, Sequence[Sequence[SampleId]]]] = {}
        for life in self.lives:
            for policy, trainer in life.trainers.items():
                before = {version: ids for version, ids in made.get(policy, {}).items() if version <= trainer.base}
                made[policy] = before | {version: list(ids.values()) for version, ids in trainer.updates.items()}
        return made

    @cached_property
    def steps(self) -> Mapping[int, Sequence[int]]:
        """The groups that each step trained; a later life makes the steps again that were not saved."""
        steps: dict[int, Sequence[int]] = {}
        for life in self.lives:
            for event in life.of(Resumed):
                steps = {step: groups for step, groups in steps.items() if step < event.step}
            steps |= {event.step: event.trained for event in life.of(StepEnded)}
        return steps

    def trained(self) -> Iterator[SampleId]:
        """Every sample in an update that counts, as often as it is in one."""
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
"""Events with which groups end, and how."""


def ended_by(event: Event) -> Sequence[int]:
    """The groups that end with an event."""
    if isinstance(event, StepEnded):
        return event.trained
    return [event.group] if isinstance(event, GroupFailed | GroupFiltered | GroupExpired) else []


def group_of(sample_id: str) -> int:
    """The group that a sample is of."""
    return split_trajectory_id(split_sample_id(sample_id)[2])[0]


def story_of(*runs: ScriptedRun, folder: str = "") -> Story:
    """The story of a scripted run: its last life, after those in which it was killed."""
    lives = [
        Life(
            events=run.events.all,
            error=run.failure if run is runs[-1] else None,
            killed=run is not runs[-1],
            hung=False,
            engines={InstanceId(policy, n): one for policy, many in run.engines.items() for n, one in enumerate(many)},
            trainers=run.trainers,
        )
        for run in runs
    ]
    return Story(settings=runs[-1].settings, chance=True, lives=lives, rows=tuple(runs[-1].rows()), folder=folder)
