"""Runs one episode: plays the workflow on one task under a time limit, and records how it ended.

consumes    a group and the index of the episode in it
waits for   the workflow, and through it for engines and tools; after a cancellation, for a grace period
produces    an Episode: finished, failed or timed out; an unfinished one has a reason
unblocked by the end of the workflow, the time limit, or a stop of its group

The workflow runs in an asyncio task of its own. Its errors, and those of the tasks it starts, fail this episode only.
Only the loss of the store, Ctrl-C and the cancellation of the player itself are raised to the caller.
"""

import asyncio
import linecache
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from flexmarl.agents import EpisodeContext, Generate, NoRecorder, Team, TeamSpec
from flexmarl.agents.doors import Doors
from flexmarl.agents.workflow_tasks import WorkflowTasks, waits_at
from flexmarl.errors import EpisodeError, FlexmarlError, cause_of, described, place_of, text_of, type_name, users_line
from flexmarl.events.event import Events
from flexmarl.events.group_events import episode_failed
from flexmarl.events.notices import EpisodeBroke, EpisodeWaits
from flexmarl.experience.interface import ExperienceStore, PartialRow
from flexmarl.records import (
    LONGEST_LABEL,
    STOPPED,
    AgentName,
    Episode,
    EpisodeStatus,
    Failure,
    GroupRecord,
    Purpose,
    RowState,
    Turn,
    make_trajectory_id,
)
from flexmarl.rollout.episode_calls import EpisodeCalls, Holds, TimeLimit
from flexmarl.rollout.recorder import RowMove, StoreRecorder, TakesRows
from flexmarl.tasks.scorers import Scores
from flexmarl.tools.open_tools import OpenTools, RunningCalls

AT_THE_END_S = 2.0
"""Upper bound on a workflow's grace period when the whole run ends, because such a run has only seconds."""
IDLE_S = 60.0
"""Time without a call after which it is told where a workflow waits."""

UNTRAINED = {
    Purpose.GREEDY: "the greedy play: others are compared with it",
    Purpose.EVALUATION: "a held-out task: never trained on",
}
"""Why the rows of a finished episode become FILTERED at its end, by the purpose of the episode."""


class Stop:
    """Ends the episodes of one group early: each of them ends as if its time limit had passed."""

    def __init__(self, because: str = "") -> None:
        self.because = because
        """Why the group was stopped; "" if it was not."""
        self._running: dict[Callable[[], None], None] = {}
        """Ends the running episodes, in order of arrival; a set's order would differ from run to run."""

    def now(self, because: str) -> None:
        """Stops the episodes that run, and those that begin later."""
        self.because = because
        for end in self._running:
            end()

    @contextmanager
    def calls(self, end: Callable[[], None]) -> Iterator[None]:
        """Makes a stop call `end`, for as long as the block lasts; at once if it was before."""
        self._running[end] = None
        if self.because:
            end()
        try:
            yield
        finally:
            del self._running[end]


def expire(limit: asyncio.Timeout) -> None:
    """Ends the block that the limit surrounds, if it has not expired."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """An episode that has ended. Its rows have still to be moved."""

    episode: Episode
    """Without tokens if a store has them."""
    rows: Sequence[tuple[AgentName, Sequence[PartialRow]]] = ()
    """Rows that are not written yet, with the agents to whose tables they belong, in order."""
    moves: Sequence[RowMove] = ()
    """The states that its rows move to."""
    error: BaseException | None = None
    """The exception that left the workflow, if one did. It is only passed to listeners, and kept by nobody."""


class Player:
    """Plays episodes of one team; keeps nothing between them but scores."""

    def __init__(
        self,
        *,
        team: TeamSpec,
        generate: Generate,
        run_seed: int,
        timeout_s: float,
        grace_s: float = 3.0,
        store: ExperienceStore | None = None,
        temperature: float | None = None,
        holds: Holds = lambda _: None,
        events: Events | None = None,
        running: RunningCalls | None = None,
        doors: Doors | None = None,
    ) -> None:
        """`grace_s`: seconds that a workflow may take to end once it is cancelled. `store` None: nothing is recorded.
        `temperature` replaces the agents' own. Evaluations use the last two.

        `holds`: what a policy's call must wait for. An episode's time limit pauses while one of its calls waits so.
        `events` get the failed episodes, except those that a `Stop` ended. `running`: the run's places for tool calls.
        `doors`: the run's gateway, if it has one.
        """
        self._team, self._generate, self._run_seed = team, generate, run_seed
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._store, self._holds, self._events = store, holds, events
        self._temperature = temperature
        self._running, self._doors = running or RunningCalls(), doors
        self._scores = Scores(team.sandbox)

    async def play(
        self,
        group: GroupRecord,
        index: int,
        *,
        stop: Stop | None = None,
        generate: Generate | None = None,
        greedy: bool = False,
        store: ExperienceStore | None = None,
    ) -> Episode:
        """Plays episode `index` of the group. Raises only StoreError, KeyboardInterrupt and CancelledError.

        `generate` replaces the player's own, e.g. by that of a Lockstep, and `store` the player's own. If `stop` ends
        the episode, its rows become EXPIRED. A `greedy` episode is played at temperature 0, with purpose GREEDY. Its
        rows, and those of an evaluation, become FILTERED at its end. The turns of the result have no tokens if a store
        has them.
        """
        stop = stop or Stop()
        played = await self.played(group, index, stop=stop, generate=generate, greedy=greedy, rows=store)
        if store := store or self._store:
            for agent, rows in played.rows:
                await store.put(agent, rows)
            for move in played.moves:
                await store.settle(move.ids, move.outcome)
        if not stop.because:
            self._note_failure(played, purpose_of(group, greedy=greedy))
        return played.episode

    async def played(
        self,
        group: GroupRecord,
        index: int,
        *,
        stop: Stop,
        generate: Generate | None = None,
        greedy: bool = False,
        rows: TakesRows | None = None,
        limit: TimeLimit | None = None,
    ) -> PlayedEpisode:
        """Plays as `play` does, but moves no rows and emits no failure.

        `rows` takes the rows, instead of the player's own store. `limit` replaces the player's own time limit.
        """
        rows = rows or self._store
        recorder = StoreRecorder(rows, tuple(self._team.agents)) if rows is not None else None
        limit = limit or TimeLimit(self._timeout_s)
        calls = EpisodeCalls(generate or self._generate, self._holds, limit)
        temperature = 0.0 if greedy else self._temperature
        tools = OpenTools(lambda: limit.timeout.when() or math.inf, self._running)
        context = EpisodeContext(
            task=group.task,
            group=group.group,
            trajectory_id=make_trajectory_id(group.group, index, group.attempt),
            run_seed=self._run_seed,
            generate=calls.send,
            recorder=recorder or NoRecorder(),
            sampling={} if temperature is None else {"temperature": temperature},
            purpose=purpose_of(group, greedy=greedy),
            environment=self._team.environment,
            sandbox=self._team.sandbox,
            scores=self._scores,
            tools=tools,
            doors=self._doors,
        )
        team = self._team.seat(context)
        clock = asyncio.get_running_loop().time
        started = clock()
        async with tools.block(self._grace_s):
            ended = await self._run(team, context, stop, limit, calls)
        if tools.faults and ended.error is None and ended.status is EpisodeStatus.FINISHED:
            fault = EpisodeError(f"a tool failed when it was closed: {described(tools.faults[0])}")
            ended = _Ended(EpisodeStatus.FAILED, str(fault), failure_of(tools.faults[0]), fault)
        if recorder is not None and recorder.lost is not None:
            raise recorder.lost
        episode = replace(self._record(team, context, ended), duration_s=clock() - started)
        if recorder is None:
            return PlayedEpisode(episode, error=ended.error)
        await recorder.close(episode)
        moves = recorder.moves(
            episode,
            ends=RowState.EXPIRED if stop.because else RowState.FAILED,
            untrained=UNTRAINED.get(context.purpose, ""),
        )
        return PlayedEpisode(episode.without_tokens(), moves=moves, error=ended.error)

    @property
    def generate(self) -> Generate:
        """The function that serves the calls of its episodes."""
        return self._generate

    async def _run(
        self, team: Team, context: EpisodeContext, stop: Stop, limit: TimeLimit, calls: EpisodeCalls
    ) -> "_Ended":
        """Plays the workflow until it ends or its time is over. No call of the episode is under way afterwards."""
        tasks, late, place = WorkflowTasks(), "", ""
        workflow = tasks.start(self._team.run, context.task, team, name=f"workflow/{context.trajectory_id}")
        try:
            async with limit:
                with stop.calls(partial(expire, limit.timeout)):
                    await self._ended(workflow, context, calls)
        except TimeoutError:
            late = stop.because or f"took longer than rollout.episode_timeout_s={self._timeout_s:g}"
            place = waits_at(workflow)
            calls.close()
            if not await tasks.end(workflow, self._grace_s):
                late += f"; given up: it went on for rollout.cancel_grace_s={self._grace_s:g} after it was cancelled"
        except asyncio.CancelledError:
            calls.close()
            await tasks.end(workflow, min(self._grace_s, AT_THE_END_S))
            raise
        await calls.end()
        if late:
            failure = Failure(kind=STOPPED if stop.because else "timed_out", text=one_line(late), place=place)
            return _Ended(EpisodeStatus.TIMED_OUT, late, failure)
        return ending_of(workflow, f"workflow on task {context.task.input_id}")

    async def _ended(self, workflow: "asyncio.Task[None]", context: EpisodeContext, calls: EpisodeCalls) -> None:
        """Waits until the workflow has ended. Tells `events` if it goes on for long without a call."""
        while not (await asyncio.wait([workflow], timeout=IDLE_S / 2))[0]:
            if self._events and calls.idle_s >= IDLE_S and (place := waits_at(workflow)):
                task = context.task.input_id
                idle = EpisodeWaits(task=task, place=place, seconds=calls.idle_s, timeout_s=self._timeout_s)
                self._events.emit(idle)

    def _note_failure(self, played: PlayedEpisode, purpose: Purpose) -> None:
        """Emits a failed episode."""
        episode, failure = played.episode, played.episode.failure
        if self._events is None or failure is None:
            return
        self._events.emit(episode_failed(episode, purpose))
        self._events.emit(
            EpisodeBroke(
                episode=episode.episode, task=episode.task, purpose=purpose, failure=failure, error=played.error
            )
        )

    def _record(self, team: Team, context: EpisodeContext, ended: "_Ended") -> Episode:
        """The record of the episode. FAILED if an act was not awaited, or if a trained turn has no reward; without
        turns if the team is broken."""
        episode = Episode(
            episode=context.episode,
            group=context.group,
            task=context.task.input_id,
            status=ended.status,
            reason=ended.reason,
            failure=ended.failure,
        )
        try:
            forgotten = team.never_awaited()
            if episode.finished and forgotten:
                failure = _never_awaited(*forgotten[0])
                episode = _failed(episode, str(failure), failure)
            elif episode.finished and (turn := self._unrewarded(team)):
                episode = _failed(
                    episode,
                    f"agent '{turn.agent}' got no reward for call {turn.sample_id}; the workflow must call "
                    f"`team.{turn.agent}.reward(x)` or `reply.reward(x)` before it returns",
                    Failure(kind="unrewarded", text=f"agent '{turn.agent}' got no reward for a call"),
                )
            return replace(
                episode,
                turns=team.turns,
                rewards=team.rewards(),
                call_rewards=team.call_rewards(),
                parts=team.parts(),
                signals=team.signals(),
                untrained=team.untrained(),
                metrics=team.metrics,
            )
        except Exception as error:  # A workflow may have replaced any part of the team.
            broken = f"the workflow broke its team: {described(error)}"
            if episode.finished:
                return _failed(episode, broken, failure_of(error))
            return replace(episode, status=EpisodeStatus.FAILED)

    def _unrewarded(self, team: Team) -> Turn | None:
        """A trained policy's first turn without a reward; None if all have one. A missing reward is not 0.0."""
        rewards, trained = team.rewards(), self._team.trained
        return next((turn for turn in team.turns if rewards[turn.sample_id] is None and turn.policy in trained), None)


@dataclass(frozen=True, slots=True)
class _Ended:
    """How the workflow of an episode ended."""

    status: EpisodeStatus
    reason: str = ""
    failure: Failure | None = None
    error: BaseException | None = None
    """The exception that left the workflow."""


def ending_of(workflow: "asyncio.Task[None]", doing: str) -> _Ended:
    """How a workflow ended that nobody stopped. Raises KeyboardInterrupt if Ctrl-C ended it."""
    if workflow.cancelled():
        left = "a CancelledError left it, though nobody had stopped the episode"
        because = f"{doing}: {left}; catch it where a task is awaited that may have been cancelled"
        failure = Failure(kind="cancelled", text=left, place=_where_cancelled(workflow))
        return _Ended(EpisodeStatus.FAILED, because, failure)
    error = workflow.exception()
    if error is None:
        return _Ended(EpisodeStatus.FINISHED)
    cause = cause_of(error)
    if isinstance(cause, KeyboardInterrupt):
        raise cause
    because = described(cause) if isinstance(cause, FlexmarlError) else f"{doing}: {described(cause)}{_hint(cause)}"
    return _Ended(EpisodeStatus.FAILED, because, failure_of(cause), cause)


def purpose_of(group: GroupRecord, *, greedy: bool) -> Purpose:
    """Why an episode of the group is played."""
    return Purpose.GREEDY if greedy else group.purpose


def _where_cancelled(workflow: "asyncio.Task[None]") -> str:
    """File and line of the user's code that a CancelledError left, e.g. `team.py:61`."""
    try:
        workflow.exception()
    except asyncio.CancelledError as error:  # The one that ended it, with its traceback.
        return place_of(error)
    return ""


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception is: its type, its text in one line, and the line of code that raised it."""
    return Failure(kind=type_name(error), text=f"{one_line(text_of(error))}{_hint(error)}", place=place_of(error))


def _hint(error: BaseException) -> str:
    """The remedy for an error that a forgotten `await` caused; "" for any other error."""
    forgotten = isinstance(error, AttributeError | TypeError) and "'coroutine' object" in text_of(error)
    return ": write `await` before the call that made it" if forgotten else ""


def _never_awaited(file: str, line: int) -> Failure:
    """The failure of an episode whose workflow made an act at this line, and never awaited it."""
    made = linecache.getline(file, line).strip()
    text = f"the call `{made}` was made and never awaited, so it did not run; write `await` before it"
    return Failure(kind="never_awaited", text=one_line(text), place=users_line([(file, line)]))


def _failed(episode: Episode, reason: str, failure: Failure) -> Episode:
    return replace(episode, status=EpisodeStatus.FAILED, reason=reason, failure=failure)


def one_line(text: str) -> str:
    """The text as a label: in one line, of at most LONGEST_LABEL characters."""
    line = " ".join(text[: 4 * LONGEST_LABEL].split())
    return line if len(line) <= LONGEST_LABEL else f"{line[: LONGEST_LABEL - 3]}..."
