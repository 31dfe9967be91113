"""Plays episodes on rollout workers, and serves from the controller what they ask for.

RolloutWorkers: the live workers of a run, and the messages to each.

consumes     losses of workers, which the cluster emits
waits for    a worker's beat, so that one that stands still is found
produces     the worker with the fewest episodes; a new worker in place of a lost one
unblocked by time; the start of a worker

RemotePlayer: a Player whose episodes are played by workers.

consumes     groups and indices, as every Player
waits for    the worker; for its calls, what every Player waits for: the gate, the pool, a place for a tool call
produces     the same episodes, with the same ids and seeds; one that was lost with its worker is played again
unblocked by the worker: an episode's time limit runs there
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Self

from flexmarl.agents import Generate
from flexmarl.cluster.concurrency import task_block
from flexmarl.cluster.host import portable
from flexmarl.cluster.interface import Resident
from flexmarl.errors import EngineError, FlexmarlError, StoreError, WorkerError, described
from flexmarl.events.event import Events
from flexmarl.events.group_events import EpisodeLost
from flexmarl.events.run_events import WorkerLost
from flexmarl.records import (
    STOPPED,
    Episode,
    EpisodeId,
    EpisodeStatus,
    Failure,
    Generation,
    GenerationRequest,
    GroupRecord,
    WorkerId,
    make_trajectory_id,
)
from flexmarl.rollout.episode_calls import Holds, TimeLimit
from flexmarl.rollout.player import PlayedEpisode, Player, Stop, failure_of, one_line
from flexmarl.rollout.recorder import TakesRows
from flexmarl.rollout.worker import (
    CallAnswered,
    CallHeld,
    CallLeft,
    EpisodeAsks,
    EpisodeStopped,
    Noticed,
    PlayJob,
    RolloutWorker,
    ToEpisode,
    ToolPlace,
)
from flexmarl.tools.open_tools import RunningCalls

MOST_LOSSES = 3
"""Workers that an episode may lose before it counts as failed: its own code may be what ends them."""
MOST_STARTS = 3
"""Starts that may fail, one after another, before a lost worker is given up."""
BEAT_S = 5.0
"""Seconds between two beats of a worker."""
Spawn = Callable[[WorkerId], Awaitable[Resident[RolloutWorker]]]
"""Starts the worker of this name. Raises WorkerError or ConfigError."""


@dataclass(eq=False, slots=True)
class LiveWorker:
    """One live worker."""

    resident: Resident[RolloutWorker]
    tasks: asyncio.TaskGroup
    playing: int = 0
    """Number of its episodes."""
    outbox: list[ToEpisode] | None = None
    """Messages that wait for the crossing under way; None if there is none."""

    @property
    def name(self) -> WorkerId:
        """Its name."""
        return self.resident.name

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one episode for as long as the block lasts."""
        self.playing += 1
        try:
            yield
        finally:
            self.playing -= 1

    def tell(self, message: ToEpisode) -> None:
        """Sends a message to one of its episodes; those of a moment cross together."""
        if self.outbox is None:
            self.outbox = []
            self.tasks.create_task(self._send(), name=f"tell {self.name}")
        self.outbox.append(message)

    async def _send(self) -> None:
        try:
            while self.outbox:
                messages, self.outbox = self.outbox, []
                await self.resident.remote.tell(messages)
        except WorkerError:  # It is lost: the streams of its episodes end, too.
            pass
        finally:
            self.outbox = None


class RolloutWorkers:
    """The rollout workers of a run. Serves inside `async with workers.open():`."""

    def __init__(self, spawn: Spawn, *, stuck_s: float, events: Events) -> None:
        """A worker whose event loop stands still for `stuck_s` is lost. Listens to `events`, and emits there."""
        self._spawn, self._stuck_s, self._events = spawn, stuck_s, events
        self._live: dict[WorkerId, LiveWorker] = {}
        self._starting: set[WorkerId] = set()
        self._given_up = ""
        """Why the last worker that was given up could not be started."""
        self._changed = asyncio.Event()
        self._watches: dict[WorkerId, asyncio.Task[None]] = {}
        """By worker: the task that watches it, or replaces it."""
        self._tasks: asyncio.TaskGroup | None = None
        events.listen(WorkerLost, self._lost)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Self]:
        """Serves inside the block; leaving it ends the watches. The workers themselves are the cluster's to end."""
        async with task_block() as self._tasks:
            try:
                yield self
            finally:
                self._tasks = None
                for watch in self._watches.values():
                    watch.cancel()

    def add(self, resident: Resident[RolloutWorker]) -> None:
        """Takes in a worker that has started."""
        assert self._tasks is not None, "workers are added inside `open`"
        worker = LiveWorker(resident, self._tasks)
        self._live[worker.name] = worker
        watch = self._tasks.create_task(self._watch(worker), name=f"watch {resident.name}")
        self._watches[worker.name] = watch

    async def least_busy(self) -> LiveWorker:
        """Returns the worker with the fewest episodes, the first of equal ones; waits while one is started.

        Raises WorkerError if none is left.
        """
        while not self._live:
            if not self._starting:
                raise WorkerError(
                    f"no rollout worker is left: {self._given_up}; go on from the last checkpoint with --resume, with "
                    f"rollout.workers=0 to play in the controller"
                )
            self._changed.clear()
            await self._changed.wait()
        return min(self._live.values(), key=lambda worker: (worker.playing, worker.name))

    def lose(self, worker: LiveWorker, because: str) -> None:
        """Ends a worker that does not answer, and starts another in its place. Ignored if that was done already."""
        if self._tasks is not None and self._live.get(worker.name) is worker:
            del self._live[worker.name]
            self._watches.pop(worker.name).cancel()
            self._starting.add(worker.name)
            replacing = self._tasks.create_task(self._replace(worker, because), name=f"replace {worker.name}")
            self._watches[worker.name] = replacing

    def _lost(self, lost: WorkerLost) -> None:
        if worker := self._live.get(lost.process):
            self.lose(worker, lost.because)

    async def _replace(self, worker: LiveWorker, because: str) -> None:
        await worker.resident.stop()
        for attempt in range(MOST_STARTS):
            try:
                await asyncio.sleep(attempt)
                self.add(await self._spawn(worker.name))
                break
            except FlexmarlError as error:
                because = described(error)
        else:
            self._given_up = because
        self._starting.discard(worker.name)
        self._changed.set()

    async def _watch(self, worker: LiveWorker) -> None:
        """Ends the worker if its event loop stands still for too long."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                async with asyncio.timeout(self._stuck_s):
                    await worker.resident.remote.beat()
        except WorkerError:  # The cluster tells of its loss.
            return
        except TimeoutError:
            place = worker.resident.place
            because = (
                f"its event loop stood still for {self._stuck_s:g} s (rollout.episode_timeout_s and "
                f"rollout.cancel_grace_s): code of a workflow or a tool that does not await"
            )
            self._events.emit(WorkerLost(process=worker.name, node=place.node, pid=place.pid, because=because))


class RemotePlayer(Player):
    """Plays episodes of one team on rollout workers."""

    def __init__(
        self,
        *,
        workers: RolloutWorkers,
        holds: Holds = lambda _: None,
        running: RunningCalls | None = None,
        **parts: Any,
    ) -> None:
        """`parts`: the other arguments of a Player."""
        super().__init__(holds=holds, running=running, **parts)
        self._workers = workers

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
        """Has the episode played, again and elsewhere if it is lost with its worker. `limit` is the worker's."""
        episode = EpisodeId(make_trajectory_id(group.group, index, group.attempt))
        losses: list[str] = []
        while True:
            job = PlayJob(
                group=group,
                index=index,
                greedy=greedy,
                temperature=self._temperature,
                rows="controller" if rows else "node" if self._store else "none",
                stopped=stop.because,
            )
            worker = await self._workers.least_busy()
            failure: Exception | None = None
            try:
                return await self._played_by(worker, job, stop, generate or self._generate)
            except StoreError:
                raise
            except WorkerError as error:
                losses.append(described(error))
                self._workers.lose(worker, losses[-1])
            except Exception as error:  # Of the crossing: the task, or what the episode gave, cannot be copied.
                failure = error
            if job.rows == "node" and self._store is not None:
                await self._store.discard([episode])
            if failure is not None:
                text = f"the episode could not cross to a rollout worker or back: {described(failure)}"
                return PlayedEpisode(unplayed(episode, group, failure_of(failure), text), error=failure)
            again = not stop.because and len(losses) < MOST_LOSSES
            if self._events is not None:
                self._events.emit(EpisodeLost(episode=episode, group=group.group, because=losses[-1], again=again))
            if stop.because:
                return PlayedEpisode(unplayed(episode, group, Failure(kind=STOPPED), stop.because))
            if not again:
                text = f"{MOST_LOSSES} rollout workers ended while they played it, the last one because {losses[-1]}"
                return PlayedEpisode(unplayed(episode, group, Failure(kind="worker_lost", text=one_line(text)), text))

    async def _played_by(self, worker: LiveWorker, job: PlayJob, stop: Stop, generate: Generate) -> PlayedEpisode:
        """Has the episode played by this worker. Raises WorkerError if it is lost; no call is under way then."""

        def end() -> None:
            worker.tell(EpisodeStopped(job.key, stop.because))

        last: PlayedEpisode | None = None
        lost: WorkerError | None = None
        with worker.busy(), stop.calls(end):
            async with task_block() as tasks:
                served = ServedCalls(worker, tasks, generate, self._holds, self._running)
                try:
                    async for item in worker.resident.remote.play(job):
                        match item:
                            case EpisodeAsks():
                                served.begin(item)
                            case CallLeft():
                                served.leave(item.number)
                            case Noticed():
                                if self._events is not None:
                                    self._events.emit(item.notice)
                            case _:
                                last = item
                except WorkerError as error:
                    lost = error  # Raised outside the block, which waits for the calls that are aborted now.
                served.leave_all()
        if lost is not None:
            raise lost
        assert last is not None, "a stream that ends without an error ends with the episode"
        return last


class ServedCalls:
    """Calls and places that one episode has asked for, and the controller serves now."""

    def __init__(
        self, worker: LiveWorker, tasks: asyncio.TaskGroup, generate: Generate, holds: Holds, running: RunningCalls
    ) -> None:
        """The calls run in `tasks`."""
        self._worker, self._tasks, self._generate, self._holds, self._running = worker, tasks, generate, holds, running
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._begun: set[int] = set()
        """Numbers whose tasks have begun: a task that is cancelled before does nothing, not even its end."""
        self._left: set[int] = set()

    def begin(self, asked: EpisodeAsks) -> None:
        """Begins to serve."""
        what = asked.what
        serving = self._hold(asked.number, what) if isinstance(what, ToolPlace) else self._call(asked.number, what)
        self._serving[asked.number] = self._tasks.create_task(serving, name=f"serve {asked.number}")

    def leave(self, number: int) -> None:
        """Aborts a call, whose answer is still sent, or frees a place."""
        if number in self._serving and number not in self._left:
            self._left.add(number)
            if number in self._begun:
                self._serving[number].cancel()

    def leave_all(self) -> None:
        """Aborts all calls, and frees all places."""
        for number in list(self._serving):
            self.leave(number)

    async def _hold(self, number: int, asked: ToolPlace) -> None:
        self._begun.add(number)
        try:
            if number not in self._left:
                async with self._running.place(asked.tool, asked.max_parallel):
                    self._worker.tell(CallAnswered(number))
                    await asyncio.Event().wait()
        finally:
            del self._serving[number]

    async def _call(self, number: int, request: GenerationRequest) -> None:
        self._begun.add(number)
        try:
            self._worker.tell(CallAnswered(number, await self._answer(number, request)))
        except Exception as error:
            self._worker.tell(CallAnswered(number, error=portable(error)))
        finally:
            del self._serving[number]

    async def _answer(self, number: int, request: GenerationRequest) -> Generation:
        """The answer; if the call was left, the tokens until then. Raises EngineError for one that was not sent."""
        sampled: list[asyncio.Future[Generation]] = []
        try:
            if number not in self._left:
                held = self._holds(request.policy)
                if held is not None:
                    self._worker.tell(CallHeld(number, True))
                    await held
                    self._worker.tell(CallHeld(number, False))
                return await self._generate(request, interrupted=sampled.append)
        except asyncio.CancelledError:
            if number not in self._left:
                raise
        if not sampled:
            raise EngineError(f"call {request.request_id} was left before it was sent")
        return await asyncio.shield(sampled[0])  # Done within the grace period of the pool.


def unplayed(episode: EpisodeId, group: GroupRecord, failure: Failure, because: str) -> Episode:
    """The record of an episode of which no worker gave one."""
    return Episode(
        episode=episode,
        group=group.group,
        task=group.task.input_id,
        status=EpisodeStatus.TIMED_OUT if failure.kind == STOPPED else EpisodeStatus.FAILED,
        reason=because,
        failure=failure,
    )
