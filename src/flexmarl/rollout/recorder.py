"""Recorder on the experience store: each turn is there as it happens, prompt first, then response, then reward."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from flexmarl.errors import EpisodeError
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.rows import closing_row, prompt_row, response_row
from flexmarl.records import AgentName, Episode, IntArray, PolicyName, RowState, SampleId, Scalar, Turn


class StoreRecorder:
    """Writes one episode's turns into its agents' tables, and closes their rows if the episode fails."""

    def __init__(self, store: ExperienceStore, agents: Sequence[AgentName]) -> None:
        """`agents` in the team's order: the store refers to them by index."""
        self._store = store
        self._agents = tuple(agents)
        self._opened: list[SampleId] = []
        self._opening: dict[SampleId, tuple[AgentName, PartialRow]] = {}
        self._ended = False

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
        self._check_open(sample_id)
        row = prompt_row(sample_id, policy, prompt_ids, parent=parent)
        self._opened.append(sample_id)
        self._opening[sample_id] = (agent, row)
        await self._store.put(agent, [row])
        del self._opening[sample_id]

    async def turn(self, turn: Turn) -> None:
        """Adds what was sampled, with its version. Raises EpisodeError if the episode has ended."""
        self._check_open(turn.sample_id)
        await self._store.put(turn.agent, [response_row(turn)])

    async def finish(self, episode: Episode, *, ends: RowState = RowState.FAILED, untrained: str = "") -> None:
        """Adds the rewards of a finished episode, or moves every row of another one to `ends` (law 11).

        `untrained` says why rows of a finished one are never trained: they end FILTERED at once.
        """
        self._ended = True
        for agent, row in list(self._opening.values()):
            # Interrupted, or still on its way: whether the row is there is unknown, and putting it twice is no error.
            await self._store.put(agent, [row])
        if not episode.finished:
            await self._store.settle(self._opened, Outcome(state=ends, reason=episode.reason))
            return
        for agent, rows in self._closing_rows(episode).items():
            await self._store.put(agent, rows)
        unfinished = [sample_id for sample_id in self._opened if sample_id not in episode.rewards]
        if unfinished:
            await self._store.settle(unfinished, Outcome(state=RowState.FAILED, reason="the call did not end"))
        if untrained:
            await self._store.settle(list(episode.rewards), Outcome(state=RowState.FILTERED, reason=untrained))

    def _closing_rows(self, episode: Episode) -> Mapping[AgentName, Sequence[PartialRow]]:
        """What each turn came to: its reward, if it got one, and the agent of the call that followed it."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for turn, following in zip(episode.turns, (*episode.turns[1:], None), strict=True):
            reward = episode.rewards[turn.sample_id]
            next_agent = self._agents.index(following.agent) if following else None
            rows[turn.agent].append(closing_row(turn.sample_id, turn.policy, reward=reward, next_agent_id=next_agent))
        return rows

    def _check_open(self, sample_id: SampleId) -> None:
        """A task that a workflow left behind must open no row after the last look at them: it would stay OPEN."""
        if self._ended:
            raise EpisodeError(f"call {sample_id} came after the end of its episode; await every act in the workflow")
