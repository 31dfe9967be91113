"""Recorder on the experience store: each turn is there as it happens, prompt first, then response, then reward.

What engines sampled of a call that failed, was aborted or left by the workflow is in its row too, which ends FAILED.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from flexmarl.agents.recorder import TurnOf
from flexmarl.errors import EngineError, StoreError
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.rows import closing_row, prompt_row, response_row
from flexmarl.records import AgentName, Episode, Generation, IntArray, PolicyName, RowState, SampleId, Scalar, Turn
from flexmarl.rollout.calls import refuse_late

UNENDED = "the call did not end"


class StoreRecorder:
    """Writes one episode's turns into its agents' tables, and closes their rows when the episode ends.

    Nothing is written after that.
    """

    def __init__(self, store: ExperienceStore, agents: Sequence[AgentName]) -> None:
        """`agents` in the team's order: the store refers to them by index."""
        self._store = store
        self._agents = tuple(agents)
        self._opened: list[SampleId] = []
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
        """Opens the row, before the call is sent. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(sample_id)
        self._opened.append(sample_id)
        await self._write(agent, prompt_row(sample_id, policy, prompt_ids, parent=parent))

    async def turn(self, turn: Turn) -> None:
        """Adds what was sampled, with its version. Raises EpisodeError if the episode has ended."""
        if self._ended:
            await refuse_late(turn.sample_id)
        await self._write(turn.agent, response_row(turn))

    async def failed(self, turn: Turn, because: str) -> None:
        """Adds what was sampled, if anything was; the row ends FAILED, whatever becomes of the episode."""
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
        for agent, row in [*self._writing.values(), *await self._late_answers()]:
            # Interrupted, or still on its way: whether the row is there is unknown, and putting it twice is no error.
            await self._store.put(agent, [row])
        if not episode.finished:
            await self._store.settle(self._opened, Outcome(state=ends, reason=episode.reason))
            return
        for agent, rows in self._closing_rows(episode).items():
            await self._store.put(agent, rows)
        unfinished: dict[str, list[SampleId]] = defaultdict(list)
        for sample_id in self._opened:
            if sample_id not in episode.rewards:
                unfinished[self._failed.get(sample_id, UNENDED)].append(sample_id)
        for because, ids in unfinished.items():
            await self._store.settle(ids, Outcome(state=RowState.FAILED, reason=because))
        if untrained and episode.rewards:
            await self._store.settle(list(episode.rewards), Outcome(state=RowState.FILTERED, reason=untrained))

    async def _write(self, agent: AgentName, row: PartialRow) -> None:
        self._writing[row.sample_id] = (agent, row)
        with self._noting_loss():
            await self._store.put(agent, [row])
        del self._writing[row.sample_id]

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

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self.lost = error
            raise

    def _closing_rows(self, episode: Episode) -> Mapping[AgentName, Sequence[PartialRow]]:
        """What each turn came to: its reward, if it got one, and the agent of the call that followed it."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for turn, following in pairwise((*episode.turns, None)):
            assert turn is not None
            reward = episode.rewards[turn.sample_id]
            next_agent = self._agents.index(following.agent) if following else None
            rows[turn.agent].append(closing_row(turn.sample_id, turn.policy, reward=reward, next_agent_id=next_agent))
        return rows
