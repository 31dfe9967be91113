"""Decides what a journal says of who was busy when: the common ground of report, bound, pictures and fit.

Works on the journal of a simulated run as on that of a real one. Moments are seconds on the run's clock (`read_run`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexmarl.events.overlap import Interval, intersection, seconds, union
from flexmarl.orchestrator.evaluate import EVALUATION_GROUPS
from flexmarl.records.ids import split_sample_id, split_trajectory_id


class Call(NamedTuple):
    """One answered request."""

    instance: str
    """Its name without `engine/`."""
    policy: str
    began: float
    """When the instance was given it."""
    ended: float
    prompt: int
    """Prompt tokens that the instance had to compute."""
    context: int
    """All prompt tokens."""
    sampled: int
    version: int
    group: int
    trajectory: str
    kept: int = 0
    """Of what was sampled, the tokens that it brought from an instance that was moved."""
    waited: float = 0.0
    """Seconds that the pool had no place for it."""


class MicroBatch(NamedTuple):
    """One gradient accumulation."""

    policy: str
    began: float
    ended: float
    rows: int
    tokens: float
    """Weighted sampled tokens."""


class Update(NamedTuple):
    """One optimiser update."""

    policy: str
    began: float
    ended: float
    version: int
    """The one it made."""


class Publication(NamedTuple):
    """New weights, from the trainer's `set` to the last acknowledgement."""

    policy: str
    began: float
    ended: float
    version: int


class Load(NamedTuple):
    """One instance's part of a publication."""

    instance: str
    policy: str
    began: float
    ended: float
    version: int


class Swap(NamedTuple):
    """State of a trainer that went onto devices (`resume`) or off them (`suspend`)."""

    policy: str
    direction: str
    began: float
    ended: float


class Move(NamedTuple):
    """An instance that serves another policy from now on."""

    instance: str
    to: str
    became: str
    began: float
    ended: float


class Look(NamedTuple):
    """The queues at one moment, by policy; they hold until the next look."""

    at: float
    running: Mapping[str, int]
    queued: Mapping[str, int]


class Step(NamedTuple):
    """One step; where steps overlap, what this one took longer than the one before it."""

    number: int
    began: float
    ended: float
    versions: Mapping[str, int]
    """Served from its end on."""
    trained: tuple[int, ...]
    """Groups that went into its updates."""


@dataclass(slots=True)
class Facts:
    """A run, sorted by kind; each list in the order of the journal."""

    steps: list[Step] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    """Those of training; evaluations are left out."""
    rollouts: list[Interval] = field(default_factory=list)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    publications: list[Publication] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    swaps: list[Swap] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    """Instances that came for lost ones, and the seconds that took."""
    step_of: dict[int, int] = field(default_factory=dict)
    """The step in which a group was admitted."""
    trained_at: dict[tuple[str, int], int] = field(default_factory=dict)
    """By policy and group, the version that its update was applied to; only where policies update on their own."""

    @property
    def span(self) -> list[Interval]:
        """The moments that lie in a step: no start, no evaluation, no checkpoint."""
        return union((step.began, step.ended) for step in self.steps)

    @property
    def makespan_s(self) -> float:
        """All steps together."""
        return seconds(self.span)

    @property
    def instances(self) -> list[str]:
        """Names of the instances that the run began with."""
        later = {move.became for move in self.moves} | set(self.started)
        seen = [load.instance for load in self.loads] + [call.instance for call in self.calls]
        return [name for name in dict.fromkeys(seen) if name not in later]

    @property
    def playing(self) -> list[Interval]:
        """The moments of rollout inside steps."""
        played = self.rollouts or [(call.began, call.ended) for call in self.calls]
        return intersection(union(played), self.span)

    def serving(self) -> dict[str, list[Interval]]:
        """When each instance had a call, inside steps."""
        span = self.span
        return {name: intersection(union(times), span) for name, times in _by_name(self.calls, "instance").items()}

    def training(self) -> dict[str, list[Interval]]:
        """When each policy's trainer accumulated or updated, inside steps."""
        span = self.span
        times = _by_name([*self.micro_batches, *self.updates], "policy")
        return {name: intersection(union(busy), span) for name, busy in times.items()}


def read_facts(entries: Iterable[Mapping[str, Any]]) -> Facts:
    """Sorts the events of a journal as `read_run` yields them; of a run that still goes on, what there is so far."""
    facts = Facts()
    for entry in entries:
        read = _READERS.get(entry["event"])
        if read:
            read(facts, entry)
    return facts


def _by_name(items: Iterable[Any], name: str) -> dict[str, list[Interval]]:
    times: dict[str, list[Interval]] = {}
    for item in items:
        times.setdefault(getattr(item, name), []).append((item.began, item.ended))
    return times


def _span(entry: Mapping[str, Any]) -> Interval:
    ended = entry.get("ended", entry["t"])
    return min(entry["began"], ended), ended


def _step(facts: Facts, entry: Mapping[str, Any]) -> None:
    before = facts.steps[-1].ended if facts.steps else 0.0
    began = max(entry.get("began", before), before)
    versions, trained = entry.get("versions", {}), tuple(entry.get("trained", ()))
    facts.steps.append(Step(entry["step"], began, entry["t"], versions, trained))


def _call(facts: Facts, entry: Mapping[str, Any]) -> None:
    trajectory = split_sample_id(entry["request"])[2]
    group = split_trajectory_id(trajectory)[0]
    if group >= EVALUATION_GROUPS:
        return
    began, ended = _span(entry)
    facts.calls.append(
        Call(
            instance=_instance(entry),
            policy=entry["policy"],
            began=began,
            ended=ended,
            prompt=entry["prompt_tokens"] - entry["reused_tokens"],
            context=entry["prompt_tokens"],
            sampled=entry["sampled_tokens"],
            version=entry["version"],
            group=group,
            trajectory=trajectory,
            kept=entry.get("kept_tokens", 0),
            waited=entry.get("waited_s", 0.0),
        )
    )


def _micro_batch(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.micro_batches.append(MicroBatch(entry["policy"], *_span(entry), entry["rows"], entry["tokens"]))


def _updated(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.updates.append(Update(entry["policy"], *_span(entry), entry["version"]))


def _published(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.publications.append(Publication(entry["policy"], *_span(entry), entry["version"]))


def _loaded(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.loads.append(Load(_instance(entry), entry["policy"], *_span(entry), entry["version"]))


def _swapped(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.swaps.append(Swap(entry["policy"], entry["direction"], *_span(entry)))


def _moved(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.moves.append(Move(entry["instance"], entry["to"], entry["became"], *_span(entry)))


def _rollout(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.rollouts.append(_span(entry))


def _queues(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.looks.append(Look(entry["t"], entry["running"], entry["queued"]))


def _replaced(facts: Facts, entry: Mapping[str, Any]) -> None:
    began, ended = _span(entry)
    facts.started[entry["instance"]] = ended - began


def _admitted(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.step_of[entry["group"]] = entry["step"]


def _batch(facts: Facts, entry: Mapping[str, Any]) -> None:
    facts.trained_at |= {(entry["policy"], group): entry["version"] for group in entry["groups"]}


def _instance(entry: Mapping[str, Any]) -> str:
    return entry["process"].removeprefix("engine/")


_READERS = {
    "step_ended": _step,
    "call": _call,
    "micro_batch": _micro_batch,
    "updated": _updated,
    "published": _published,
    "loaded": _loaded,
    "swapped": _swapped,
    "moved": _moved,
    "rollout_ended": _rollout,
    "queues": _queues,
    "instance_replaced": _replaced,
    "group_admitted": _admitted,
    "batch_filled": _batch,
}
