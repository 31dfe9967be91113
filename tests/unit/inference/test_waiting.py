import asyncio

from flexmarl.events.journal import RememberedEvents
from flexmarl.events.serving_events import Called
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.records import InstanceId
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.inference.moving import JUDGE, SOLVER, Movable, ask, publish


def waits(scenario, *, engines=1):
    """What the journal says of each call's wait, after the scenario, at engines that take one call at a time."""

    async def main():
        events = RememberedEvents(asyncio.get_running_loop().time)
        served = {SOLVER: [Movable(SOLVER) for _ in range(engines)], JUDGE: [Movable(JUDGE)]}
        async with InferencePool(served, PoolSettings(max_running=1), events=events).open() as pool:
            await publish(pool)
            await scenario(pool)
        return {event.request: event.waited_s for event in events.of(Called)}

    return run_virtual(main())


def test_the_journal_says_how_long_a_call_waited_in_line_and_nothing_of_one_that_did_not():
    async def scenario(pool):
        await asyncio.gather(*(ask(pool, number) for number in range(3)))

    assert waits(scenario) == {"0": 0.0, "1": 10.0, "2": 20.0}


def test_a_call_that_goes_on_elsewhere_has_not_waited():
    async def scenario(pool):
        calls = [ask(pool, number) for number in range(2)]
        await asyncio.sleep(2.5)
        await pool.move(InstanceId("solver", 0), to=JUDGE)
        await asyncio.gather(*calls)

    assert waits(scenario, engines=2) == {"0": 0.0, "1": 0.0}
