"""Recorder on the experience store: a turn's row is there as soon as it was answered, its reward when the episode ends.

A call under way has no row yet: a resumed run plays its episode again, so nothing would read it. A call that ended
without an answer gets its row at the end of the episode. What engines sampled of a call that failed, was aborted or
left by the workflow is in its row too, which ends FAILED.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flexmarl.agents.context import TurnOf
from flexmarl.errors import EngineError, StoreError
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.rows import closing_row, prompt_row, response_row
from flexmarl.records import AgentName, Episode, Generation, IntArray, PolicyName, RowState, SampleId, Scalar, Turn
from flexmarl.rollout.calls import refuse_late

UNENDED = "the call did not end"


@dataclass(frozen=True, slots=True)
class _Sent:
    """A call of which the store has nothing yet."""

    agent: AgentName
    policy: PolicyName
    prompt_ids: IntArray
    parent: SampleId | None

    def row(self, sample_id: SampleId) -> PartialRow:
        """What there is of it if it is never answered."""
        return prompt_row(sample_id, self.policy, self.prompt_ids, parent=self.parent)


class StoreRecorder:
    """Writes one episode's turns into its agents' tables, and closes their rows when the episode ends.

    Nothing is written after that.
    """

    def __init__(self, store: ExperienceStore, agents: Sequence[AgentName]) -> None:
        """`agents` in the team's order: the store refers to them by index."""
        self._store = store
        self._agents = tuple(agents)
        self._calls: list[SampleId] = []
        """All of the episode, in the order in which they were sent."""
        self._unwritten: dict[SampleId, _Sent] = {}
        """Those of which the store has nothing."""
        self._writing: dict[SampleId, tuple[AgentName, PartialRow]] = {}
        """What is on its way into the store, or was when its writer was interrupted."""
        self._failed: dict[SampleId, str] = {}
        """Calls that ended in no turn, and why."""
        self._interrupted: list[tuple[asyncio.Future[Generation], TurnOf]] = []
        self._ended = False
        self.lost: StoreError | None = None
        """What the store raised: it ends the run, whatever the workflow makes of it."""

    async def prompt(
        self,
        *,
        sample_id: SampleId,
        agent: AgentName,
        policy: PolicyName,
        prompt_ids: IntArray,
        parent: SampleId | None,
        tags: Mapping[str, Scalar],
    ) -> None:
        """Notes a call that is about to be sent. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(sample_id)
        self._calls.append(sample_id)
        self._unwritten[sample_id] = _Sent(agent, policy, prompt_ids, parent)

    async def turn(self, turn: Turn) -> None:
        """Writes the row, durably: prompt, response and version. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(turn.sample_id)
        await self._write(turn.agent, response_row(turn))

    async def failed(self, turn: Turn, because: str) -> None:
        """Writes what was sampled, if anything was; the row ends FAILED, whatever becomes of the episode."""
        if self._ended:
            return
        self._failed[turn.sample_id] = because
        if len(turn.response_ids):
            await self._write(turn.agent, response_row(turn))

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """What was sampled is added at the end of the episode."""
        self._failed[sample_id] = "the workflow left the call before its answer came"
        self._interrupted.append((answer, turn_of))

    async def finish(self, episode: Episode, *, ends: RowState = RowState.FAILED, untrained: str = "") -> None:
        """Adds the rewards of a finished episode, or moves every row of another one to `ends` (law 11).

        `untrained` says why rows of a finished one are never trained: they end FILTERED at once.
        """
        self._ended = True
        for agent, rows in (await self._left_over()).items():
            await self._store.put(agent, rows)
        if not episode.finished:
            await self._store.settle(self._calls, Outcome(state=ends, reason=episode.reason))
            return
        for agent, rows in self._closing_rows(episode).items():
            await self._store.put(agent, rows)
        unfinished: dict[str, list[SampleId]] = defaultdict(list)
        for sample_id in self._calls:
            if sample_id not in episode.rewards:
                unfinished[self._failed.get(sample_id, UNENDED)].append(sample_id)
        for because, ids in unfinished.items():
            await self._store.settle(ids, Outcome(state=RowState.FAILED, reason=because))
        if untrained and episode.rewards:
            await self._store.settle(list(episode.rewards), Outcome(state=RowState.FILTERED, reason=untrained))

    async def _write(self, agent: AgentName, row: PartialRow) -> None:
        self._writing[row.sample_id] = (agent, row)
        try:
            await self._store.put(agent, [row])
        except StoreError as error:
            self.lost = error
            raise
        del self._writing[row.sample_id]
        self._unwritten.pop(row.sample_id, None)

    async def _left_over(self) -> Mapping[AgentName, Sequence[PartialRow]]:
        """Rows that the store may lack: whose writing was interrupted, whose answers came late, or never."""
        found = {sample_id: (one.agent, one.row(sample_id)) for sample_id, one in self._unwritten.items()}
        found |= {row.sample_id: (agent, row) for agent, row in await self._late_answers()}
        found |= self._writing  # Whether the store has it is unknown, and putting it twice is no error.
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for agent, row in found.values():
            rows[agent].append(row)
        return rows

    async def _late_answers(self) -> list[tuple[AgentName, PartialRow]]:
        """The rows of what was sampled of the calls that the workflow left."""
        rows: list[tuple[AgentName, PartialRow]] = []
        for answer, turn_of in self._interrupted:
            try:
                turn = turn_of(await answer)
            except EngineError:  # It was lost with all that it had sampled.
                continue
            if len(turn.response_ids):
                rows.append((turn.agent, response_row(turn)))
        return rows

    def _closing_rows(self, episode: Episode) -> Mapping[AgentName, Sequence[PartialRow]]:
        """What each turn came to: its reward, if it got one, and the agent of the call that followed it."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for turn, following in pairwise((*episode.turns, None)):
            assert turn is not None
            reward = episode.rewards[turn.sample_id]
            next_agent = self._agents.index(following.agent) if following else None
            rows[turn.agent].append(closing_row(turn.sample_id, turn.policy, reward=reward, next_agent_id=next_agent))
        return rows
