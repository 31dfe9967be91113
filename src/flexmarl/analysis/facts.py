"""Decides who was busy when, from a journal. Report, lower bound, pictures and fit of costs all start from these facts.

The journal may be that of a simulated or of a real run. Moments are seconds on the run's clock (`read_run`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from typing import TypeVar

from flexmarl.events.event import Event, Timed
from flexmarl.events.group_events import BatchFilled, GroupAdmitted, RolloutEnded
from flexmarl.events.overlap import Interval, intersection, seconds, union
from flexmarl.events.run_events import Resumed, StepEnded
from flexmarl.events.serving_events import (
    Called,
    InstanceGrown,
    InstanceLost,
    InstanceReplaced,
    InstanceRetired,
    Loaded,
    Moved,
    QueueCounts,
)
from flexmarl.events.training_events import MicroBatchDone, Published, Swapped, Updated
from flexmarl.records import InstanceId, PolicyName, Purpose

Worker = TypeVar("Worker")


@dataclass(slots=True)
class Facts:
    """Events of a run, sorted by kind. Each list is in the order of the journal."""

    steps: list[StepEnded] = field(default_factory=list)
    """Steps, made disjoint: where steps overlap, each one begins at the end of the one before it."""
    calls: list[Called] = field(default_factory=list)
    """Calls of training rollouts; the calls of evaluations are left out."""
    rollouts: list[Interval] = field(default_factory=list)
    micro_batches: list[MicroBatchDone] = field(default_factory=list)
    updates: list[Updated] = field(default_factory=list)
    publications: list[Published] = field(default_factory=list)
    loads: list[Loaded] = field(default_factory=list)
    swaps: list[Swapped] = field(default_factory=list)
    moves: list[Moved] = field(default_factory=list)
    queue_counts: list[QueueCounts] = field(default_factory=list)
    started: dict[InstanceId, float] = field(default_factory=dict)
    """Instances that were started during the run, with the seconds until they served.

    They count from the loss of the instance that was replaced, or from the decision to grow or to move."""
    grown: dict[InstanceId, Interval] = field(default_factory=dict)
    """When each further instance served; without an end (inf) if it was neither retired nor lost."""
    step_of: dict[int, int] = field(default_factory=dict)
    """By group, the step that admitted it."""
    trained_at: dict[tuple[str, int], int] = field(default_factory=dict)
    """By policy and group, the version that its update was applied to; only where policies update on their own."""

    @property
    def span(self) -> list[Interval]:
        """The moments inside steps. The start of the run, evaluations and checkpoints lie outside."""
        return union((step.began, step.ended) for step in self.steps)

    @property
    def makespan_s(self) -> float:
        """Seconds of all steps together."""
        return seconds(self.span)

    @property
    def instances(self) -> list[InstanceId]:
        """The instances that the run began with."""
        later = {move.became for move in self.moves} | set(self.started)
        seen = [load.instance for load in self.loads] + [call.instance for call in self.calls]
        return [name for name in dict.fromkeys(seen) if name not in later]

    @property
    def playing(self) -> list[Interval]:
        """The moments of rollout inside steps."""
        played = self.rollouts or [(call.began, call.ended) for call in self.calls]
        return intersection(union(played), self.span)

    def serving(self) -> dict[InstanceId, list[Interval]]:
        """By instance, the intervals inside steps in which it had a call."""
        return self._inside_steps((call.instance, call) for call in self.calls)

    def training(self) -> dict[PolicyName, list[Interval]]:
        """By policy, the intervals inside steps in which its trainer accumulated or updated."""
        return self._inside_steps((done.policy, done) for done in (*self.micro_batches, *self.updates))

    def _inside_steps(self, work: Iterable[tuple[Worker, Timed]]) -> dict[Worker, list[Interval]]:
        times: dict[Worker, list[Interval]] = {}
        for worker, event in work:
            times.setdefault(worker, []).append((event.began, event.ended))
        span = self.span
        return {worker: intersection(union(busy), span) for worker, busy in times.items()}


def read_facts(events: Iterable[Event]) -> Facts:
    """Sorts the events that `read_run` yields from a journal. The run may still be going on."""
    facts = Facts()
    for event in events:
        _sort(facts, event)
    return facts


def _sort(facts: Facts, event: Event) -> None:
    match event:
        case Resumed():
            _cut(facts, event)
        case StepEnded():
            before = facts.steps[-1].ended if facts.steps else 0.0
            facts.steps.append(replace(event, began=max(event.began, before)))
        case Called():
            if event.purpose is not Purpose.EVALUATION:
                facts.calls.append(event)
        case MicroBatchDone():
            facts.micro_batches.append(event)
        case Updated():
            facts.updates.append(event)
        case Published():
            facts.publications.append(event)
        case Loaded():
            facts.loads.append(event)
        case Swapped():
            facts.swaps.append(event)
        case Moved():
            facts.moves.append(event)
            if event.starts:
                facts.started[event.became] = event.seconds
            if event.instance in facts.grown:
                facts.grown[event.became] = facts.grown.pop(event.instance)
        case RolloutEnded():
            facts.rollouts.append((event.began, event.ended))
        case QueueCounts():
            facts.queue_counts.append(event)
        case InstanceReplaced():
            facts.started[event.instance] = event.seconds
        case InstanceGrown():
            facts.started[event.instance] = event.seconds
            facts.grown[event.instance] = (event.ended, inf)
        case InstanceRetired() | InstanceLost():
            if event.instance in facts.grown:
                facts.grown[event.instance] = (facts.grown[event.instance][0], event.t)
        case GroupAdmitted():
            facts.step_of[event.group] = event.step
        case BatchFilled():
            facts.trained_at |= {(event.policy, group): event.version for group in event.groups}


def _cut(facts: Facts, resumed: Resumed) -> None:
    """Drops what was done after the checkpoint that the run goes on from, because it is done again."""
    kept = set(range(resumed.next_group)) - set(resumed.active)
    facts.steps = [step for step in facts.steps if step.step < resumed.step]
    end = facts.steps[-1].ended if facts.steps else 0.0
    facts.calls = [call for call in facts.calls if call.group in kept]
    facts.step_of = {group: step for group, step in facts.step_of.items() if group in kept}
    facts.trained_at = {key: version for key, version in facts.trained_at.items() if key[1] in kept}
    facts.rollouts = [(began, min(ended, end)) for began, ended in facts.rollouts if began < end]
    facts.micro_batches = [done for done in facts.micro_batches if done.began < end]
    facts.updates = [done for done in facts.updates if done.version <= resumed.versions[done.policy]]
    facts.publications = [done for done in facts.publications if done.version <= resumed.versions[done.policy]]
    facts.loads = [done for done in facts.loads if done.version <= resumed.versions.get(done.policy, done.version)]
    facts.swaps = [done for done in facts.swaps if done.began < end]
    facts.moves = [done for done in facts.moves if done.began < end]
    facts.grown = {name: (began, min(ended, end)) for name, (began, ended) in facts.grown.items() if began < end}
    facts.queue_counts = [counts for counts in facts.queue_counts if counts.t < end]
