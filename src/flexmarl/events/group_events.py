"""Events of groups: each group is admitted, played, credited, and ends once.

In: nothing. Out: the types that journal, monitor and laws read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flexmarl.events.event import Event, Timed
from flexmarl.records.episode import Episode, EpisodeStatus, Failure, Purpose
from flexmarl.records.ids import AgentName, EpisodeId, GroupId, PolicyName, Version
from flexmarl.records.lifecycle import FilterReason


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdmitted(Event):
    """A group was admitted, so it may be played."""

    name: ClassVar[str] = "group_admitted"
    group: GroupId
    """The group."""
    step: int
    """The step that admitted it, from 0."""
    task: str
    """Id of its task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFinished(Event):
    """An episode was finished, so training may use it."""

    name: ClassVar[str] = "episode_finished"
    group: GroupId
    """Its group."""
    episode: EpisodeId
    """The episode."""
    duration_s: float
    """Seconds from start to end."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that the workflow reported; `success` is the team's score of the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFailed(Event):
    """An episode ended without being finished. None of its turns is trained on."""

    name: ClassVar[str] = "episode_failed"
    group: GroupId
    """Its group."""
    episode: EpisodeId
    """The episode."""
    status: EpisodeStatus
    """How it ended."""
    kind: str = ""
    """Name of the exception's type; without an exception `timed_out`, `unrewarded`, `never_awaited`, `cancelled` or
    `worker_lost`."""
    place: str = ""
    """File and line of the code that raised it, e.g. `team.py:61`; empty if no code did."""
    text: str = ""
    """The exception's text, shortened to one line."""
    purpose: Purpose = Purpose.TRAINING
    """Why it was played. Episodes of evaluations are here too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAccount(Event):
    """The door of an episode was shut: what became of the tokens that were sampled for its programs."""

    name: ClassVar[str] = "episode_account"
    group: GroupId
    """Its group."""
    episode: EpisodeId
    """The episode."""
    calls: int = 0
    """Calls of engines."""
    sampled: int = 0
    """Tokens that engines sampled. They are the sum of `delivered`, `undelivered` and `failed`."""
    delivered: int = 0
    """Tokens of replies that the programs have got."""
    undelivered: Mapping[str, int] = field(default_factory=dict)
    """Tokens of replies that nobody read, by the reason. Their rows end FILTERED."""
    failed: Mapping[str, int] = field(default_factory=dict)
    """Tokens of calls that failed, by the reason. Their rows end FAILED."""
    continuity: Mapping[str, int] = field(default_factory=dict)
    """Calls whose prompt is a `root`, `extends` an earlier turn, or was `rendered` anew."""
    why: Mapping[str, int] = field(default_factory=dict)
    """Calls whose prompt was rendered anew, by the reason."""
    retokenised: int = 0
    """Ids of the turns they follow that came back as others."""
    asks: Mapping[str, int] = field(default_factory=dict)
    """Requests that were `new`, joined (`joins`) one that was under way, or got its reply `again`."""
    purpose: Purpose = Purpose.TRAINING
    """Why it was played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLost(Event):
    """The rollout worker that played an episode was lost, and the rows of this play are deleted."""

    name: ClassVar[str] = "episode_lost"
    group: GroupId
    """Its group."""
    episode: EpisodeId
    """The episode."""
    again: bool
    """True if it begins anew, with the same id and seeds; False if its group was stopped or it was lost too often."""


def episode_finished(episode: Episode) -> EpisodeFinished:
    """Makes the event of a finished episode."""
    return EpisodeFinished(
        group=episode.group,
        episode=episode.episode,
        duration_s=round(episode.duration_s, 6),  # Microseconds, as all moments of the journal.
        metrics=episode.metrics,
    )


def episode_failed(episode: Episode, purpose: Purpose) -> EpisodeFailed:
    """Makes the event of a failed episode."""
    failure = episode.failure or Failure(kind=episode.status)
    return EpisodeFailed(
        group=episode.group,
        episode=episode.episode,
        status=episode.status,
        because=episode.reason,
        kind=failure.kind,
        place=failure.place,
        text=failure.text,
        purpose=purpose,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRetried(Event):
    """A group in which no episode was finished is played again."""

    name: ClassVar[str] = "group_retried"
    group: GroupId
    """The group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailed(Event):
    """A group ended: no episode of its last attempt was finished."""

    name: ClassVar[str] = "group_failed"
    group: GroupId
    """The group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTaken(Event):
    """A played group was taken from the window for training."""

    name: ClassVar[str] = "group_taken"
    group: GroupId
    """The group."""
    step: int
    """The step that took it, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LagChanged(Event):
    """`pipeline.lag: auto` chose another lag, by what was measured."""

    name: ClassVar[str] = "lag_changed"
    step: int
    """The step that begins with it, from 0."""
    before: int
    """The lag before, in steps."""
    lag: int
    """Steps that rollout may be ahead from now on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStopped(Event):
    """A group that held up others was stopped. It leaves the window at once."""

    name: ClassVar[str] = "group_stopped"
    group: GroupId
    """The group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupExpired(Event):
    """A group ended untrained, because it was too late or the run was over."""

    name: ClassVar[str] = "group_expired"
    group: GroupId
    """The group."""
    again: bool
    """True if its task is admitted again, as another group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsCredited(Event):
    """Groups were compared, and their rows have advantages."""

    name: ClassVar[str] = "credited"
    groups: tuple[GroupId, ...]
    """The groups."""
    report: Mapping[AgentName, Any]
    """By agent, counts and sizes of its credit groups."""
    parts: Mapping[AgentName, Any]
    """By agent, the parts that its rewards add up from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReady(Event):
    """A group's rows may be trained on."""

    name: ClassVar[str] = "group_ready"
    group: GroupId
    """The group."""
    samples: Mapping[PolicyName, int]
    """By policy, how many rows are ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFiltered(Event):
    """A group ended untrained, because the filter or the estimator found that nothing can be learned from it."""

    name: ClassVar[str] = "group_filtered"
    group: GroupId
    """The group."""
    reason: FilterReason = FilterReason.NO_WEIGHT
    """Why, to be counted: `too_easy`, `too_hard`, `flat`, `no_weight`, `no_trained_turn` or `no_baseline`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refilled(Event):
    """A step has enough groups, after it played other groups in place of those that were dropped."""

    name: ClassVar[str] = "refilled"
    step: int
    """The step, from 0."""
    generated: int
    """Groups that it played."""
    kept: int
    """Groups that it trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFilled(Event):
    """A policy that updates on its own has a full batch."""

    name: ClassVar[str] = "batch_filled"
    policy: PolicyName
    """The policy."""
    version: Version
    """The version that the update is applied to."""
    groups: tuple[GroupId, ...]
    """The groups of the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEnded(Timed):
    """The rollout of a step ended."""

    name: ClassVar[str] = "rollout_ended"
    step: int
    """The step, from 0."""
