"""What the store knows of an episode, and when."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from flexmarl.agents.characters import character_renderer
from flexmarl.errors import EpisodeError
from flexmarl.inference.pool import InferencePool
from flexmarl.records import EpisodeStatus, FinishReason, RowState
from flexmarl.rollout.player import Player
from flexmarl.rollout.recorder import StoreRecorder
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from tests.unit.rollout.plays import GROUP, new_store, player, rows, team_of

pytestmark = pytest.mark.usefixtures("played_everywhere")


async def answer(task, team):
    (await team.solver.act(task.prompt)).reward(1.0)


async def solve_and_verify(task, team):
    (await team.solver.act(task.prompt)).reward(1.0)
    (await team.verifier.act("right?")).reward(1.0)


def played():
    """A finished episode with one turn, recorded nowhere."""
    return run_virtual(player(answer)[0].play(GROUP, 0))


async def opened(recorder, turn):
    await recorder.prompt(turn, turn.prompt_ids)


def test_a_call_under_way_has_no_row_then_comes_the_whole_turn_then_the_reward():
    """No resume reads the row of a call without an answer; a durable write before every call would delay it."""

    async def scenario():
        store, sample_id, seen = new_store(), "sum-1_0_g0e0a0", []

        async def watch(task, team):
            async def look():
                await asyncio.sleep(0.5)  # the call takes one second
                seen.append((await rows(store)).get(sample_id))

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(look())
                reply = await team.solver.act(task.prompt)
            seen.append((await rows(store))[sample_id])
            reply.reward(1.0)

        await player(watch, store=store)[0].play(GROUP, 0)
        seen.append((await rows(store))[sample_id])
        assert seen == [None, ("open", None, True), ("open", 1.0, True)]

    run_virtual(scenario())


async def finish(recorder, store, episode):
    await recorder.close(episode)
    for move in recorder.moves(episode):
        await store.settle(move.ids, move.outcome)


def test_a_failed_episode_ends_every_row_with_its_reason_and_without_a_reward():
    episode = played()

    async def scenario():
        store = new_store()
        recorder = StoreRecorder(store, ("solver",))
        (turn,) = episode.turns
        await opened(recorder, turn)
        await recorder.turn(turn)
        await finish(recorder, store, replace(episode, status=EpisodeStatus.FAILED, reason="the tool broke"))
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
        await finish(recorder, store, episode)
        row, left = await store.get([turn.sample_id, "sum-1_1_g0e0a0"])
        assert (row.state, row.values["reward"]) == (RowState.OPEN, 1.0)
        assert (left.state, left.reason) == (RowState.FAILED, "the call did not end")
        assert left.values["prompt_ids"].tolist() == turn.prompt_ids.tolist()

    run_virtual(scenario())


@pytest.mark.parametrize("arrives", [False, True])
def test_a_row_whose_writing_was_interrupted_ends_with_its_episode(arrives):
    """Nobody knows whether a store has done what it was cancelled at."""
    episode = played()

    class Slow:
        def __init__(self, store):
            self.store = store
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
        await opened(recorder, turn)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await recorder.turn(turn)
        await finish(recorder, store, replace(episode, status=EpisodeStatus.TIMED_OUT, reason="too long"))
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
        await finish(recorder, store, episode)
        for late in (opened(recorder, replace(turn, sample_id="sum-1_1_g0e0a0")), recorder.turn(turn)):
            with pytest.raises(EpisodeError, match="came after the end of its episode; await every act"):
                await late
        assert list(await rows(store)) == [turn.sample_id]

    run_virtual(scenario())


async def cut(task, team):
    """One call that is answered, and one that the workflow leaves after two of its seconds."""
    (await team.solver.act(task.prompt)).reward(1.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            await team.verifier.act("again")


def pool_player(team, store, *, fails="", timeout_s=100.0):
    """A player on a pool of engines that say a letter a second; one of the verifier's may end in an error."""

    class Failing(ScriptedEngine):
        async def generate(self, requests):
            async for generation in super().generate(requests):
                yield replace(generation, finish=FinishReason.ERROR, error=fails) if fails else generation

    renderer = character_renderer()
    say = lambda request: [*renderer.encode("7777"), renderer.stop_ids[0]]  # noqa: E731
    speak = {"latency_s": 1.0, "encode": renderer.encode, "decode": renderer.decode}
    pool = InferencePool({"solver": [ScriptedEngine(say, **speak)], "verifier": [Failing(say, **speak)]})
    return pool, Player(team=team, generate=pool.generate, run_seed=0, timeout_s=timeout_s, grace_s=3.0, store=store)


@pytest.mark.parametrize(
    ("workflow", "fails", "timeout_s", "status", "tokens", "reason"),
    [
        (cut, "", 100.0, EpisodeStatus.FINISHED, 2, "the workflow left the call before its answer came"),
        (solve_and_verify, "", 8.5, EpisodeStatus.TIMED_OUT, 4, "took longer than rollout.episode_timeout_s=8.5"),
        (solve_and_verify, "no memory", 100.0, EpisodeStatus.FAILED, 5, "of agent 'verifier' failed: no memory"),
    ],
)
def test_what_was_sampled_of_a_call_without_an_answer_is_in_its_row_which_ends_failed(
    workflow, fails, timeout_s, status, tokens, reason
):
    async def scenario():
        store = new_store()
        pool, one = pool_player(team_of(workflow), store, fails=fails, timeout_s=timeout_s)
        async with pool.open():
            episode = await one.play(GROUP, 0)
        assert episode.status is status
        (row,) = await store.get(["sum-1_1_g0e0a0"])
        assert row.state is RowState.FAILED
        assert reason in row.reason
        assert row.values["finish"] in ("abort", "error")
        assert len(row.values["response_ids"]) == len(row.values["logprobs"]) == tokens
        assert "sum-1_1_g0e0a0" not in episode.rewards

    run_virtual(scenario())


def test_the_answer_that_a_parser_breaks_on_is_in_its_row():
    def broken(text):
        raise ValueError("not what I know")

    async def scenario():
        store = new_store()
        team = team_of(answer)
        solver = replace(team.agents["solver"], parser=broken)
        pool, one = pool_player(replace(team, agents={**team.agents, "solver": solver}), store)
        async with pool.open():
            episode = await one.play(GROUP, 0)
        assert "not what I know" in episode.reason
        (row,) = await store.get(["sum-1_0_g0e0a0"])
        assert (row.state, len(row.values["response_ids"])) == (RowState.FAILED, 5)

    run_virtual(scenario())
