"""What the store knows of an episode, and when."""

import asyncio
from dataclasses import replace

import pytest

from flexmarl.errors import EpisodeError
from flexmarl.records import EpisodeStatus, RowState
from flexmarl.rollout.recorder import StoreRecorder
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.rollout.plays import GROUP, new_store, player, rows


async def answer(task, team):
    (await team.solver.act(task.prompt)).reward(1.0)


def played():
    """A finished episode with one turn, recorded nowhere."""
    return run_virtual(player(answer)[0].play(GROUP, 0))


async def opened(recorder, turn):
    await recorder.prompt(
        sample_id=turn.sample_id,
        agent=turn.agent,
        policy=turn.policy,
        prompt_ids=turn.prompt_ids,
        parent=turn.parent,
        tags=turn.tags,
    )


def test_first_the_prompt_then_the_response_then_the_reward():
    async def scenario():
        store, sample_id, seen = new_store(), "sum-1_0_g0e0a0", []

        async def watch(task, team):
            async def look():
                await asyncio.sleep(0.5)  # the call takes one second
                seen.append((await rows(store))[sample_id])

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(look())
                reply = await team.solver.act(task.prompt)
            seen.append((await rows(store))[sample_id])
            reply.reward(1.0)

        await player(watch, store=store)[0].play(GROUP, 0)
        seen.append((await rows(store))[sample_id])
        assert seen == [("open", None, False), ("open", None, True), ("open", 1.0, True)]

    run_virtual(scenario())


def test_a_failed_episode_ends_every_row_with_its_reason_and_without_a_reward():
    episode = played()

    async def scenario():
        store = new_store()
        recorder = StoreRecorder(store, ("solver",))
        (turn,) = episode.turns
        await opened(recorder, turn)
        await recorder.turn(turn)
        await recorder.finish(replace(episode, status=EpisodeStatus.FAILED, reason="the tool broke"))
        (row,) = await store.get([turn.sample_id])
        assert (row.state, row.reason) == (RowState.FAILED, "the tool broke")
        assert "reward" not in row.values

    run_virtual(scenario())


def test_a_call_that_never_ended_fails_alone_in_a_finished_episode():
    episode = played()

    async def scenario():
        store = new_store()
        recorder = StoreRecorder(store, ("solver",))
        (turn,) = episode.turns
        await opened(recorder, turn)
        await opened(recorder, replace(turn, sample_id="sum-1_1_g0e0a0"))
        await recorder.turn(turn)
        await recorder.finish(episode)
        row, left = await store.get([turn.sample_id, "sum-1_1_g0e0a0"])
        assert (row.state, row.values["reward"]) == (RowState.OPEN, 1.0)
        assert (left.state, left.reason) == (RowState.FAILED, "the call did not end")

    run_virtual(scenario())


@pytest.mark.parametrize("arrives", [False, True])
def test_a_row_whose_opening_was_interrupted_ends_with_its_episode(arrives):
    """Nobody knows whether a store has done what it was cancelled at."""
    episode = played()

    class Slow:
        def __init__(self, store):
            self.store = store
            self.settle = store.settle
            self.puts = 0

        async def put(self, agent, partial):
            self.puts += 1
            if self.puts == 1 and arrives:
                await self.store.put(agent, partial)
            await asyncio.sleep(10)
            await self.store.put(agent, partial)

    async def scenario():
        store = new_store()
        recorder = StoreRecorder(Slow(store), ("solver",))
        (turn,) = episode.turns
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await opened(recorder, turn)
        await recorder.finish(replace(episode, status=EpisodeStatus.TIMED_OUT, reason="too long"))
        (row,) = await store.get([turn.sample_id])
        assert (row.state, row.reason) == (RowState.FAILED, "too long")

    run_virtual(scenario())


def test_after_the_end_nothing_is_recorded():
    episode = played()

    async def scenario():
        store = new_store()
        recorder = StoreRecorder(store, ("solver",))
        (turn,) = episode.turns
        await opened(recorder, turn)
        await recorder.turn(turn)
        await recorder.finish(episode)
        for late in (opened(recorder, replace(turn, sample_id="sum-1_1_g0e0a0")), recorder.turn(turn)):
            with pytest.raises(EpisodeError, match="came after the end of its episode; await every act"):
                await late
        assert list(await rows(store)) == [turn.sample_id]

    run_virtual(scenario())
