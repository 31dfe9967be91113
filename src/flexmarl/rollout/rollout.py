"""Runs rollout: groups in parallel (inter-query), and the episodes of each group in parallel (intra-query).

consumes    admitted groups, in order of admission
waits for   a free query slot; inside a group, a free trajectory slot
produces    finished groups, in order of completion
unblocked by the end of an episode (rollout.episode_timeout_s bounds it)
"""

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from dataclasses import replace

from flexmarl.observability.journal import Journal
from flexmarl.records import Episode, GroupRecord, GroupState
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.player import Player
from flexmarl.rollout.settings import RolloutSettings

Emit = Callable[[GroupRecord], Awaitable[None]]


class Rollout:
    """Plays groups; `emit` gets each one when all its episodes are terminal, and its wait slows new groups down."""

    def __init__(
        self, *, player: Player, admission: Admission, settings: RolloutSettings, episodes: int, journal: Journal
    ) -> None:
        self._player = player
        self._admission = admission
        self._settings = settings
        self._episodes = episodes
        self._journal = journal

    async def play(self, groups: AsyncIterable[GroupRecord], emit: Emit) -> None:
        """Plays every group that comes, and returns when the last one was emitted."""
        queries = asyncio.Semaphore(self._settings.inter_query)
        async with asyncio.TaskGroup() as tasks:
            async for group in groups:
                await queries.acquire()
                task = tasks.create_task(self._play_group(group, emit), name=f"rollout/group-{group.group}")
                task.add_done_callback(lambda _: queries.release())

    async def _play_group(self, group: GroupRecord, emit: Emit) -> None:
        while True:
            self._admission.move(group.group, GroupState.RUNNING)
            played = replace(group, episodes=await self._play_episodes(group))
            if played.finished:
                self._admission.move(group.group, GroupState.DONE)
                break
            verdict = self._admission.after_failure(group.group, retries=self._settings.group_retries)
            reason = f"{verdict.because}; the last reason: {played.episodes[-1].reason}"
            if not verdict.allowed:
                self._admission.move(group.group, GroupState.FAILED)
                self._journal.event("group_failed", group=group.group, because=reason)
                break
            self._admission.move(group.group, GroupState.WAITING)
            self._journal.event("group_retried", group=group.group, because=reason)
            group = replace(group, attempt=self._admission.attempt(group.group))
        await emit(played)

    async def _play_episodes(self, group: GroupRecord) -> tuple[Episode, ...]:
        trajectories = asyncio.Semaphore(self._settings.intra_query)

        async def play(index: int) -> Episode:
            async with trajectories:
                return await self._player.play(group, index)

        async with asyncio.TaskGroup() as tasks:
            playing = [
                tasks.create_task(play(index), name=f"rollout/group-{group.group}/episode-{index}")
                for index in range(self._episodes)
            ]
        return tuple(task.result() for task in playing)
