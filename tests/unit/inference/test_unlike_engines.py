"""Instances end and others start, on virtual time: moves between unlike engines, growth, and room that is missed."""

import asyncio
from types import SimpleNamespace

import pytest

from flexmarl.errors import ConfigError, EngineError
from flexmarl.events.serving_events import (
    Called,
    InstanceGrown,
    InstanceLost,
    InstanceReplaced,
    InstanceRetired,
    Moved,
)
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import InstanceId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import utf8_text
from tests.unit.inference.moving import JUDGE, LETTERS, SOLVER, Movable, Own, Room, ask, publish


def text(generation):
    return utf8_text(generation.response_ids.tolist())


def now():
    return asyncio.get_running_loop().time()


def play(scenario, *, solvers=2, judges=1, most=3, start_s=10.0, engine=Own, **settings):
    """Runs the scenario on a pool of unlike engines that has published version 1 of both policies."""

    async def main():
        room = Room(most, start_s=start_s)
        engines = {SOLVER: [engine(SOLVER) for _ in range(solvers)], JUDGE: [engine(JUDGE) for _ in range(judges)]}
        room.held += engines[SOLVER] + engines[JUDGE]
        all_engines = list(room.held)
        async with InferencePool(engines, PoolSettings(**settings), respawn=room, room=room).open() as pool:
            at = SimpleNamespace(pool=pool, room=room, solvers=engines[SOLVER], judges=engines[JUDGE], said=[])
            for kind in (Moved, InstanceGrown, InstanceRetired, InstanceLost, InstanceReplaced):
                pool.events.listen(kind, at.said.append)
            at.calls = []
            pool.events.listen(Called, at.calls.append)
            await publish(pool)
            await scenario(at)
            all_engines += room.held
        assert [engine.misdirected for engine in all_engines if engine.misdirected] == []

    run_virtual(main())


def names(at):
    return [(event.name, event.instance) for event in at.said]


def test_an_unlike_engine_ends_and_one_of_the_other_policy_starts_as_one_move_with_one_reason():
    async def scenario(at):
        await publish(at.pool, 2, JUDGE)
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        became = await at.pool.move(InstanceId("solver", 1), to=JUDGE, because="many wait", expected_s=12.0)
        assert (became, now()) == ("judge/1", 15.0)
        assert at.room.events == [(5.0, "ended", SOLVER), (5.0, "started", "judge/1")]
        (move,) = at.said
        assert (move.name, move.instance, move.to, move.became) == ("moved", "solver/1", JUDGE, "judge/1")
        assert (move.because, move.expected_s, move.seconds, move.starts) == ("many wait", 12.0, 10.5, True)
        assert at.room.held[-1].loads == [(JUDGE, 2)], "the newest weights"
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert len(at.calls) == 2
        answers = await asyncio.gather(*(ask(at.pool, f"j{i}", JUDGE) for i in range(4)))
        assert [text(answer) for answer in answers] == [LETTERS[JUDGE]] * 4
        assert {call.instance for call in at.calls[2:]} == {"judge/0", "judge/1"}

    play(scenario)


def test_with_drain_the_engine_ends_first_what_it_runs():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert at.room.events[0] == (10.0, "ended", SOLVER)
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2

    play(scenario, on_move="drain")


def test_an_engine_that_does_not_start_in_its_place_is_lost_by_the_new_policy_and_replaced():
    async def scenario(at):
        at.room.faults = [EngineError("no such model")]
        with pytest.raises(
            EngineError, match=r"'solver/1' was not moved to 'judge': starting it failed: .*no such model"
        ):
            await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert list(at.pool.lost) == ["judge/1"]
        await asyncio.sleep(11.0)
        assert list(await at.pool.usage()) == ["solver/0", "judge/0", "judge/2"]
        assert names(at) == [("instance_lost", "judge/1"), ("instance_replaced", "judge/2")]

    play(scenario)


def test_an_unlike_engine_stays_whose_policy_loses_all_others_before_it_has_ended():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 1), "its process was killed")
        with pytest.raises(EngineError, match="'solver' has lost its other instances meanwhile, so it stays"):
            await moving
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert all(event[1:] != ("ended", SOLVER) or event[0] == 5.5 for event in at.room.events), (
            "the killed one alone"
        )

    play(scenario, on_move="drain", replacements=0)


def test_once_it_has_ended_the_move_goes_on_and_its_policy_replaces_what_it_loses():
    async def scenario(at):
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 1), "its process was killed")
        at.pool.lose(InstanceId("solver", 0), "a late word of the process that was ended")
        call = ask(at.pool, "waits")
        assert await moving == "judge/1"
        assert (text(await call), now()) == (LETTERS[SOLVER], 21.0)
        assert list(at.pool.lost) == ["solver/1"]
        at.pool.lose(InstanceId("solver", 0), "a very late word")
        assert "judge/1" in await at.pool.usage(), "the new process has a name of its own"

    play(scenario)


def test_a_policy_gets_a_further_instance_where_there_is_room_and_the_journal_says_why():
    async def scenario(at):
        assert at.pool.has_room(JUDGE)
        calls = [ask(at.pool, i, JUDGE) for i in range(2)]
        growing = asyncio.create_task(at.pool.grow(JUDGE, because="it drains last", expected_s=9.0))
        await asyncio.sleep(5.0)
        assert (at.pool.growing(JUDGE), at.pool.has_room(JUDGE)) == (1, False)
        await publish(at.pool, 2, JUDGE)
        assert now() == 5.0, "a publication does not wait for it"
        assert await growing == "judge/1"
        (grown,) = at.said
        assert (grown.because, grown.expected_s, grown.seconds) == ("it drains last", 9.0, 10.0)
        assert (grown.version, at.room.held[-1].loads) == (2, [(JUDGE, 2)])
        assert [text(await call) for call in calls] == [LETTERS[JUDGE]] * 2
        with pytest.raises(EngineError, match="there is no room"):
            await at.pool.grow(SOLVER)

    play(scenario, most=4, max_running=1)


def test_what_does_not_start_changes_nothing():
    async def scenario(at):
        at.room.faults = [ConfigError("others use the CPU")]
        with pytest.raises(EngineError, match=r"'judge' did not get one more instance: .* others use the CPU"):
            await at.pool.grow(JUDGE)
        assert (at.pool.lost, at.said, at.pool.growing(JUDGE)) == ({}, [], 0)
        assert text(await ask(at.pool, "r", JUDGE)) == LETTERS[JUDGE]

    play(scenario, most=4)


def test_a_further_instance_that_is_lost_is_not_replaced_but_the_last_one_of_a_policy_is():
    async def scenario(at):
        await at.pool.grow(JUDGE)
        at.pool.lose(InstanceId("judge", 1), "killed")
        await asyncio.sleep(20.0)
        assert list(await at.pool.usage()) == ["solver/0", "solver/1", "judge/0"]
        await at.pool.grow(JUDGE)
        await at.pool.move(InstanceId("judge", 0), to=SOLVER)
        at.pool.lose(InstanceId("judge", 2), "killed")
        assert text(await ask(at.pool, "waits", JUDGE)) == LETTERS[JUDGE]
        assert list(await at.pool.usage()) == ["solver/0", "solver/1", "solver/2", "judge/3"]

    play(scenario, most=4)


def test_a_replacement_without_room_gets_that_of_a_further_instance_whose_requests_go_on():
    async def scenario(at):
        await at.pool.grow(JUDGE)
        calls = [ask(at.pool, i, JUDGE) for i in range(2)]
        await asyncio.sleep(4.5)
        at.room.most = 3  # As if the lost one had its room on a node that is gone.
        at.pool.lose(InstanceId("solver", 0), "its node is lost")
        assert [text(await call) for call in calls] == [LETTERS[JUDGE]] * 2
        await asyncio.sleep(10.0)
        assert names(at)[1:] == [
            ("instance_lost", "solver/0"),
            ("instance_retired", "judge/1"),
            ("instance_replaced", "solver/2"),
        ]
        assert at.said[2].because == "a replacement for a lost instance of 'solver' has no other room"
        assert {*await at.pool.usage()} == {"solver/1", "solver/2", "judge/0"}

    play(scenario, most=4)


def test_a_further_instance_that_has_moved_is_still_one_and_the_configured_ones_stay():
    async def scenario(at):
        await at.pool.grow(JUDGE)
        became = await at.pool.move(InstanceId("judge", 1), to=SOLVER)
        at.room.most = 3
        at.pool.lose(InstanceId("judge", 0), "its node is lost")
        await asyncio.sleep(20.0)
        assert ("instance_retired", became) in names(at)
        assert {*await at.pool.usage()} == {"solver/0", "solver/1", "judge/2"}

    play(scenario, most=4)


@pytest.mark.parametrize("alike", [True, False])
def test_a_policy_that_has_lost_its_last_instance_and_its_room_gets_one_of_another_policy(alike):
    async def scenario(at):
        at.room.alike = alike
        at.room.most = 2
        at.pool.lose(InstanceId("judge", 0), "its node is lost")
        call = ask(at.pool, "waits", JUDGE)
        assert text(await call) == LETTERS[JUDGE]
        (move,) = (event for event in at.said if isinstance(event, Moved))
        assert (move.instance, move.to, move.starts) == ("solver/0", JUDGE, not alike)
        assert move.because == "'judge' has lost its last instance, and another one has no room"
        assert {*await at.pool.usage()} == {"solver/1", move.became}

    play(scenario, engine=Movable if alike else Own)
