"""Finished groups made by hand, in the store as rollout leaves them."""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from flexmarl.credit import CreditSettings
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.notices import RowsReady
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome, PartialRow
from flexmarl.experience.ledger import claim_order
from flexmarl.experience.turn_rows import TURN_COLUMNS, closing_row, response_row
from flexmarl.orchestrator.collect import Release, StepCollector
from flexmarl.orchestrator.crediting import Appraisal, Crediting
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import (
    AgentName,
    Episode,
    EpisodeId,
    EpisodeStatus,
    FinishReason,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    SampleId,
    Task,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
)
from flexmarl.rollout.admission import Admission, AdmissionLaw, AdmissionState

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")


def at_group(next_group: int) -> AdmissionState:
    """Admission at a boundary of synchronous steps: everything before has ended."""
    return AdmissionState(next_group=next_group, next_position=next_group)


def turn_of(group: int, index: int, hop: int, *, agent: str = "solver", tokens: int = 2, version: int = 0) -> Turn:
    logprobs = np.full(tokens, -1.0, np.float32)
    return Turn(
        sample_id=make_sample_id(f"task-{group}", hop, f"g{group}e{index}a0"),
        episode=EpisodeId(f"g{group}e{index}a0"),
        agent=AgentName(agent),
        policy=PolicyName(agent),
        prompt_ids=np.arange(3, dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=logprobs,
        raw_logprobs=logprobs,
        versions=(VersionRun(0, Version(version)),),
        finish=FinishReason.STOP,
    )


def episode_of(group: int, index: int, reward: float | None, *, tokens: int = 2, judged: bool = False) -> Episode:
    """One turn of the solver with the reward, and one of the judge without; reward None: the episode failed."""
    turns = [turn_of(group, index, 0, tokens=tokens)] + ([turn_of(group, index, 1, agent="judge")] if judged else [])
    return Episode(
        episode=turns[0].episode,
        group=GroupId(group),
        task=f"task-{group}",
        status=EpisodeStatus.FAILED if reward is None else EpisodeStatus.FINISHED,
        reason="broke" if reward is None else "",
        turns=tuple(turns),
        rewards={turn.sample_id: reward if turn.agent == "solver" else None for turn in turns},
    )


def group_of(group: int, rewards: Sequence[float | None], **episode: object) -> GroupRecord:
    episodes = tuple(episode_of(group, index, reward, **episode) for index, reward in enumerate(rewards))  # type: ignore[arg-type]
    task = Task(input_id=f"task-{group}", prompt="?")
    return GroupRecord(group=GroupId(group), task=task, step=0, episodes=episodes)


def slowed(store: SqliteStore) -> dict[str, list[int]]:
    """Makes the store's writes take a second each. The numbers of episodes that each put and each outcome is about."""
    about: dict[str, list[int]] = defaultdict(list)
    put, settle = store.put, store.settle

    def note(name: str, ids: Iterable[SampleId]) -> None:
        about[name].append(len({claim_order(sample_id)[:2] for sample_id in ids}))

    async def slowly_put(agent: AgentName, rows: Sequence[PartialRow]) -> None:
        await asyncio.sleep(1)
        note("put", (row.sample_id for row in rows))
        await put(agent, rows)

    async def slowly_settle(ids: Sequence[SampleId], outcome: Outcome) -> None:
        await asyncio.sleep(1)
        note(outcome.state, ids)
        await settle(ids, outcome)

    store.put, store.settle = slowly_put, slowly_settle  # type: ignore[method-assign]
    return about


class Bench:
    """A collector on a real store, whose groups come as rollout would hand them on."""

    def __init__(
        self,
        *,
        groups: int = 4,
        release: Release = Release.AT_ONCE,
        appraisal: Appraisal | None = None,
        **credit: object,
    ) -> None:
        self.store = SqliteStore(agents=[AgentName("solver"), AgentName("judge")], columns=TURN_COLUMNS)
        self.admission = Admission(AdmissionLaw(groups=groups, lag=0, window=1))
        self.events = RememberedEvents()
        self.versions = Versions({SOLVER: Version(0), JUDGE: Version(0)})
        self.ready: list[PolicyName] = []
        self.crediting = Crediting(
            store=self.store,
            credit=CreditSettings.model_validate({"filter": None, **credit}),
            trained=[SOLVER],
            admission=self.admission,
            events=self.events,
            appraisal=appraisal,
        )
        self.events.listen(RowsReady, lambda rows: self.ready.extend(sorted(rows.policies)))
        self.collector = StepCollector(
            crediting=self.crediting,
            admission=self.admission,
            versions=self.versions,
            release=release,
            events=self.events,
        )
        self.collector.open()
        for _ in range(groups):
            self.admission.admit()

    async def take(self, group: GroupRecord) -> None:
        """Ends the group's rollout and hands it on."""
        await self.play(group)
        await self.collector.take(group)

    async def play(self, group: GroupRecord) -> None:
        """Ends the group's rollout."""
        self.admission.move(group.group, GroupState.RUNNING)
        self.admission.move(group.group, GroupState.DONE if group.finished else GroupState.FAILED)
        for episode in group.episodes:
            for turn in episode.turns:
                reward = episode.rewards[turn.sample_id]
                rows = [response_row(turn)]
                if episode.finished and reward is not None:
                    rows.append(closing_row(turn.sample_id, turn.policy, reward=reward))
                await self.store.put(turn.agent, rows)

    async def ready_groups(self) -> list[int]:
        """The groups with READY rows."""
        found = await self.store.query("SELECT DISTINCT group_id FROM solver WHERE state = 'ready' ORDER BY group_id")
        return [group for (group,) in found.rows]

    async def states(self, agent: str = "solver") -> list[str]:
        found = await self.store.query(f"SELECT state FROM {agent} ORDER BY group_id, episode_index")
        return [state for (state,) in found.rows]
