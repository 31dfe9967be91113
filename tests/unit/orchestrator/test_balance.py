"""Balancing on virtual time: what the rule wants is done, with its reason in the journal."""

import asyncio
from types import SimpleNamespace

import pytest

from flexmarl.events.journal import RememberedEvents
from flexmarl.events.notices import StepPlayed
from flexmarl.events.serving_events import Called, Moved, MoveFailed
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.scaling import RULES, Move
from flexmarl.inference.settings import BalanceSettings, PoolSettings
from flexmarl.orchestrator.balance import Balancer
from flexmarl.records import InstanceId
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.inference.moving import JUDGE, SOLVER, Movable, ask, publish


class Once:
    """Wants these moves at its first look; remembers what it was shown."""

    def __init__(self, *moves):
        self.moves, self.seen = list(moves), []

    def decide(self, loads, *, move_s, ends_in_s=None):
        self.seen.append((asyncio.get_running_loop().time(), loads, move_s))
        moves, self.moves = self.moves, []
        return moves


def play(scenario, *, rule="queue_gap", load_s=0.0, slots=4, max_running=None, **changes):
    """Runs the scenario beside the balancer of a pool with three solvers and one judge."""

    async def main():
        name = rule if isinstance(rule, str) else "queue_gap"
        balance = BalanceSettings(rule=name, **changes)
        events = RememberedEvents(asyncio.get_running_loop().time)
        engines = {SOLVER: [Movable(SOLVER) for _ in range(3)], JUDGE: [Movable(JUDGE)]}
        async with InferencePool(engines, PoolSettings(max_running=max_running), events=events).open() as pool:
            await publish(pool)
            for engine in engines[SOLVER]:
                engine.load_s = load_s
            decides = RULES[rule](balance) if isinstance(rule, str) else rule
            balancer = Balancer(pool, decides, balance, events, slots={SOLVER: slots, JUDGE: slots})
            watching = asyncio.create_task(balancer.watch(), name="watch")
            await scenario(SimpleNamespace(pool=pool, events=events))
            watching.cancel()

    run_virtual(main())


def moved(at):
    return [(event.instance, event.became) for event in at.events.of(Moved)]


def test_an_instance_moves_to_the_policy_whose_requests_wait_and_the_journal_says_why():
    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(8)))
        (event,) = at.events.of(Moved)
        assert event.because == "7 requests wait for 'judge' and 0 for 'solver', more than 5 apart"
        assert (event.instance, event.to, event.became) == ("solver/0", JUDGE, "judge/1")
        assert (event.process, event.began, event.t) == ("engine/judge/1", 5.0, 7.0)

    play(scenario, max_running=1, load_s=2.0)


def test_what_waits_is_counted_in_the_pool_and_in_engines_beyond_their_slots():
    rule = Once()

    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(6)))
        load = rule.seen[0][1][JUDGE]
        assert (load.instances, load.running, load.slots) == ({"judge/0": 2}, 2, 2)
        scenario.waiting, scenario.expected = load.waiting, load.expected

    for max_running in (None, 3):
        rule.seen.clear()
        play(scenario, rule=rule, slots=2, max_running=max_running)
        assert scenario.waiting == 4
        assert scenario.expected.tokens == 2 * 5.0, "two have run for the five seconds of a poll, and none is answered"


def test_it_does_not_look_while_nothing_is_asked():
    rule = Once()

    async def scenario(at):
        await asyncio.sleep(100_000.0)
        assert rule.seen == []
        await ask(at.pool, "r")
        assert [when for when, *_ in rule.seen] == [100_005.0, 100_010.0]
        await asyncio.sleep(100_000.0)
        assert len(rule.seen) <= 3

    play(scenario, rule=rule)


def test_moves_are_made_side_by_side_and_the_next_look_knows_what_they_took():
    rule = Once(Move(InstanceId("solver", 0), JUDGE, "one"), Move(InstanceId("solver", 1), JUDGE, "two"))

    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i) for i in range(20)))
        assert [event.t for event in at.events.of(Moved)] == [8.0, 8.0]
        assert [(when, move_s) for when, _, move_s in rule.seen[:2]] == [(5.0, 2.5), (13.0, 3.0)]

    play(scenario, rule=rule, load_s=3.0, max_running=4)


def test_a_move_that_is_refused_is_noted_and_ends_nothing():
    rule = Once(Move(InstanceId("judge", 0), SOLVER, "why not"), Move(InstanceId("solver", 0), JUDGE, "for good"))

    async def scenario(at):
        await ask(at.pool, "r")
        (event,) = at.events.of(MoveFailed)
        assert event.because == "'judge/0' cannot be moved: it is the last live instance of 'judge'"
        assert moved(at) == [("solver/0", "judge/1")]

    play(scenario, rule=rule)


def test_with_start_by_share_the_next_step_begins_with_instances_where_the_last_one_had_its_work():
    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(12)), ask(at.pool, "s"))
        at.events.emit(StepPlayed(step=0, pauses=True))
        await asyncio.sleep(1.0)
        assert len(moved(at)) == 2
        assert {became.split("/")[0] for _, became in moved(at)} == {JUDGE}
        at.events.emit(StepPlayed(step=0, pauses=True))
        await asyncio.sleep(1.0)
        assert len(moved(at)) == 2

    play(scenario, rule=Once(), start="by_share")


def test_a_step_begins_as_configured_unless_rollout_never_pauses():
    rule = Once(Move(InstanceId("solver", 0), JUDGE, "for good"))

    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i) for i in range(12)))
        assert moved(at) == [("solver/0", "judge/1")]
        at.events.emit(StepPlayed(step=0, pauses=False))
        await asyncio.sleep(1.0)
        assert len(moved(at)) == 1
        at.events.emit(StepPlayed(step=0, pauses=True))
        await asyncio.sleep(1.0)
        assert [became.split("/")[0] for _, became in moved(at)] == [JUDGE, SOLVER]

    play(scenario, rule=rule)


def test_start_moves_of_a_pool_that_sleeps_are_made_when_it_wakes():
    async def scenario(at):
        await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(12)), ask(at.pool, "s"))
        at.events.emit(StepPlayed(step=0, pauses=True))
        await at.pool.sleep()
        await asyncio.sleep(10.0)
        assert at.events.of(MoveFailed) == moved(at) == []
        await at.pool.wake()
        await asyncio.sleep(1.0)
        assert len(moved(at)) == 2

    play(scenario, rule=Once(), start="by_share")


@pytest.mark.parametrize("rule", ["queue_gap", "drain_time"])
def test_under_constant_load_nothing_moves_twice(rule):
    async def scenario(at):
        async def worker(number, policy):
            for hop in range(20):
                await ask(at.pool, f"{number}-{policy}-{hop}", policy)

        await asyncio.gather(*(worker(i, JUDGE) for i in range(9)), *(worker(i, SOLVER) for i in range(2)))
        names = [instance for instance, _ in moved(at)]
        assert names
        assert not {became for _, became in moved(at)} & set(names)

    play(scenario, rule=rule, max_running=1, load_s=1.0)


def test_the_journal_says_of_a_moved_call_how_many_of_its_tokens_came_from_elsewhere():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(3)]
        await asyncio.sleep(2.5)
        await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        await asyncio.gather(*calls)
        kept = {event.request: event.kept_tokens for event in at.events.of(Called)}
        assert kept == {"0": 3, "1": 0, "2": 0}

    play(scenario)
