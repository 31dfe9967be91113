"""Runs rollout: groups in parallel (inter-query), and the episodes of each group in parallel (intra-query).

consumes    admitted groups, in order of admission
waits for   a free query slot; inside a group, a free trajectory slot
produces    finished groups, in order of completion; before that, each of their finished episodes
unblocked by the end of an episode (rollout.episode_timeout_s bounds it), or a stop of its group
"""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace

from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupFailed, GroupRetried, episode_finished
from flexmarl.events.notices import GroupPlayed
from flexmarl.records import Episode, GroupId, GroupRecord, GroupState, PolicyName
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.episode_calls import Lockstep
from flexmarl.rollout.player import Player, Stop
from flexmarl.rollout.settings import RolloutSettings

Emit = Callable[[GroupRecord], Awaitable[None]]
EmitEpisode = Callable[[GroupRecord, Episode], Awaitable[None]]


async def _keep(group: GroupRecord, episode: Episode) -> None:
    """Does nothing: the episode also comes with its group."""


class Rollout:
    """Plays groups, and calls `emit` once with each one; a slow `emit` delays new groups.

    A group without a finished episode is played again first, if admission allows it. `emit` gets it after its last
    attempt, also if the group failed or was stopped.
    """

    def __init__(
        self,
        *,
        player: Player,
        admission: Admission,
        settings: RolloutSettings,
        episodes: int,
        events: Events,
        policies: Sequence[PolicyName] = (),
        greedy: bool = False,
    ) -> None:
        """`policies`: in the order of their agents, in which lockstep gives them their turns.

        With `greedy`, each group has one more play, at temperature 0, which takes a trajectory slot like any other.
        """
        self._player, self._admission, self._settings = player, admission, settings
        self._episodes, self._events = episodes, events
        self._policies = tuple(policies)
        self._greedy = greedy
        self._stops: dict[GroupId, Stop] = {}
        """One for each group that has come and is not emitted yet."""

    async def play(self, groups: AsyncIterable[GroupRecord], emit: Emit, emit_episode: EmitEpisode = _keep) -> None:
        """Plays all `groups`, and returns when the last one was emitted."""
        queries = asyncio.Semaphore(self._settings.inter_query)
        async with asyncio.TaskGroup() as tasks:
            async for group in groups:
                self._stops[group.group] = Stop()
                await queries.acquire()
                task = tasks.create_task(
                    self._play_group(group, emit, emit_episode), name=f"rollout/group-{group.group}"
                )
                task.add_done_callback(lambda _: queries.release())

    def stop(self, group: GroupId, because: str) -> bool:
        """Stops a group's episodes. True if it was not emitted yet: it then will be, and the caller must end it."""
        stop = self._stops.get(group)
        if stop:
            stop.now(because)
        return stop is not None

    async def _play_group(self, group: GroupRecord, emit: Emit, emit_episode: EmitEpisode) -> None:
        played, stop = group, self._stops[group.group]
        while not stop.because:
            self._admission.move(group.group, GroupState.RUNNING)
            played = await self._play_episodes(group, stop, emit_episode)
            if stop.because:
                break
            if played.finished:
                self._admission.move(group.group, GroupState.DONE)
                break
            verdict = self._admission.after_failure(group.group, retries=self._settings.group_retries)
            reason = f"{verdict.because}; the last reason: {played.episodes[-1].reason}"
            if not verdict.allowed:
                self._admission.move(group.group, GroupState.FAILED)
                self._events.emit(GroupFailed(group=group.group, because=reason))
                break
            self._admission.move(group.group, GroupState.WAITING)
            self._events.emit(GroupRetried(group=group.group, because=reason))
            group = replace(group, attempt=self._admission.attempt(group.group))
        del self._stops[group.group]
        self._events.emit(GroupPlayed(group=played))
        await emit(played)

    async def _play_episodes(self, group: GroupRecord, stop: Stop, emit_episode: EmitEpisode) -> GroupRecord:
        trajectories = asyncio.Semaphore(self._settings.intra_query)
        in_turn = Lockstep(self._policies) if self._settings.order == "lockstep" else None

        async def play(index: int) -> Episode | None:
            async with trajectories:
                if stop.because:
                    return None
                with in_turn.episode(self._player.generate) if in_turn else nullcontext() as generate:
                    if in_turn:
                        await asyncio.sleep(0)  # Lets all episodes begin, so that the first takes no turn alone.
                    episode = await self._player.play(group, index, stop=stop, generate=generate)
                if episode.finished:
                    self._events.emit(episode_finished(episode))
                    await emit_episode(group, episode)
                return episode

        async def play_greedily() -> Episode | None:
            async with trajectories:
                if stop.because:
                    return None
                episode = await self._player.play(group, self._episodes, stop=stop, greedy=True)
                if episode.finished:
                    self._events.emit(episode_finished(episode))
                return episode

        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(play(index), name=f"rollout/group-{group.group}/episode-{index}")
                for index in range(self._episodes)
            ]
            baseline = (
                tasks.create_task(play_greedily(), name=f"rollout/group-{group.group}/greedy") if self._greedy else None
            )
        return replace(
            group,
            episodes=tuple(episode for task in playing if (episode := task.result())),
            greedy=baseline.result() if baseline else None,
        )
