"""Serves the seats of a config's team without training: `flexmarl serve`, for agents that are tried by hand.

    POST /episodes ──► the player plays a workflow that only waits ──► seats answer ──► POST /episodes/ID/end
                                                                                          account, rewards, ending

consumes     requests of drivers, which know the admin key
waits for    the end that a driver asks for; rollout.episode_timeout_s bounds each episode
produces     a run folder with the journal and the turns of all episodes; nothing is trained
unblocked by the driver, the time limit, or the end of the command
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any

from flexmarl.agents.black_box import ProgramTask
from flexmarl.agents.doors import Door
from flexmarl.agents.team import Team
from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.assemble.blueprint import Blueprint, draw_up, refuse_simulated
from flexmarl.assemble.commands import new_run_folder, open_store, run_clock
from flexmarl.assemble.ending import Supervisor
from flexmarl.assemble.export import with_starts
from flexmarl.assemble.kept import write_settings
from flexmarl.assemble.opened_gateway import server_or_refuse
from flexmarl.assemble.residents import settle_memory
from flexmarl.assemble.wire import emit_start
from flexmarl.assemble.world import open_world, player_of, watch_workers
from flexmarl.cluster.concurrency import task_block
from flexmarl.cluster.hard_stop import HardStop, run_and_leave_threads
from flexmarl.config import RunSettings
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.events.event import Event, Events
from flexmarl.events.failures import Failures
from flexmarl.events.group_events import GroupAdmitted, episode_finished
from flexmarl.events.journal import Journal
from flexmarl.events.run_events import RunFailed
from flexmarl.events.run_folder import RunFolder
from flexmarl.gateway.dialects.base import Refused
from flexmarl.gateway.sessions import Sessions, new_key
from flexmarl.gateway.settings import GatewaySettings
from flexmarl.orchestrator.run import LEFT_BEHIND_S
from flexmarl.records import Episode, EpisodeId, GroupId, GroupRecord, Purpose, Task, make_trajectory_id
from flexmarl.rollout.player import Player, Stop
from flexmarl.tasks import SourceExhausted

REMEMBERED_ENDINGS = 4096
"""Episodes whose ending can still be asked for."""


def serve(settings: RunSettings, announce: Callable[[Mapping[str, Any]], None], *, port: int | None = None) -> None:
    """Serves until it is stopped, with KeyboardInterrupt. `announce` gets {url, admin_key, run} once it serves.

    `port` replaces that of the settings. Raises ConfigError.
    """
    refuse_simulated(settings)
    server_or_refuse()
    blueprint = draw_up(settings, disjoint=False)
    folder = new_run_folder(settings, f"serve-{settings.name}")
    settings = with_starts(settings, folder.path / "start")
    write_settings(settings, folder)
    blueprint = replace(blueprint, settings=only_served(settings, port))
    with HardStop() as hard:
        run_and_leave_threads(_serve(blueprint, folder, announce, hard))


def only_served(settings: RunSettings, port: int | None) -> RunSettings:
    """The settings of a world without trainers and workers, and with a gateway."""
    policies = {name: policy.model_copy(update={"trainable": False}) for name, policy in settings.policies.items()}
    gateway = settings.gateway or GatewaySettings()
    if port is not None:
        gateway = gateway.model_copy(update={"port": port})
    rollout = settings.rollout.model_copy(update={"workers": 0})
    return settings.model_copy(update={"policies": policies, "gateway": gateway, "rollout": rollout})


async def _serve(
    blueprint: Blueprint, folder: RunFolder, announce: Callable[[Mapping[str, Any]], None], hard: HardStop
) -> None:
    supervisor = Supervisor()
    async with AsyncExitStack() as stack:
        stack.enter_context(supervisor.stoppable())
        path = folder.store if blueprint.settings.store.type == "sqlite" else None
        store = open_store(blueprint, path)
        stack.push_async_callback(store.close)
        journal, events = Journal(folder.journal), Events(run_clock())
        stack.callback(journal.close)
        events.listen(Event, journal.write)
        Failures(folder.failures, events)
        hard.report = lambda because: events.emit(RunFailed(because=because))
        world = await stack.enter_async_context(open_world(blueprint, store, path, events))
        stack.enter_context(supervisor.on_signals(hard))
        emit_start(blueprint, world, events)
        lost = watch_workers(world, events)
        sessions = world.doors
        assert isinstance(sessions, Sessions), "only_served asks for a gateway"
        make_player = player_of(blueprint, world)

        def player_with(run: Any) -> Player:
            return make_player(team=replace(blueprint.team, run=run), store=store)

        episodes = ServedEpisodes(blueprint, player_with, events)
        async with episodes.opened():
            sessions.driver = episodes
            settle_memory()
            announce({"url": sessions.url, "admin_key": episodes.admin_key, "run": str(folder.path)})
            await lost
        await end_leftover_tasks(LEFT_BEHIND_S)


class ServedEpisodes:
    """The episodes that drivers began: the `Driver` of the gateway."""

    def __init__(self, blueprint: Blueprint, player_with: Callable[[Any], Player], events: Events) -> None:
        """`player_with`: makes a player of the team with another workflow."""
        self.admin_key = new_key()
        self._settings, self._source, self._events = blueprint.settings, blueprint.source, events
        self._player_with, self._stop = player_with, Stop()
        self._tasks: asyncio.TaskGroup | None = None
        self._open: dict[EpisodeId, tuple[asyncio.Event, asyncio.Task[None]]] = {}
        self._ended: dict[EpisodeId, Mapping[str, Any]] = {}
        self._begun = self._position = 0

    @asynccontextmanager
    async def opened(self) -> AsyncIterator["ServedEpisodes"]:
        """Plays episodes for the length of a block; those that are open at its end are stopped."""
        async with task_block() as self._tasks:
            try:
                yield self
            finally:
                self._stop.now("flexmarl serve was stopped")
                if playing := [task for _, task in self._open.values()]:
                    await asyncio.wait(playing)

    async def begin(self, task: Mapping[str, Any] | int | None) -> Mapping[str, Any]:
        """See `Driver`."""
        most = self._settings.rollout.inter_query * self._settings.rollout.intra_query
        if len(self._open) >= most:
            raise Refused(
                f"{most} episodes are open (rollout.inter_query x rollout.intra_query); end one first",
                status=429,
                code="too_many_episodes",
            )
        played = self._task(task)
        group = GroupRecord(group=GroupId(self._begun), task=played, step=-1, purpose=Purpose.EVALUATION)
        self._begun += 1
        name, ends = EpisodeId(make_trajectory_id(group.group, 0, group.attempt)), asyncio.Event()
        opened: asyncio.Future[Door] = asyncio.get_running_loop().create_future()

        async def wait(task: Task, team: Team) -> None:
            async with team.door() as door:
                opened.set_result(door)
                await ends.wait()

        self._events.emit(GroupAdmitted(group=group.group, step=-1, task=played.input_id, because="a driver began it"))
        assert self._tasks is not None, "episodes begin while the block is open"
        playing = self._tasks.create_task(self._play(self._player_with(wait), group, name), name=f"serve/{name}")
        self._open[name] = ends, playing
        await asyncio.wait([opened, playing], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise Refused(f"the episode did not begin: {self._ended[name]}", status=503, code="not_begun")
        door = opened.result()
        return {
            "episode": name,
            "key": next(iter(door.seats.values())).key,
            "reward_key": door.rewards.key,
            "seats": {seat: asdict(at) for seat, at in door.seats.items()},
            "task": asdict(ProgramTask.of(played)),
            "deadline_s": self._settings.rollout.episode_timeout_s,
        }

    async def end(self, episode: EpisodeId) -> None:
        """See `Driver`."""
        if episode in self._open:
            ends, playing = self._open[episode]
            ends.set()
            await asyncio.wait([playing])

    def ending(self, episode: EpisodeId) -> Mapping[str, Any]:
        """See `Driver`."""
        return self._ended.get(episode, {})

    async def _play(self, player: Player, group: GroupRecord, name: EpisodeId) -> None:
        try:
            episode = await player.play(group, 0, stop=self._stop)
        finally:
            del self._open[name]
        if episode.finished:
            self._events.emit(episode_finished(episode))
        self._ended[name] = shown_ending(episode)
        while len(self._ended) > REMEMBERED_ENDINGS:
            del self._ended[next(iter(self._ended))]

    def _task(self, asked: Mapping[str, Any] | int | None) -> Task:
        """The task that is asked for. Raises Refused."""
        try:
            if isinstance(asked, Mapping):
                return Task(**asked)
            position = self._position if asked is None else asked
            if position < 0:
                raise SourceExhausted(f"there is no training task at position {position}; use 0 or more")
            task = self._source.train(position)
        except (ConfigError, EpisodeError, SourceExhausted, TypeError) as error:
            raise Refused(f"task: {error}") from None
        self._position += asked is None
        return task


def shown_ending(episode: Episode) -> dict[str, Any]:
    """How an episode ended as JSON: its status, the reason, the reward of each turn."""
    return {
        "status": episode.status,
        "reason": episode.reason,
        "rewards": [
            {
                "sample": turn.sample_id,
                "seat": turn.agent,
                "reward": episode.rewards.get(turn.sample_id),
                "parts": dict(episode.parts.get(turn.sample_id, {})),
            }
            for turn in episode.turns
        ],
    }
