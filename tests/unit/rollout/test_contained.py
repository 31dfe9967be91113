"""Whatever a workflow does is its own episode's affair: a record with a reason, and no rows after its end."""

import asyncio
import contextlib

import pytest

from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.errors import StoreError
from flexmarl.records import RowState
from flexmarl.rollout.player import AT_THE_END_S
from flexmarl.simulator.virtual_time import run_virtual
from tests.odd_workflows import ODDITIES
from tests.unit.rollout.plays import GROUP, new_store, now, player, rows

pytestmark = pytest.mark.usefixtures("played_everywhere")

VIRTUAL = [kind for kind, oddity in ODDITIES.items() if oddity.virtual]


@pytest.mark.parametrize("kind", VIRTUAL)
@pytest.mark.parametrize("recorded", [True, False])
def test_an_odd_workflow_is_a_record_with_its_reason(kind, recorded):
    """Recorded: in training. Else in an evaluation."""
    oddity = ODDITIES[kind]

    async def scenario():
        store = new_store()
        episode = await player(oddity.play, timeout_s=100.0, store=store if recorded else None)[0].play(GROUP, 0)
        assert episode.status is oddity.ends, episode.reason
        assert oddity.because in episode.reason
        assert bool(episode.reason) != episode.finished
        episode.reason.encode()
        states = {state for state, _, _ in (await rows(store)).values()}
        if not episode.finished:
            assert states <= {"failed"}
        await end_leftover_tasks(grace_s=1.0)

    run_virtual(scenario())


def test_a_finished_episode_without_calls_has_no_rows_and_no_turns():
    async def scenario():
        store = new_store()
        episode = await player(ODDITIES["no_call"].play, store=store)[0].play(GROUP, 0)
        assert (episode.finished, episode.turns, dict(episode.rewards)) == (True, (), {})
        assert await rows(store) == {}

    run_virtual(scenario())


async def swallow(task, team):
    while True:
        with contextlib.suppress(BaseException):
            await team.solver.act(task.prompt)


def test_a_workflow_that_swallows_its_cancellation_is_given_up_after_the_grace():
    async def scenario():
        one, _ = player(ODDITIES["swallows_cancellation"].play, timeout_s=10.0)
        episode = await one.play(GROUP, 0)
        assert episode.reason == (
            "took longer than rollout.episode_timeout_s=10; "
            "given up: it went on for rollout.cancel_grace_s=3 after it was cancelled"
        )
        assert now() == 13.0

    run_virtual(scenario())


@pytest.mark.parametrize("kind", ["swallows_everything", "leaves_a_caller", "leaves_a_call"])
def test_nothing_is_written_and_no_call_is_sent_after_the_end_of_an_episode(kind):
    async def scenario():
        store = new_store()
        one, model = player(ODDITIES[kind].play, timeout_s=10.0, store=store)
        episode = await one.play(GROUP, 0)
        before, sent, ended = await rows(store), len(model.requests), episode.turns
        await asyncio.sleep(1000)
        assert (await rows(store), len(model.requests), episode.turns) == (before, sent, ended)
        await end_leftover_tasks(grace_s=1.0)

    run_virtual(scenario())


def test_a_run_that_ends_does_not_wait_for_a_workflow_that_swallows_its_cancellation(played_everywhere):
    async def scenario():
        playing = asyncio.create_task(player(swallow)[0].play(GROUP, 0))
        await asyncio.sleep(5)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        # A worker's episode ends there: nobody waits for it.
        assert now() == 5 + (AT_THE_END_S if played_everywhere == "controller" else 0)

    run_virtual(scenario())


def test_ctrl_c_in_a_workflow_is_no_failure_of_it(played_everywhere):
    if played_everywhere == "worker":
        pytest.skip("on a worker it is one: test_rollout_workers.py")

    async def scenario():
        async def interrupted(task, team):
            raise KeyboardInterrupt

        await player(interrupted)[0].play(GROUP, 0)

    with pytest.raises(KeyboardInterrupt):
        run_virtual(scenario())


def test_the_loss_of_the_store_is_not_hidden_by_a_workflow_that_swallows_it():
    async def careless(task, team):
        with contextlib.suppress(Exception):
            await team.solver.act(task.prompt)

    async def scenario():
        store = new_store()
        await store.close()
        with pytest.raises(StoreError, match="the experience store is closed"):
            await player(careless, store=store)[0].play(GROUP, 0)

    run_virtual(scenario())


def test_a_turn_whose_writing_was_interrupted_is_whole_at_the_end_of_its_episode():
    """The workflow's own time limit may strike while the store writes."""

    class Slow:
        def __init__(self, store):
            self.store, self.settle, self.puts = store, store.settle, 0

        async def put(self, agent, partial):
            self.puts += 1
            await asyncio.sleep(5 if self.puts == 1 else 0)  # The first put is the answer's.
            await self.store.put(agent, partial)

    async def impatient(task, team):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3):
                await team.solver.act(task.prompt)
        team.solver.reward(1.0)

    async def scenario():
        store = new_store()
        episode = await player(impatient, store=Slow(store))[0].play(GROUP, 0)
        assert episode.finished
        assert [turn.sample_id for turn in episode.turns] == ["sum-1_0_g0e0a0"]
        (row,) = await store.get(["sum-1_0_g0e0a0"])
        assert (row.state, row.version, row.values["reward"]) == (RowState.OPEN, 0, 1.0)

    run_virtual(scenario())


def test_the_time_limit_of_a_call_that_is_held_and_left_behind_does_no_harm():
    """A gate opens when the episode has long ended."""

    async def leaves_a_held_call(task, team):
        left.append(asyncio.create_task(team.solver.act(task.prompt)))
        await asyncio.sleep(0.1)

    left: list[asyncio.Task] = []

    async def scenario():
        opened = asyncio.Event()
        one, _ = player(leaves_a_held_call, holds=lambda policy: opened.wait())
        assert (await one.play(GROUP, 0)).finished
        opened.set()
        (error,) = await asyncio.gather(*left, return_exceptions=True)
        assert "was cut by the end of its episode" in str(error)

    run_virtual(scenario())
