"""Recorder on the experience store: writes a turn's row once it is answered, and its reward when the episode ends.

A call under way has no row yet: a resumed run plays its episode again, so nothing would read the row. A call that ended
without an answer gets its row at the end of the episode. If a call failed, was aborted or was left by the workflow, its
row holds the tokens that were sampled for it; the row is never trained on.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from flexmarl.agents.context import TurnOf
from flexmarl.errors import EngineError, StoreError
from flexmarl.experience.interface import Outcome, PartialRow
from flexmarl.experience.turn_rows import closing_row, prompt_row, response_row
from flexmarl.records import AgentName, Episode, Generation, IntArray, RowState, SampleId, SentCall, Turn
from flexmarl.rollout.episode_calls import refuse_late

UNENDED = "the call did not end"


class RowMove(NamedTuple):
    """Rows of one episode, and the state that they move to."""

    ids: tuple[SampleId, ...]
    outcome: Outcome


class TakesRows(Protocol):
    """The part of an experience store that a recorder uses."""

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """See `ExperienceStore.put`."""
        ...


class StoreRecorder:
    """Writes one episode's turns into its agents' tables, and closes their rows when the episode ends.

    Nothing is written after that.
    """

    def __init__(self, store: TakesRows, agents: Sequence[AgentName]) -> None:
        """`agents`: in the team's order, because the store refers to them by index."""
        self._store = store
        self._agents = tuple(agents)
        self._calls: list[SampleId] = []
        """All calls of the episode, in the order in which they were sent."""
        self._unwritten: dict[SampleId, tuple[SentCall, IntArray]] = {}
        """The calls that have no row in the store, and their prompts."""
        self._writing: dict[SampleId, tuple[AgentName, PartialRow]] = {}
        """Rows that are being written, or whose writing was interrupted."""
        self._failed: dict[SampleId, str] = {}
        """Calls that gave no turn, each with the reason."""
        self._interrupted: list[tuple[asyncio.Future[Generation], TurnOf]] = []
        self._ended = False
        self.lost: StoreError | None = None
        """The store's error, if it raised one. It ends the run, even if the workflow catches it."""

    async def prompt(self, call: SentCall, prompt_ids: IntArray) -> None:
        """Notes a call that is about to be sent. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(call.sample_id)
        self._calls.append(call.sample_id)
        self._unwritten[call.sample_id] = (call, prompt_ids)

    async def turn(self, turn: Turn) -> None:
        """Writes the row, durably: prompt, response and version. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(turn.sample_id)
        await self._write(turn.agent, response_row(turn))

    async def failed(self, turn: Turn, because: str) -> None:
        """Writes the sampled tokens, if there are any. If the episode finishes, the row becomes FAILED all the same."""
        if self._ended:
            return
        self._failed[turn.sample_id] = because
        if len(turn.response_ids):
            await self._write(turn.agent, response_row(turn))

    def interrupted(self, sample_id: SampleId, answer: "asyncio.Future[Generation]", turn_of: TurnOf) -> None:
        """Notes a call that the workflow left. Its sampled tokens are written at the end of the episode."""
        self._failed[sample_id] = "the workflow left the call before its answer came"
        self._interrupted.append((answer, turn_of))

    async def close(self, episode: Episode) -> None:
        """Writes what the store lacks, and the rewards of a finished episode. `moves` says what its rows become."""
        self._ended = True
        for agent, rows in (await self._left_over()).items():
            await self._store.put(agent, rows)
        if episode.finished:
            for agent, rows in self._closing_rows(episode).items():
                await self._store.put(agent, rows)

    def moves(self, episode: Episode, *, ends: RowState = RowState.FAILED, untrained: str = "") -> list[RowMove]:
        """The moves of the episode's rows at its end: every row of an unfinished one moves to `ends` (law 11).

        `untrained`: why the rows of a finished episode are never trained on; they become FILTERED at once.
        """
        if not episode.finished:
            return [RowMove(tuple(self._calls), Outcome(state=ends, reason=episode.reason))]
        unfinished: dict[Outcome, list[SampleId]] = defaultdict(list)
        for sample_id in self._calls:
            if because := episode.untrained.get(sample_id):
                unfinished[Outcome(state=RowState.FILTERED, reason=because)].append(sample_id)
            elif sample_id not in episode.rewards:
                because = self._failed.get(sample_id, UNENDED)
                unfinished[Outcome(state=RowState.FAILED, reason=because)].append(sample_id)
        moves = [RowMove(tuple(ids), outcome) for outcome, ids in unfinished.items()]
        if untrained and episode.rewards:
            moves.append(RowMove(tuple(episode.rewards), Outcome(state=RowState.FILTERED, reason=untrained)))
        return moves

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
        """Rows that the store may lack: their writing was interrupted, or their answers came late or never."""
        found = {
            sample_id: (call.agent, prompt_row(sample_id, call.policy, prompt_ids, parent=call.parent))
            for sample_id, (call, prompt_ids) in self._unwritten.items()
        }
        found |= {row.sample_id: (agent, row) for agent, row in await self._late_answers()}
        found |= self._writing  # The store may have these already; it allows putting a row twice.
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for agent, row in found.values():
            rows[agent].append(row)
        return rows

    async def _late_answers(self) -> list[tuple[AgentName, PartialRow]]:
        """Rows with the tokens that were sampled for calls which the workflow left."""
        rows: list[tuple[AgentName, PartialRow]] = []
        for answer, turn_of in self._interrupted:
            try:
                turn = turn_of(await answer)
            except EngineError:  # The engine was lost, with the tokens it had sampled.
                continue
            if len(turn.response_ids):
                rows.append((turn.agent, response_row(turn)))
        return rows

    def _closing_rows(self, episode: Episode) -> Mapping[AgentName, Sequence[PartialRow]]:
        """The reward of each turn, if it got one, and the agent of the next turn."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for turn, following in pairwise((*episode.turns, None)):
            assert turn is not None
            reward = episode.rewards[turn.sample_id]
            next_agent = self._agents.index(following.agent) if following else None
            rows[turn.agent].append(
                closing_row(
                    turn.sample_id,
                    turn.policy,
                    reward=reward,
                    parts=episode.parts.get(turn.sample_id, {}),
                    signals=episode.signals.get(turn.sample_id, {}),
                    next_agent_id=next_agent,
                )
            )
        return rows
