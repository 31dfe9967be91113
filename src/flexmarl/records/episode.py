"""Episode: one run of the workflow on one task; GroupRecord: all episodes of one task in one step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from flexmarl.records.ids import EpisodeId, GroupId, SampleId
from flexmarl.records.task import Task
from flexmarl.records.turn import AnyTurn, Turn

LARGEST_REWARD = 1e6
"""Of one part of a turn's reward, either sign. Sums of rewards up to here still tell differences of 1e-6 apart, which
is the filters' tolerance, and their squares, which critics learn from, stay far inside float32."""


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    FINISHED = "finished"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One multi-agent trajectory. A failed one is a record too: it has a reason and no part in training."""

    episode: EpisodeId
    """Equal to the trajectory id, e.g. `g12e3a0`."""
    group: GroupId
    task: str
    """`Task.input_id`."""
    status: EpisodeStatus
    reason: str = ""
    """Why it failed; empty when it finished."""
    turns: tuple[AnyTurn, ...] = ()
    """In hop order, of all agents; failed calls are not turns. Without tokens where a store has them."""
    rewards: Mapping[SampleId, float | None] = field(default_factory=dict)
    """Reward of every turn; None where the workflow gave none."""
    call_rewards: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """What of it the workflow gave that very turn, by part; the rest went to its agent or to the team."""
    parts: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """What it adds up from, by name; `outcome` unless the workflow named another."""
    signals: Mapping[SampleId, Mapping[str, float]] = field(default_factory=dict)
    """What was found in the turn, each in [0, 1]: `tool_error`, `format_error` ..."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the workflow reported with `team.report(...)`; `success` is the team's score of the episode."""
    duration_s: float = 0.0
    """From its first moment to its last, waits for engines and for new versions (`pipeline.ahead`) included."""

    @property
    def finished(self) -> bool:
        """Whether training may use it."""
        return self.status is EpisodeStatus.FINISHED

    def without_tokens(self) -> "Episode":
        """The episode as it is kept when the store has its rows: long trajectories are megabytes of tokens each."""
        return replace(
            self, turns=tuple(turn.without_tokens() if isinstance(turn, Turn) else turn for turn in self.turns)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """All episodes of one task in one step: the unit of admission, windowing and credit."""

    group: GroupId
    task: Task
    step: int
    attempt: int = 0
    episodes: tuple[Episode, ...] = ()
    greedy: Episode | None = None
    """One more play, at temperature 0, where credit compares with it: never trained, and in no count."""

    @property
    def finished(self) -> tuple[Episode, ...]:
        """The episodes that training may use."""
        return tuple(episode for episode in self.episodes if episode.finished)

    @property
    def plays(self) -> tuple[Episode, ...]:
        """All of its episodes, and the greedy one."""
        return self.episodes if self.greedy is None else (*self.episodes, self.greedy)
