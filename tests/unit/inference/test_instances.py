"""Instances come and go on virtual time, and every request is answered by one that holds what was published."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from flexmarl.errors import EngineError
from flexmarl.events.serving_events import Called, InstanceLost, InstanceReplaced, Loaded
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum
from flexmarl.records import FinishReason, InstanceId, Version, VersionRun
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, utf8_text
from tests.unit.inference.models import POLICY, request

LETTERS = "abcdefghij"
V1 = (POLICY, Version(1), Checksum("sum:weights/solver/1"))
V2 = (POLICY, Version(2), Checksum("sum:weights/solver/2"))


class Engine(ScriptedEngine):
    """Says the letters, one a second. Loads, acknowledges and closes as slowly as it is told to."""

    def __init__(self, *, load_s=0.0, acknowledge_s=0.0, close_s=0.0, version=0, **changes):
        super().__init__(lambda one: LETTERS, latency_s=1.0, version=Version(version), **changes)
        self.load_s, self.acknowledge_s, self.close_s = load_s, acknowledge_s, close_s
        self.loads = []
        self.closed_at = None

    async def load_weights(self, policy, version):
        self.loads.append(version)
        await asyncio.sleep(self.load_s)
        held = await super().load_weights(policy, version)
        await asyncio.sleep(self.acknowledge_s)
        return held

    async def close(self):
        await asyncio.sleep(self.close_s)
        self.closed_at = now()
        await super().close()


class Spare:
    """Starts the engines it was given, one after the other, each in ten seconds; keeps what the pool tells."""

    def __init__(self, *engines, start_s=10.0):
        self.engines, self.start_s = list(engines), start_s
        self.started, self.told = [], []

    async def __call__(self, policy, name):
        self.started.append((now(), name))
        await asyncio.sleep(self.start_s)
        engine = self.engines[len(self.started) - 1]
        if isinstance(engine, Exception):
            raise engine
        return engine

    def listen(self, pool):
        pool.events.listen(InstanceLost, lambda lost: self.told.append(("lost", lost.instance, lost.because)))
        pool.events.listen(
            InstanceReplaced,
            lambda new: self.told.append(("replaced", new.replaces, new.instance, new.version, new.seconds)),
        )
        self.loads, self.calls = [], []
        pool.events.listen(Loaded, self.loads.append)
        pool.events.listen(Called, self.calls.append)


@asynccontextmanager
async def serving(engines, *spare, start_s=10.0, **settings):
    """A pool at version 1, with spare engines."""
    respawn = Spare(*spare, start_s=start_s)
    async with InferencePool({POLICY: engines}, PoolSettings(**settings), respawn=respawn).open() as pool:
        respawn.listen(pool)
        await pool.load_weights(*V1)
        yield SimpleNamespace(pool=pool, spare=respawn)


def now():
    return asyncio.get_running_loop().time()


def text(generation):
    return utf8_text(generation.response_ids.tolist())


def refuse(key):
    raise EngineError(f"no room for {key}")


def test_a_lost_instance_is_closed_and_another_one_serves_in_its_place_what_was_published():
    async def scenario():
        old, new = Engine(close_s=2.0), Engine(load_s=3.0)
        async with serving([old], new) as at:
            call = asyncio.create_task(at.pool.generate(request("r", seed=7, max_tokens=10)))
            await asyncio.sleep(4.5)
            old.fail("the GPU fell off the bus")
            answer = await call
        assert (text(answer), answer.versions[0].version) == (LETTERS, 1)
        assert [(one.request_id, one.seed) for one in new.requests] == [("r", 7)]
        assert (old.closed_at, at.spare.started, new.loads) == (6.5, [(6.5, "solver/1")], [1])
        assert at.spare.told == [
            ("lost", "solver/0", "EngineError: the GPU fell off the bus"),
            ("replaced", "solver/0", "solver/1", 1, 15.0),
        ]
        assert now() == 4.5 + 2.0 + 10.0 + 3.0 + 10.0

    run_virtual(scenario())


def test_an_idle_instance_whose_death_is_noticed_elsewhere_is_replaced_before_the_next_request():
    async def scenario():
        async with serving([Engine(), Engine()], Engine()) as at:
            at.pool.lose(InstanceId("solver", 0), "its process was killed")
            at.pool.lose(InstanceId("solver", 0), "its process was killed")
            at.pool.lose(InstanceId("solver", 9), "it never was")
            at.pool.lose(InstanceId("nobody", 0), "it never was")
            assert list(await at.pool.usage()) == ["solver/1"]
            await asyncio.sleep(11.0)
            assert list(await at.pool.usage()) == ["solver/1", "solver/2"]
        assert at.pool.lost == {"solver/0": "its process was killed"}
        at.pool.lose(InstanceId("solver", 1), "the run has ended, and so has its process")
        assert list(at.pool.lost) == ["solver/0"]

    run_virtual(scenario())


def test_while_a_replacement_is_on_its_way_requests_wait_no_longer_than_they_want_to():
    async def scenario():
        async with serving([Engine()], Engine()) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            hasty, patient = await asyncio.gather(
                at.pool.generate(request("hasty"), timeout_s=3.0), at.pool.generate(request("patient", max_tokens=10))
            )
            assert (hasty.finish, hasty.response_ids.size, text(patient)) == (FinishReason.ABORT, 0, LETTERS)
            assert [call.request for call in at.spare.calls] == ["patient"]
            assert now() == 20.0

    run_virtual(scenario())


def test_a_request_whose_time_is_over_when_its_instance_is_lost_is_not_played_again():
    class Deaf(Engine):
        async def abort(self, request_ids):
            self.aborted = [*getattr(self, "aborted", []), *request_ids]

    async def scenario():
        deaf, other = Deaf(), Engine()
        async with serving([deaf, other]) as at:
            call = asyncio.create_task(at.pool.generate(request("r", max_tokens=10), timeout_s=3.0))
            await asyncio.sleep(4.0)
            at.pool.lose(InstanceId("solver", 0), "killed")
            answer = await call
            assert (answer.finish, now(), deaf.aborted) == (FinishReason.ABORT, 4.0, ["r"])
        assert other.requests == []

    run_virtual(scenario())


BROKEN = {
    "starting it failed: OSError: no such node": OSError("no such node"),
    "starting it took more than 300.0 s": None,
    "loading version 1 failed: EngineError: no room for weights/solver/1": lambda: Engine(checksum=refuse),
    "loading version 1 took more than 120.0 s": lambda: Engine(load_s=1000.0),
    "version 1 has checksum sum:weights/solver/1, but it holds torn": lambda: Engine(
        checksum=lambda key: Checksum("torn")
    ),
}


@pytest.mark.parametrize("because", BROKEN)
def test_a_replacement_that_fails_counts_and_the_next_one_is_started(because):
    class Spares(Spare):
        async def __call__(self, policy, name):
            if BROKEN[because] is None and not self.started:
                self.started.append((now(), name))
                await asyncio.Event().wait()
            return await super().__call__(policy, name)

    async def scenario():
        make = BROKEN[because]
        broken = make() if callable(make) else make
        spare = Spares(broken, Engine())
        async with InferencePool({POLICY: [Engine()]}, PoolSettings(replacements=2), respawn=spare).open() as pool:
            spare.listen(pool)
            await pool.load_weights(*V1)
            pool.lose(InstanceId("solver", 0), "killed")
            assert text(await pool.generate(request("r", max_tokens=10))) == LETTERS
        assert pool.lost == {"solver/0": "killed", "solver/1": because}
        assert spare.told[-1][:4] == ("replaced", "solver/0", "solver/2", 1)
        if isinstance(broken, Engine):
            assert broken.requests == []
            assert broken.closed_at is not None

    run_virtual(scenario())


def test_when_all_replacements_are_used_up_every_caller_learns_all_reasons():
    async def scenario():
        spares = [Engine(), OSError("no such node"), OSError("no node at all")]
        async with serving([Engine()], *spares) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            await at.pool.generate(request("r"))
            at.pool.lose(InstanceId("solver", 1), "killed too")
            with pytest.raises(EngineError) as raised:
                await at.pool.generate(request("r"))
            assert str(raised.value) == (
                "no instance of 'solver' is left: solver/0: killed; solver/1: killed too; "
                "solver/2: starting it failed: OSError: no such node; "
                "solver/3: starting it failed: OSError: no node at all"
            )
            with pytest.raises(EngineError, match="no instance of 'solver' serves version 2: solver/0: killed; "):
                await at.pool.load_weights(*V2)

    run_virtual(scenario())


def test_without_replacements_a_lost_instance_is_only_closed():
    async def scenario():
        old = Engine()
        async with serving([old, Engine()], replacements=0) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            await asyncio.sleep(100.0)
            assert list(await at.pool.usage()) == ["solver/1"]
        assert (old.closed_at, at.spare.started) == (0.0, [])

    run_virtual(scenario())


@pytest.mark.parametrize("close_s", [29.0, 31.0, float("inf")])
def test_a_lost_instance_that_hangs_in_closing_delays_its_replacement_for_a_bounded_time(close_s):
    async def scenario():
        old = Engine(close_s=min(close_s, 1e9))
        async with serving([old], Engine()) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            await at.pool.generate(request("r"))
        assert at.spare.started == [(min(close_s, 30.0), "solver/1")]

    run_virtual(scenario())


def test_a_replacement_that_loads_an_older_version_serves_only_when_it_has_the_newer_one():
    async def scenario():
        stays, new = Engine(), Engine(load_s=5.0)
        async with serving([Engine(), stays], new) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            await asyncio.sleep(12.0)
            assert new.loads == [1], "the witness: it is loading version 1"
            assert await at.pool.load_weights(*V2) == {"solver/1": "sum:weights/solver/2"}
            assert now() == 12.0, "only live instances are waited for"
            answers = await asyncio.gather(*(at.pool.generate(request(i, max_tokens=10)) for i in range(4)))
            assert {answer.versions for answer in answers} == {(VersionRun(0, Version(2)),)}
            assert (await at.pool.usage())["solver/2"].version == 2
        assert new.loads == [1, 2]
        assert at.spare.told[-1] == ("replaced", "solver/0", "solver/2", 2, 20.0)

    run_virtual(scenario())


def test_a_replacement_that_finds_the_older_version_released_goes_on_with_the_newer_one():
    released = set()

    def held(key):
        if key in released:
            raise EngineError(f"no object '{key}'")
        return Checksum(f"sum:{key}")

    async def scenario():
        new = Engine(load_s=5.0, checksum=held)
        async with serving([Engine(), Engine()], new) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            await asyncio.sleep(12.0)
            await at.pool.load_weights(*V2)
            released.add("weights/solver/1")
            await asyncio.sleep(9.0)
            assert (await at.pool.usage())["solver/2"].version == 2
        assert new.loads == [1, 2]
        assert at.pool.lost == {"solver/0": "killed"}

    run_virtual(scenario())


def test_a_version_that_every_instance_fails_to_load_is_loaded_by_a_replacement():
    async def scenario():
        def fails_later(key):
            return Checksum("sum:weights/solver/1") if key == "weights/solver/1" else refuse(key)

        async with serving([Engine(checksum=fails_later)], Engine()) as at:
            assert await at.pool.load_weights(*V2) == {"solver/1": "sum:weights/solver/2"}
            assert now() == 10.0

    run_virtual(scenario())


def test_an_instance_that_dies_while_it_loads_is_not_waited_for():
    async def scenario():
        dying = Engine()
        async with serving([dying, Engine()], Engine()) as at:
            dying.load_s = 100.0
            loading = asyncio.create_task(at.pool.load_weights(*V2))
            await asyncio.sleep(1.0)
            at.pool.lose(InstanceId("solver", 0), "killed")
            assert await loading == {"solver/1": "sum:weights/solver/2"}
            assert now() == 1.0

    run_virtual(scenario())


def test_an_answer_that_overtakes_the_acknowledgement_of_its_version_waits_for_it():
    async def scenario():
        engine = Engine()
        async with serving([engine]) as at:
            engine.acknowledge_s = 50.0
            call = asyncio.create_task(at.pool.generate(request("r", max_tokens=10)))
            await asyncio.sleep(4.5)
            await at.pool.load_weights(*V2)
            answer = await call
            assert [(run.start, run.version) for run in answer.versions] == [(0, 1), (5, 2)]
            assert now() == 54.5

    run_virtual(scenario())


def test_an_answer_of_a_version_with_another_checksum_is_played_again_elsewhere():
    async def scenario():
        torn = Engine(checksum=lambda key: Checksum("torn" if key == "weights/solver/2" else "sum:weights/solver/1"))
        other = Engine()
        async with serving([torn, other]) as at:
            torn.acknowledge_s = 50.0
            call = asyncio.create_task(at.pool.generate(request("r", max_tokens=10)))
            await asyncio.sleep(4.5)
            await at.pool.load_weights(*V2)
            assert [one.request_id for one in torn.requests] == ["r"], "the witness: it was with the torn one"
            answer = await call
        assert [(run.start, run.version) for run in answer.versions] == [(0, 2)]
        assert [one.request_id for one in other.requests] == ["r"]

    run_virtual(scenario())


def test_an_engine_that_claims_a_version_nobody_gave_it_is_lost():
    async def scenario():
        async with InferencePool({POLICY: [Engine(version=3), Engine()]}).open() as pool:
            assert (await pool.generate(request("r"))).versions[0].version == 0
        assert pool.lost == {"solver/0": "EngineError: it answered with version 3, but has acknowledged 0"}

    run_virtual(scenario())


def test_the_pool_tells_of_every_answered_call_and_every_load():
    async def scenario():
        async with serving([Engine(load_s=2.0)]) as at:
            await at.pool.generate(request("r", prompt=(1, 2, 3, 4), max_tokens=6))
            await asyncio.sleep(1.0)
            await at.pool.generate(request("s"), timeout_s=2.5)
        (load,) = at.spare.loads
        first, second = at.spare.calls
        assert (load.instance, load.version, load.checksum, load.began, load.ended) == (
            "solver/0",
            1,
            "sum:weights/solver/1",
            0.0,
            2.0,
        )
        assert (first.instance, first.policy, first.request, first.version) == ("solver/0", "solver", "r", 1)
        assert (first.began, first.ended) == (2.0, 8.0)
        assert (first.prompt_tokens, first.sampled_tokens, first.reused_tokens) == (4, 6, 0)
        assert (second.finish, second.sampled_tokens, second.ended) == (FinishReason.ABORT, 3, 12.0)

    run_virtual(scenario())


def test_leaving_the_pool_ends_waiting_calls_and_replacements_on_their_way():
    async def scenario():
        async with serving([Engine()], Engine()) as at:
            at.pool.lose(InstanceId("solver", 0), "killed")
            call = asyncio.create_task(at.pool.generate(request("r")))
            await asyncio.sleep(1.0)
        with pytest.raises(EngineError, match="not open"):
            await call
        assert now() == 1.0
        assert at.spare.told == [("lost", "solver/0", "killed")]

    run_virtual(scenario())


def test_a_call_that_waits_for_a_replacement_which_has_not_even_begun_ends_with_the_pool():
    async def scenario():
        async def kill(pool):
            await asyncio.sleep(0)
            pool.lose(InstanceId("solver", 0), "killed")

        async with serving([Engine()], Engine()) as at:
            killing = asyncio.create_task(kill(at.pool))
            call = asyncio.create_task(at.pool.generate(request("r")))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert killing.done(), "the witness: it is lost in this very moment"
        with pytest.raises(EngineError, match="not open"):
            await call
        assert at.spare.started == []

    run_virtual(scenario())


def test_leaving_the_pool_acknowledges_no_load_that_is_under_way():
    async def scenario():
        engine = Engine()
        async with serving([engine]) as at:
            engine.load_s = 50.0
            loading = asyncio.create_task(at.pool.load_weights(*V2))
            await asyncio.sleep(1.0)
        with pytest.raises(EngineError, match="no instance of 'solver' serves version 2: the pool was left meanwhile"):
            await loading

    run_virtual(scenario())


def test_a_pool_is_asleep_when_lost_engines_have_been_ended():
    async def scenario():
        async with serving([Engine(), Engine(close_s=4.0)], Engine()) as at:
            began = now()
            at.pool.lose(InstanceId(POLICY, 1), "hangs")
            await at.pool.sleep()
            assert now() == began + 4.0, "until then it may hold its device"

    run_virtual(scenario())


def test_no_replacement_starts_in_a_pool_that_sleeps_again_at_once():
    async def scenario():
        async with serving([Engine(), Engine()], Engine()) as at:
            await at.pool.sleep()
            at.pool.lose(InstanceId(POLICY, 1), "killed")
            await asyncio.sleep(5.0)
            await at.pool.wake()
            await at.pool.sleep()  # Before the replacement, which waited for the waking, has had its turn.
            await asyncio.sleep(20.0)
            assert at.spare.started == [], "asleep, nothing takes a device"
            await at.pool.wake()
            await asyncio.sleep(11.0)
            assert [name for _, name in at.spare.started] == [InstanceId(POLICY, 2)]

    run_virtual(scenario())
