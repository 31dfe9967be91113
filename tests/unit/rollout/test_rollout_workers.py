"""What rollout workers add to playing: losses, messages that cross, and places that a whole run shares."""

import asyncio
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import ConfigError, EngineError, StoreError, WorkerError
from flexmarl.events.group_events import EpisodeLost
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.run_events import LoopBlocked, WorkerLost
from flexmarl.inference.pool import InferencePool
from flexmarl.records import EpisodeStatus, WorkerId
from flexmarl.rollout import blocking_watch, remote_player, worker
from flexmarl.rollout.player import Stop
from flexmarl.rollout.remote_player import MOST_LOSSES, MOST_STARTS, RemotePlayer
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.tools.open_tools import RunningCalls
from tests.unit.rollout.plays import GROUP, TASK, new_store, now, player, rows, team_of, workers_of

FIRST, SECOND = (WorkerId("rollout", number=n) for n in range(2))


async def relay(task, team):
    """Four calls, one after another, of both agents."""
    text = task.prompt
    for _ in range(2):
        text = (await team.solver.act(text)).text
        text = (await team.verifier.act(text)).text
    team.reward(1.0)


def scripted(workflow, **more):
    """A player in the controller and what a RemotePlayer of the same team is made with."""
    _, model = player(workflow, **more)
    return model, {"team": team_of(workflow), "generate": model, "run_seed": 0, "timeout_s": 100.0, **more}


def remote(crew, parts, **more):
    kept = {name: parts[name] for name in ("team", "generate", "run_seed", "timeout_s")}
    return RemotePlayer(workers=crew, **kept, **more)


async def contents(store):
    """All that the store knows of every row."""
    found = await store.query("SELECT sample_id FROM samples")
    shown = {}
    for row in await store.get([sample_id for (sample_id,) in found.rows]):
        values = {name: getattr(value, "tolist", lambda value=value: value)() for name, value in row.values.items()}
        shown[row.sample_id] = (row.state, row.reason, row.version, row.next_agent_id, values)
    return shown


def undisturbed(episodes):
    """Rows of these episodes when the controller plays them."""

    async def scenario():
        store = new_store()
        made, _ = player(relay, store=store)
        await asyncio.gather(*(made.play(GROUP, index) for index in range(episodes)))
        return await contents(store)

    return run_virtual(scenario())


@settings(max_examples=25, deadline=None)
@given(
    kills=st.lists(st.tuples(st.floats(0.1, 9.0), st.sampled_from([FIRST, SECOND])), max_size=2),
    latency_s=st.sampled_from([0.0, 0.01, 0.4]),
)
def test_whenever_workers_die_every_episode_ends_once_with_the_rows_of_an_undisturbed_one(kills, latency_s):
    async def scenario():
        store, events = new_store(), RememberedEvents(now)
        model, parts = scripted(relay)
        async with workers_of(2, team=parts["team"], store=store, latency_s=latency_s, events=events) as (
            crew,
            cluster,
        ):
            one = remote(crew, parts, store=store, events=events)
            playing = [asyncio.create_task(one.play(GROUP, index)) for index in range(4)]
            for at, name in sorted(kills):
                await asyncio.sleep(max(0.0, at - now()))
                if any(resident.alive and resident.name == name for resident in cluster.residents):
                    cluster.kill(name)
            episodes = await asyncio.gather(*playing)
        assert all(episode.finished for episode in episodes)
        replayed = Counter(event.episode for event in events.of(EpisodeLost) if event.again)
        assert all(count < MOST_LOSSES for count in replayed.values())
        return await contents(store), len(model.requests)

    found, requests = run_virtual(scenario())
    expected = undisturbed(4)
    assert found == expected
    assert requests >= len(expected)


def test_an_episode_is_played_again_elsewhere_and_says_so():
    async def scenario():
        store, events = new_store(), RememberedEvents(now)
        model, parts = scripted(relay)
        async with workers_of(2, team=parts["team"], store=store, events=events) as (crew, cluster):
            one = remote(crew, parts, store=store, events=events)
            playing = asyncio.create_task(one.play(GROUP, 0))
            await asyncio.sleep(2.5)
            cluster.kill(FIRST, "memory ran out")
            assert (await playing).finished
            assert now() == 2.5 + 4.0, "it went to the other worker at once"
        (again,) = events.of(EpisodeLost)
        assert (again.episode, again.group) == ("g0e0a0", 0)
        assert "rollout/0" in again.because
        assert "memory ran out" in again.because
        ids = [request.request_id for request in model.requests]
        assert ids[:3] == ids[3:6], "the same calls, with the same seeds"
        assert [request.seed for request in model.requests[:3]] == [request.seed for request in model.requests[3:6]]

    run_virtual(scenario())


def test_the_calls_of_a_lost_worker_are_aborted_before_the_episode_is_played_again():
    """Two calls of one id must not be under way: an instance tells its calls apart by their ids."""
    under_way, most = Counter(), Counter()

    class Slow(ScriptedEngine):
        async def generate(self, requests):
            ids = [request.request_id for request in requests]
            under_way.update(ids)
            for id in ids:
                most[id] = max(most[id], under_way[id])
            try:
                await asyncio.sleep(1.0)
                async for answer in super().generate(requests):
                    yield answer
            finally:
                under_way.subtract(ids)

    async def scenario():
        store, (_, parts) = new_store(), scripted(relay)
        async with (
            InferencePool({name: [Slow(lambda request: "7")] for name in ("solver", "verifier")}).open() as pool,
            workers_of(2, team=parts["team"], store=store) as (crew, cluster),
        ):
            one = remote(crew, {**parts, "generate": pool.generate}, store=store)
            playing = asyncio.create_task(one.play(GROUP, 0))
            await asyncio.sleep(1.5)
            cluster.kill(FIRST)
            assert (await playing).finished

    run_virtual(scenario())
    assert list(most.values()) == [1] * 4


def test_an_episode_that_ends_worker_after_worker_fails_with_the_reason_and_leaves_no_row():
    async def scenario():
        store, events = new_store(), RememberedEvents(now)
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"], store=store, events=events) as (crew, cluster):
            one = remote(crew, parts, store=store, events=events)
            playing = asyncio.create_task(one.play(GROUP, 0))
            while not playing.done():
                await asyncio.sleep(1.5)
                if any(resident.alive for resident in cluster.residents):
                    cluster.kill(FIRST, "it ended itself")
            episode = await playing
        assert (episode.status, episode.failure.kind) == (EpisodeStatus.FAILED, "worker_lost")
        assert f"{MOST_LOSSES} rollout workers ended while they played it" in episode.reason
        assert "it ended itself" in episode.reason
        assert await rows(store) == {}
        assert [lost.again for lost in events.of(EpisodeLost)] == [True] * (MOST_LOSSES - 1) + [False]

    run_virtual(scenario())


def test_a_worker_that_stands_still_is_replaced_and_its_episodes_go_on():
    async def scenario():
        store, events = new_store(), RememberedEvents(now)
        _, parts = scripted(relay)
        team = parts["team"]
        async with workers_of(2, team=team, store=store, stuck_s=60.0, events=events) as (crew, cluster):
            one = remote(crew, parts, store=store, events=events)
            playing = asyncio.create_task(one.play(GROUP, 0))
            await asyncio.sleep(1.5)
            cluster.residents[0].hang()
            assert (await playing).finished
            (lost,) = events.of(WorkerLost)
            assert lost.process == FIRST
            assert "stood still for 60 s (rollout.episode_timeout_s" in lost.because
            assert now() <= 1.5 + remote_player.BEAT_S + 60.0 + 4.0
            await asyncio.sleep(1.0)
            assert {resident.name for resident in cluster.residents if resident.alive} == {FIRST, SECOND}
        assert await contents(store) == undisturbed_one

    undisturbed_one = undisturbed(1)
    run_virtual(scenario())


def test_without_a_worker_the_run_ends_with_the_reason_and_a_remedy():
    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"]) as (crew, cluster):
            playing = asyncio.create_task(remote(crew, parts).play(GROUP, 0))
            await asyncio.sleep(1.5)

            async def none(name):
                attempts.append(name)
                raise ConfigError("no room for 1 more residents")

            crew._spawn, attempts = none, []
            cluster.kill(FIRST)
            with pytest.raises(WorkerError, match=r"no rollout worker is left: no room .* rollout.workers=0"):
                await playing
            assert attempts == [FIRST] * MOST_STARTS

    run_virtual(scenario())


def test_a_group_that_is_stopped_when_its_worker_dies_is_not_played_again():
    async def scenario():
        store, (_, parts), stop = new_store(), scripted(relay), Stop()
        async with workers_of(1, team=parts["team"], store=store, latency_s=0.2) as (crew, cluster):
            playing = asyncio.create_task(remote(crew, parts, store=store).play(GROUP, 0, stop=stop))
            await asyncio.sleep(1.5)
            stop.now("it came too late")
            cluster.kill(FIRST)
            episode = await playing
        assert (episode.status, episode.reason, episode.stopped) == (
            EpisodeStatus.TIMED_OUT,
            "it came too late",
            True,
        )
        assert await rows(store) == {}

    run_virtual(scenario())


def test_episodes_go_to_the_worker_with_the_fewest():
    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(2, team=parts["team"]) as (crew, cluster):
            one = remote(crew, parts)
            await asyncio.gather(*(one.play(GROUP, index) for index in range(6)))
            return [resident.hosted.played for resident in cluster.residents]

    assert run_virtual(scenario()) == [3, 3]


def test_an_episode_that_ended_counts_no_longer():
    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(2, team=parts["team"]) as (crew, cluster):
            one = remote(crew, parts)
            for index in range(3):
                await one.play(GROUP, index)
            return [resident.hosted.played for resident in cluster.residents]

    assert run_virtual(scenario()) == [3, 0]


def test_a_worker_that_dies_when_the_run_has_ended_is_not_replaced():
    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"]) as (crew, cluster):
            asyncio.get_running_loop().call_later(1.0, cluster.kill, FIRST)
            async with crew.open():
                pass
            await asyncio.sleep(2.0)
        assert [resident.alive for resident in cluster.residents] == [False]

    run_virtual(scenario())


def test_messages_of_a_moment_cross_together():
    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"], latency_s=0.1) as (crew, cluster):
            one = remote(crew, parts)
            await asyncio.gather(*(one.play(GROUP, index) for index in range(16)))
            return Counter(cluster.residents[0].crossings)

    crossings = run_virtual(scenario())
    assert crossings["exchange"] <= 8, "4 rounds of 16 answers"


def test_tool_calls_of_all_workers_share_the_places_of_the_run():
    async def use(task, team):
        async with team.context.tools.running.place("clock", 2):
            inside.append(1)
            most.append(len(inside))
            await asyncio.sleep(1.0)
            inside.pop()
        (await team.solver.act(task.prompt)).reward(1.0)

    async def scenario(at_once):
        _, parts = scripted(use)
        async with workers_of(2, team=parts["team"], bounded=at_once is not None) as (crew, _):
            one = remote(crew, parts, running=RunningCalls(at_once))
            for episode in await asyncio.gather(*(one.play(GROUP, index) for index in range(6))):
                assert episode.finished, episode.reason

    inside, most = [], []
    run_virtual(scenario(None))
    assert max(most) == 2, "the tool's own bound"
    inside, most = [], []
    run_virtual(scenario(1))
    assert max(most) == 1, "the run's bound"


def test_a_place_that_is_waited_for_is_given_back_when_the_episode_ends():
    async def wait(task, team):
        async with team.context.tools.running.place("clock", 1):
            await asyncio.sleep(30.0 if team.context.trajectory_id == "g0e0a0" else 0.0)
        (await team.solver.act(task.prompt)).reward(1.0)

    async def scenario():
        _, parts = scripted(wait)
        running = RunningCalls()
        async with workers_of(2, team=parts["team"], timeout_s=10.0) as (crew, _):
            first, second = await asyncio.gather(
                *(remote(crew, parts, running=running).play(GROUP, index) for index in range(2))
            )
            assert {first.status, second.status} == {EpisodeStatus.TIMED_OUT}
            async with asyncio.timeout(1.0), running.place("clock", 1):
                return

    run_virtual(scenario())


def test_a_call_that_is_left_at_once_is_never_sent():
    """The call and its end cross together, so that its task has not begun when it is left."""

    async def leave(task, team):
        async def call():
            await team.verifier.act("never")

        left = asyncio.create_task(call())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.cancel()
        (await team.solver.act(task.prompt)).reward(1.0)

    async def scenario():
        model, parts = scripted(leave)
        store = new_store()
        async with workers_of(1, team=parts["team"], store=store, latency_s=0.5) as (crew, _):
            episode = await remote(crew, parts, store=store).play(GROUP, 0)
            assert episode.finished, episode.reason
        assert [request.agent for request in model.requests] == ["solver"]

    run_virtual(scenario())


def test_rows_for_a_store_of_the_controller_alone_come_with_the_episode():
    """As those of an evaluation that is kept: the run's own store gets none."""

    async def scenario():
        runs, kept, (_, parts) = new_store(), new_store(), scripted(relay)
        async with workers_of(1, team=parts["team"], store=runs) as (crew, _):
            episode = await remote(crew, parts, store=runs).play(GROUP, 0, store=kept)
            assert episode.finished
        assert await rows(runs) == {}
        return await contents(kept)

    assert run_virtual(scenario()) == undisturbed(1)


def test_what_a_workflow_raised_arrives_with_its_traceback():
    class Odd(Exception):
        """Cannot be pickled: it is local, and wants two arguments."""

        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    async def fail(task, team):
        raise Odd(1, 2)

    async def scenario():
        _, parts = scripted(fail)
        async with workers_of(1, team=parts["team"]) as (crew, _):
            return await remote(crew, parts).played(GROUP, 0, stop=Stop())

    played = run_virtual(scenario())
    assert "1 and 2" in str(played.error)
    (note,) = played.error.__notes__
    assert "in fail" in note
    assert "test_rollout_workers.py" in note


def test_a_task_that_cannot_cross_fails_its_episode_and_names_the_reason():
    async def scenario():
        _, parts = scripted(relay)
        store, events = new_store(), RememberedEvents(now)
        async with workers_of(1, team=parts["team"], store=store) as (crew, _):
            one = remote(crew, parts, store=store, events=events)
            group = replace(GROUP, task=replace(TASK, scorer=lambda answer, reference: 1.0))
            failed, other = await asyncio.gather(one.play(group, 0), one.play(GROUP, 1))
        assert other.finished
        assert failed.status is EpisodeStatus.FAILED
        assert failed.reason.startswith("the episode could not cross to a rollout worker or back: ")
        assert "<lambda>" in failed.reason
        assert {row[0] for row in (await rows(store)).values()} == {"open"}

    run_virtual(scenario())


def test_an_episode_whose_end_cannot_cross_leaves_no_row(monkeypatch):
    monkeypatch.setattr(worker, "crossing", lambda error: asyncio.current_task())  # No task can be copied.

    async def scenario():
        store, (_, parts) = new_store(), scripted(relay)
        async with workers_of(1, team=parts["team"], store=store) as (crew, _):
            episode = await remote(crew, parts, store=store).play(GROUP, 0)
        return episode, await rows(store)

    episode, left = run_virtual(scenario())
    assert (episode.status, left) == (EpisodeStatus.FAILED, {})


def test_a_keyboard_interrupt_in_a_workflow_is_its_own_failure():
    """As such it would end the event loop of the worker, and with it all other episodes."""

    async def pressed(task, team):
        raise KeyboardInterrupt

    async def scenario():
        _, parts = scripted(pressed)
        async with workers_of(1, team=parts["team"]) as (crew, _):
            return await remote(crew, parts).play(GROUP, 0)

    episode = run_virtual(scenario())
    assert (episode.status, episode.reason) == (EpisodeStatus.FAILED, "a KeyboardInterrupt left the workflow")


def test_the_loss_of_the_store_ends_the_run():
    class Lost:
        async def put(self, agent, rows):
            raise StoreError("the disk is full")

    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"], store=Lost()) as (crew, _):
            with pytest.raises(StoreError, match="the disk is full"):
                await remote(crew, parts, store=new_store()).play(GROUP, 0)

    run_virtual(scenario())


def test_an_engine_that_is_lost_fails_the_call_as_in_the_controller():
    async def lost(request, *, interrupted):
        raise EngineError("no instance of policy 'solver' is left")

    async def scenario():
        _, parts = scripted(relay)
        async with workers_of(1, team=parts["team"]) as (crew, _):
            return await remote(crew, {**parts, "generate": lost}).play(GROUP, 0)

    episode = run_virtual(scenario())
    assert (episode.status, episode.reason) == (EpisodeStatus.FAILED, "no instance of policy 'solver' is left")


def test_a_line_that_blocks_a_worker_is_named_with_the_worker(monkeypatch):
    monkeypatch.setattr(blocking_watch, "BLOCKED_S", 0.2)
    monkeypatch.setattr(blocking_watch, "BEAT_S", 0.02)

    def sleepy():
        time.sleep(0.5)

    async def block(task, team):
        await asyncio.sleep(0.1)  # until the watch has begun
        sleepy()
        (await team.solver.act(task.prompt)).reward(1.0)

    async def scenario():
        events = RememberedEvents(now)
        _, parts = scripted(block, delay_s=lambda request: 0.3)
        kept = {name: parts[name] for name in ("team", "generate", "run_seed", "timeout_s")}
        async with workers_of(1, team=parts["team"], events=events) as (crew, _):
            assert (await RemotePlayer(workers=crew, events=events, **kept).play(GROUP, 0)).finished
        return events.of(LoopBlocked)

    (blocked,) = asyncio.run(scenario())
    assert blocked.process == FIRST
    assert blocked.place.startswith("test_rollout_workers.py:")
