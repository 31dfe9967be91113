"""Plays episodes outside the controller: workflows, tools and tokenisers run here, engines are asked through it.

    controller                                         rollout worker
    RemotePlayer ── play(job) ─────────────────────►   RolloutHost ──► Player ──► workflow
                 ◄── EpisodeAsks, CallLeft, ... (a stream)                      │
                 ── tell(CallAnswered, ...) ───────►                      └──► rows into the store of its node

consumes     jobs, each of which is one episode, and the answers to its calls
waits for    answers of the controller, the workflow's own code, the store
produces     per episode a stream of what it asks for, at last a `PlayedEpisode`; its rows, but not their moves
unblocked by an answer; the time limit of the episode, which pauses while a call is held; the end of the stream
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from flexmarl.agents import Team, TeamSpec, Workflow
from flexmarl.agents.context import Interrupted, OnTokens, forget
from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.cluster.host import ErrorWithoutInit, portable
from flexmarl.cluster.proxy import sends
from flexmarl.errors import EpisodeError
from flexmarl.events.event import Events, Notice
from flexmarl.events.failures import trace_of
from flexmarl.events.run_events import LoopBlocked
from flexmarl.experience.interface import ExperienceStore, PartialRow
from flexmarl.records import AgentName, Generation, GenerationRequest, GroupRecord, Task, WorkerId
from flexmarl.rollout.blocking_watch import BlockingWatch
from flexmarl.rollout.episode_calls import TimeLimit
from flexmarl.rollout.player import AT_THE_END_S, PlayedEpisode, Player, Stop
from flexmarl.tools.open_tools import RunningCalls

Rows = Literal["none", "node", "controller"]
"""Writer of an episode's rows: nobody; the worker, into the run's store; the controller at the end, into another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayJob:
    """One episode to play."""

    group: GroupRecord
    index: int
    greedy: bool = False
    temperature: float | None = None
    """Replaces the agents' own."""
    rows: Rows = "none"
    stopped: str = ""
    """Why its group was stopped already; "" if it was not."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Tells the episodes of a worker apart."""
        return self.group.group, self.index, self.group.attempt


@dataclass(frozen=True, slots=True)
class ToolPlace:
    """A place for a tool call, which the controller gives out for the whole run. It is held until it is left."""

    tool: str
    max_parallel: int | None
    """As the tool's own."""


@dataclass(frozen=True, slots=True)
class EpisodeAsks:
    """A call, or a tool call's place, that the episode waits for."""

    number: int
    """Unique in its worker."""
    what: GenerationRequest | ToolPlace


@dataclass(frozen=True, slots=True)
class CallLeft:
    """The episode waits no longer: a call is aborted, and its answer is still wanted; a place is free again."""

    number: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """Something for the listeners of the run."""

    notice: Notice


FromEpisode = EpisodeAsks | CallLeft | Noticed | PlayedEpisode


@dataclass(frozen=True, slots=True)
class CallAnswered:
    """The answer to an `EpisodeAsks`: a Generation, None for a place that is now held, or an error."""

    number: int
    answer: Generation | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CallHeld:
    """A call waits at the controller's gate, and so the episode's time does not go on; or it does no longer."""

    number: int
    held: bool


@dataclass(frozen=True, slots=True)
class EpisodeStopped:
    """The episode's group was stopped."""

    key: tuple[int, int, int]
    because: str


ToEpisode = CallAnswered | CallHeld | EpisodeStopped


class RolloutWorker(Protocol):
    """Contract of a resident that plays episodes."""

    def play(self, job: PlayJob) -> AsyncIterator[FromEpisode]:
        """Plays one episode. Its last item is a `PlayedEpisode`. Closing the stream ends the episode.

        Raises StoreError if its rows cannot be written.
        """
        ...

    @sends
    async def tell(self, messages: Sequence[ToEpisode]) -> None:
        """Passes messages to the episodes, in this order. Those to episodes that have ended are ignored."""
        ...

    async def beat(self) -> None:
        """Returns as soon as the event loop goes on."""
        ...

    async def close(self) -> None:
        """Ends all tasks of workflows, and closes the store. Calling it twice is allowed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayParts:
    """All that a worker plays with. It can be pickled."""

    team: TeamSpec
    open_store: Callable[[], ExperienceStore]
    """Opens the run's store where the worker lives."""
    run_seed: int
    timeout_s: float
    grace_s: float
    bounded: bool = False
    """True if the run bounds the number of tool calls that run at once."""


class RolloutHost:
    """The RolloutWorker that plays, on the event loop of its process."""

    def __init__(self, name: WorkerId, parts: PlayParts) -> None:
        """`name` is its own, for its events."""
        self._name, self._parts = name, replace(parts, team=replace(parts.team, run=uninterrupted(parts.team.run)))
        self._numbers = itertools.count()
        self._store: ExperienceStore | None = None
        self._lines: dict[tuple[int, int, int], EpisodeLink] = {}
        """By the key of its job: the line of each episode that is played."""
        self._asked: dict[int, EpisodeLink] = {}
        """By number: the line of each call that has no answer yet."""
        self._watch: BlockingWatch | None = None

    async def play(self, job: PlayJob) -> AsyncIterator[FromEpisode]:
        """Plays one episode, in a task of its own: it goes on while what it asked for waits to be read."""
        self._begin_watch()
        line = EpisodeLink(self._numbers, self._asked, job, self._parts.timeout_s)
        self._lines[job.key] = line
        playing = asyncio.create_task(self._play(job, line), name=f"episode/{job.key}")
        playing.add_done_callback(lambda _: line.items.put_nowait(None))
        try:
            while (item := await line.items.get()) is not None:
                yield item
            yield await playing
        finally:
            playing.cancel()
            await asyncio.wait([playing])
            line.end()
            self._lines.pop(job.key, None)

    async def tell(self, messages: Sequence[ToEpisode]) -> None:
        """Passes messages on."""
        for message in messages:
            if isinstance(message, EpisodeStopped):
                if line := self._lines.get(message.key):
                    line.stop.now(message.because)
            elif line := self._asked.get(message.number):
                line.hear(message)

    async def beat(self) -> None:
        """Returns."""

    async def close(self) -> None:
        """Ends what workflows left behind, and closes the store."""
        if self._watch is not None:
            self._watch.__exit__(None, None, None)
            self._watch = None
        await end_leftover_tasks(AT_THE_END_S)
        if self._store is not None:
            await self._store.close()

    async def _play(self, job: PlayJob, line: "EpisodeLink") -> PlayedEpisode:
        parts, kept = self._parts, KeptRows()
        player = Player(
            team=parts.team,
            generate=line.generate,
            run_seed=parts.run_seed,
            timeout_s=parts.timeout_s,
            grace_s=parts.grace_s,
            temperature=job.temperature,
            events=line.events,
            running=PlacesElsewhere(line, bounded=parts.bounded),
        )
        played = await player.played(
            job.group,
            job.index,
            stop=line.stop,
            greedy=job.greedy,
            rows=kept if job.rows == "controller" else self._store_of(job),
            limit=line.limit,
        )
        return replace(played, rows=kept.rows, error=crossing(played.error))

    def _store_of(self, job: PlayJob) -> ExperienceStore | None:
        """The store of the run, if the episode's rows belong there."""
        if job.rows == "node" and self._store is None:
            self._store = self._parts.open_store()
        return self._store if job.rows == "node" else None

    def _begin_watch(self) -> None:
        """Begins to watch this process's event loop, with its first episode."""
        if self._watch is None:
            events = Events()
            events.listen(LoopBlocked, self._blocked)
            self._watch = BlockingWatch(events, lambda place: None)
            self._watch.__enter__()

    def _blocked(self, blocked: LoopBlocked) -> None:
        """Sends it with the stream of any episode: the controller may have asked for nothing else."""
        for line in [*self._lines.values()][:1]:
            line.items.put_nowait(Noticed(replace(blocked, process=self._name)))


class KeptRows:
    """Takes the rows of one episode for a store that only the controller has."""

    def __init__(self) -> None:
        self.rows: list[tuple[AgentName, Sequence[PartialRow]]] = []

    async def put(self, agent: AgentName, rows: Sequence[PartialRow]) -> None:
        """Keeps the rows."""
        self.rows.append((agent, rows))


class EpisodeLink:
    """Carries what one episode and the controller say to each other."""

    def __init__(self, numbers: "itertools.count[int]", asked: "dict[int, EpisodeLink]", job: PlayJob, limit_s: float):
        """`asked`: those of the worker, by number; the line adds itself."""
        self._numbers, self._asked = numbers, asked
        self.items: asyncio.Queue[FromEpisode | None] = asyncio.Queue()
        """For the controller; None: there will be no more."""
        self.stop, self.limit, self.events = Stop(job.stopped), TimeLimit(limit_s), Events()
        self.events.listen(Notice, lambda notice: self.items.put_nowait(Noticed(notice)))
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._held: dict[int, AbstractContextManager[None]] = {}

    async def generate(
        self, request: GenerationRequest, /, *, interrupted: Interrupted = forget, on_tokens: OnTokens | None = None
    ) -> Generation:
        """Asks the controller for a call. Nothing is heard before its answer."""
        number, answer = self.ask(request)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self.leave(number)
            interrupted(answer)
            raise

    def ask(self, what: GenerationRequest | ToolPlace) -> tuple[int, "asyncio.Future[Any]"]:
        """Asks for something; the future gets the answer."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # Perhaps nobody else looks.
        self._asked[number], self._answers[number] = self, answer
        self.items.put_nowait(EpisodeAsks(number, what))
        return number, answer

    def leave(self, number: int) -> None:
        """Tells the controller that a call is no longer waited for, or a place is free."""
        self.items.put_nowait(CallLeft(number))

    def hear(self, message: CallAnswered | CallHeld) -> None:
        """Takes a message of the controller."""
        if held := self._held.pop(message.number, None):
            held.__exit__(None, None, None)
        if isinstance(message, CallHeld):
            if message.held:
                self._held[message.number] = self.limit.paused()
                self._held[message.number].__enter__()
            return
        del self._asked[message.number]
        answer = self._answers.pop(message.number)
        if answer.done():  # Whoever waited for a place was cancelled.
            return
        if message.error is not None:
            answer.set_exception(message.error)
        else:
            answer.set_result(message.answer)

    def end(self) -> None:
        """Forgets what has no answer yet."""
        for number in self._answers:
            del self._asked[number]


class PlacesElsewhere(RunningCalls):
    """Places for tool calls that the controller gives out. Without a bound, none is asked for."""

    def __init__(self, line: EpisodeLink, *, bounded: bool) -> None:
        """`bounded`: the run bounds tool calls of all tools together."""
        super().__init__()
        self._line, self._bounded = line, bounded

    @asynccontextmanager
    async def place(self, tool: str, max_parallel: int | None = None) -> AsyncIterator[None]:
        """Holds a place of the run."""
        if not self._bounded and not max_parallel:
            yield
            return
        number, held = self._line.ask(ToolPlace(tool, max_parallel))
        try:
            await held
            yield
        finally:
            self._line.leave(number)


def uninterrupted(run: Workflow) -> Workflow:
    """The workflow, with a KeyboardInterrupt as its own failure: as such it would end the event loop of the process."""

    async def play(task: Task, team: Team) -> None:
        try:
            await run(task, team)
        except KeyboardInterrupt as error:
            raise EpisodeError("a KeyboardInterrupt left the workflow") from error

    return play


def crossing(error: BaseException | None) -> Exception | None:
    """The error as it can be sent to another process, with its traceback as a note. None if it is no Exception."""
    if not isinstance(error, Exception):
        return None
    trace = f"in a rollout worker:\n{trace_of(error)}"
    error.add_note(trace)
    sent = portable(error)
    if sent is not error and not isinstance(sent, ErrorWithoutInit):  # Another error, which only resembles it.
        sent.add_note(trace)
    return sent
