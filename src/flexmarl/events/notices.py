"""Notices: what the parts of a run report to one another, and the journal does not hold.

In: nothing. Out: the types that training sessions, the balancer, the figures and the live view listen to.

A notice has no line in the journal: other events already give the fact, or it is far too large for a line.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flexmarl.events.event import Events, Notice
from flexmarl.events.untrained import NotTrained
from flexmarl.records.episode import AnyTurn, Episode, Failure, GroupRecord, Purpose
from flexmarl.records.ids import AgentName, EpisodeId, GroupId, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting(Notice):
    """The start of a run goes on to something that may take long."""

    waits_for: str
    """The thing that the run waits for now, in words: `starting Ray`, `loading models: 2 engines, 2 trainers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlayed(Notice):
    """The rollout of a group ended, whether or not an episode of it was finished."""

    group: GroupRecord
    """The group, with its episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBroke(Notice):
    """An episode failed, and this may be the first failure of its kind. `EpisodeFailed` has the line in the journal."""

    episode: EpisodeId
    """The episode."""
    task: str
    """Id of its task."""
    purpose: Purpose
    """Why it was played."""
    failure: Failure
    """The failure."""
    error: BaseException | None = None
    """The exception, with its traceback; None if none was raised. Listeners must not keep it: it keeps the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeWaits(Notice):
    """A workflow has waited for long, though none of its calls is under way."""

    task: str
    """Id of its task."""
    place: str
    """File and line of the user's code at which it waits, e.g. `team.py:61`."""
    seconds: float
    """How long, so far."""
    timeout_s: float
    """The setting `rollout.episode_timeout_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJudged(Notice):
    """A finished group was judged, by the filter if there is one. It does not say whether the group is kept.

    A group without a trained turn, or without the greedy play that credit needs, is dropped before, without a notice.
    """

    group: GroupId
    """The group."""
    effects: Mapping[AgentName, Mapping[Any, int]]
    """Number of each agent's credit groups with each effect; empty if no filter judged them."""
    parts: Mapping[AgentName, Any]
    """By agent, the parts that its rewards add up from, as in `GroupsCredited`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsReady(Notice):
    """Rows became READY."""

    policies: frozenset[PolicyName]
    """The policies that they are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesTaken(Notice):
    """Training takes episodes. Only asynchronous modes emit it, in which some are never taken."""

    episodes: Sequence[Episode]
    """The finished episodes of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsTaken(Notice):
    """Turns go into the next update of a policy. Only asynchronous modes emit it, in which turns may be stale."""

    policy: PolicyName
    """The policy."""
    turns: Sequence[AnyTurn]
    """The turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlayed(Notice):
    """A step has all its groups. Its training may still go on."""

    step: int
    """The step."""
    pauses: bool
    """True if rollout pauses now, so that training hides what is done to the engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettled(Notice):
    """A step, its checkpoint and the evaluation after it are done, so its figures are complete."""

    step: int
    """Steps done; 0 after the evaluation before the first step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FiguresWritten(Notice):
    """The metrics of a step were written."""

    step: int
    """Steps done."""
    values: Mapping[str, float]
    """The metrics, by name."""
    untrained: NotTrained = field(default_factory=NotTrained)
    """The part of the step that is not trained on, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStarted(Notice):
    """An evaluation begins. `Evaluated` follows."""

    when: str
    """`before`, `between` or `after` training."""
    step: int
    """Steps done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged(Notice):
    """A phase of a step began or ended. Phases may overlap, also with themselves."""

    phase: str
    """`rollout`, `publish`, `checkpoint` or `evaluate`."""
    began: bool
    """True if it began, False if it ended."""


@contextmanager
def phase(events: Events, name: str) -> Iterator[None]:
    """Emits that the block is a phase of the step, when it begins and when it ends, even by an error."""
    events.emit(PhaseChanged(phase=name, began=True))
    try:
        yield
    finally:
        events.emit(PhaseChanged(phase=name, began=False))
