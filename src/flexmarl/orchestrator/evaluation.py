"""Runs evaluation: plays held-out tasks at pinned versions. Its rows are stored apart from the run's, or not at all.

consumes    held-out tasks
waits for   their episodes
produces    means of the numbers that the workflow reported, and of each agent's reward; a kept evaluation with its rows
unblocked by the end of an episode (its time limit bounds it)
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol, TypeVar

from flexmarl.errors import TrainingError
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupAdmitted, episode_failed, episode_finished
from flexmarl.events.run_events import Evaluated
from flexmarl.events.untrained import counted
from flexmarl.experience.interface import ExperienceStore
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import CONTROLLER, AgentName, Episode, GroupId, GroupRecord, PolicyName, Purpose, Task, Version
from flexmarl.rollout.player import Player

Name = TypeVar("Name", bound=str)

_FIRST_GROUP = 1_000_000_000
"""Group ids of evaluations have a range of their own, so that their calls never share a seed with those of training.
Nothing compares an id with this number: `GroupRecord.purpose` says what a group is played for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results on held-out tasks, at one set of versions."""

    versions: Mapping[PolicyName, Version]
    episodes: int
    failed: int
    """Number of failed episodes. They are left out of every mean except `success`, where they count 0. Where
    evaluations are compared, they count as the worst value there was (orchestrator/stopping.py)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Mean of each number the workflow reported, over the episodes that reported it."""
    rewards: Mapping[AgentName, float] = field(default_factory=dict)
    """Mean reward of each agent, over its turns."""
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Least and greatest value of each metric in one episode, and of each `reward/{agent}` in one turn."""
    tokens: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    """Number of failed episodes by reason, e.g. `ValueError: boom (team.py:61)`, most frequent first."""


class EvaluationPlace(NamedTuple):
    """Where one evaluation is kept."""

    store: ExperienceStore
    """Takes the rows."""
    events: Events
    """Hears of its tasks, its episodes and its result, as a run's hub does."""


class Keep(Protocol):
    """Keeps evaluations."""

    def __call__(self, step: int) -> AbstractAsyncContextManager[EvaluationPlace | None]:
        """Opens a place for the evaluation after `step` steps, for the length of the block; None: it is not kept."""
        ...


class Evaluator:
    """Plays the same held-out tasks with the same seeds every time, so that two evaluations differ by weights only."""

    def __init__(
        self,
        *,
        player: Player,
        versions: Versions,
        tasks: Sequence[Task],
        episodes: int,
        parallel: int,
        keep: Keep | None = None,
    ) -> None:
        """`keep` keeps what is played; without it, nothing is stored."""
        self._keep, self._player, self._versions, self._tasks = keep, player, versions, tasks
        self._episodes, self._parallel = episodes, parallel

    async def run(self, num_tasks: int | None = None, *, when: str = "before", step: int = 0) -> Evaluation:
        """Evaluates the first `num_tasks` held-out tasks (default: all), `when` and after how many steps."""
        if self._keep is None:
            return await self._run(num_tasks, None)
        async with self._keep(step) as kept:
            began = kept.events.now() if kept else 0.0
            evaluation = await self._run(num_tasks, kept)
            if kept:
                figures = asdict(evaluation)
                kept.events.emit(Evaluated(process=CONTROLLER, began=began, when=when, step=step, evaluation=figures))
            return evaluation

    async def _run(self, num_tasks: int | None, kept: EvaluationPlace | None) -> Evaluation:
        pinned = self._versions.served
        slots = asyncio.Semaphore(self._parallel)

        async def play(number: int, task: Task, index: int) -> Episode:
            async with slots:
                id = GroupId(_FIRST_GROUP + number)
                group = GroupRecord(group=id, task=task, step=-1, purpose=Purpose.EVALUATION)
                if kept and not index:
                    kept.events.emit(GroupAdmitted(group=id, step=-1, task=task.input_id, because="it is held out"))
                episode = await self._player.play(group, index, store=kept.store if kept else None)
                if kept:
                    ended = episode_finished(episode) if episode.finished else episode_failed(episode, group.purpose)
                    kept.events.emit(ended)
                return episode.without_tokens()

        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(play(number, task, index), name=f"evaluate/{task.input_id}/{index}")
                for number, task in enumerate(self._tasks[:num_tasks])
                for index in range(self._episodes)
            ]
        episodes = [task.result() for task in playing]
        if self._versions.served != pinned:
            raise TrainingError(f"weights changed during an evaluation pinned to {dict(pinned)}")
        self._versions.check((turn for episode in episodes for turn in episode.turns), max_staleness=0)
        metrics, rewards = _metrics_of(episodes), rewards_of(episodes)
        values = {**metrics, **{f"reward/{agent}": earned for agent, earned in rewards.items()}}
        return Evaluation(
            versions=pinned,
            episodes=len(episodes),
            failed=sum(not episode.finished for episode in episodes),
            metrics=_means(metrics),
            rewards=_means(rewards),
            ranges={name: (min(numbers), max(numbers)) for name, numbers in values.items()},
            tokens=sum(turn.num_tokens for episode in episodes for turn in episode.turns),
            failures=counted(episode.failure for episode in episodes),
        )


def mean_metrics(episodes: Iterable[Episode]) -> dict[str, float]:
    """Means of the reported numbers, by name. A failed episode counts 0 for `success`, and nothing else."""
    return _means(_metrics_of(episodes))


def _metrics_of(episodes: Iterable[Episode]) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.finished:
            for name, value in episode.metrics.items():
                values[name].append(value)
        else:
            values["success"].append(0.0)
    return dict(sorted(values.items()))


def _means(values: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def rewards_of(episodes: Iterable[Episode]) -> dict[AgentName, list[float]]:
    """The rewards of each agent's turns in finished episodes. A turn without a reward has no place in them."""
    values: dict[AgentName, list[float]] = defaultdict(list)
    for episode in episodes:
        for turn in episode.turns if episode.finished else ():
            reward = episode.rewards.get(turn.sample_id)
            if reward is not None:
                values[turn.agent].append(reward)
    return dict(sorted(values.items()))
