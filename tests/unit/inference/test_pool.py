"""The pool on virtual time."""

import asyncio

import pytest

from flexmarl.errors import EngineError
from flexmarl.events.serving_events import Called
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum
from flexmarl.records import FinishReason, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine, utf8_text
from tests.unit.inference.models import POLICY, request

LETTERS = "abcdefghij"


def scripted(**changes):
    return ScriptedEngine(lambda one: LETTERS, **{"latency_s": 1.0, **changes})


def now():
    return asyncio.get_running_loop().time()


def text(generation):
    return utf8_text(generation.response_ids.tolist())


def test_requests_of_one_tick_go_out_as_one_batch_per_instance():
    async def scenario():
        engines = [scripted(), scripted()]
        async with InferencePool({POLICY: engines}).open() as pool:
            answers = await asyncio.gather(*(pool.generate(request(i, max_tokens=10)) for i in range(6)))
        assert [engine.batches for engine in engines] == [[3], [3]]
        assert [answer.request_id for answer in answers] == [str(i) for i in range(6)]
        assert now() == 10.0

    run_virtual(scenario())


def test_a_timeout_aborts_the_request_and_returns_what_it_has():
    async def scenario():
        async with InferencePool({POLICY: [scripted()]}).open() as pool:
            slow, fast = await asyncio.gather(
                pool.generate(request("slow", max_tokens=10), timeout_s=3.5),
                pool.generate(request("fast", max_tokens=5)),
            )
        assert (slow.finish, text(slow), text(fast)) == (FinishReason.ABORT, "abcd", "abcde")
        assert slow.error == "no whole answer within 3.5 s; use a larger rollout.call_timeout_s"

    run_virtual(scenario())


class Deaf(ScriptedEngine):
    """Never answers, not even to an abort."""

    async def generate(self, requests):
        await asyncio.Event().wait()
        yield

    async def abort(self, request_ids):
        self.aborted = list(request_ids)


def test_an_engine_that_does_not_even_answer_to_an_abort_costs_the_grace_period_and_is_lost():
    async def scenario():
        engine = Deaf(lambda one: "")
        async with InferencePool({POLICY: [engine]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            answer = await pool.generate(request("r"), timeout_s=3.0)
            assert pool.lost == {"solver/0": "it left an abort unanswered for 2 s"}
        assert (answer.finish, answer.response_ids.size, now()) == (FinishReason.ABORT, 0, 5.0)
        assert engine.aborted == ["r"]

    run_virtual(scenario())


def test_an_engine_that_keeps_what_its_caller_has_left_is_lost():
    async def scenario():
        async with InferencePool({POLICY: [Deaf(lambda one: "")]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            left = asyncio.create_task(pool.generate(request("r")))
            await asyncio.sleep(1.0)
            left.cancel()
            await asyncio.sleep(1.9)
            assert not pool.lost
            await asyncio.sleep(0.2)
            assert pool.lost == {"solver/0": "it left an abort unanswered for 2 s"}

    run_virtual(scenario())


def test_an_engine_that_answered_to_an_abort_is_not_lost_by_a_later_request_with_the_same_id():
    async def scenario():
        async with InferencePool({POLICY: [scripted()]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            left = asyncio.create_task(pool.generate(request("r", max_tokens=10)))
            await asyncio.sleep(1.5)
            left.cancel()
            await asyncio.sleep(1.0)
            again = await pool.generate(request("r", max_tokens=5))
            assert not pool.lost
        assert text(again) == "abcde"

    run_virtual(scenario())


def test_an_abort_on_its_way_does_not_reach_a_later_request_with_the_same_id():
    class Distant:
        """An engine whose aborts arrive late."""

        def __init__(self, engine):
            self.engine = engine

        async def abort(self, request_ids):
            await asyncio.sleep(0.7)
            await self.engine.abort(request_ids)

        def __getattr__(self, name):
            return getattr(self.engine, name)

    async def scenario(leaves_after, keeps):
        async with InferencePool({POLICY: [Distant(scripted())]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            interrupted = kept.append if keeps else None
            left = asyncio.create_task(pool.generate(request("r", max_tokens=10), interrupted=interrupted))
            await asyncio.sleep(leaves_after)
            left.cancel()
            await asyncio.sleep(0)
            again = await pool.generate(request("r", max_tokens=5))
            assert not pool.lost
        return text(again), again.finish

    for leaves_after in (0.5, 9.8):
        for keeps in (False, True):
            kept = []
            assert run_virtual(scenario(leaves_after, keeps)) == ("abcde", FinishReason.LENGTH)
            assert [one.done() for one in kept] == [True] * keeps


def test_cancelling_the_caller_aborts_its_request_and_no_other():
    async def scenario():
        engine = scripted()
        async with InferencePool({POLICY: [engine]}).open() as pool:
            left = asyncio.create_task(pool.generate(request("left", max_tokens=10)))
            stays = asyncio.create_task(pool.generate(request("stays", max_tokens=4)))
            await asyncio.sleep(2.5)
            left.cancel()
            assert text(await stays) == "abcd"
            assert (await pool.usage())["solver/0"].running == 0
        assert left.cancelled()
        assert (await engine.usage()).generated_tokens == 7

    run_virtual(scenario())


def test_requests_of_a_lost_instance_start_again_elsewhere_with_the_same_id_and_seed():
    async def scenario():
        lost, other = scripted(), scripted()
        async with InferencePool({POLICY: [lost, other]}).open() as pool:
            calls = [asyncio.create_task(pool.generate(request(i, seed=40 + i, max_tokens=10))) for i in range(4)]
            await asyncio.sleep(4.5)
            lost.fail("the GPU fell off the bus")
            answers = await asyncio.gather(*calls)
        assert [text(answer) for answer in answers] == [LETTERS] * 4
        moved = {(one.request_id, one.seed) for one in lost.requests}
        assert moved == {("0", 40), ("2", 42)}
        assert moved < {(one.request_id, one.seed) for one in other.requests}
        assert pool.lost == {"solver/0": "EngineError: the GPU fell off the bus"}
        assert now() == 15.0

    run_virtual(scenario())


def test_when_the_last_instance_is_lost_every_caller_learns_why():
    async def scenario():
        engine = scripted()
        async with InferencePool({POLICY: [engine]}).open() as pool:
            calls = [asyncio.create_task(pool.generate(request(i))) for i in range(3)]
            await asyncio.sleep(1.5)
            engine.fail("power cut")
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            outcomes.append((await asyncio.gather(pool.generate(request("late")), return_exceptions=True))[0])
        for outcome in outcomes:
            assert isinstance(outcome, EngineError)
            assert "no instance of 'solver' is left: solver/0: EngineError: power cut" in str(outcome)

    run_virtual(scenario())


class Quitter(ScriptedEngine):
    """Ends its iterator without answering."""

    async def generate(self, requests):
        for one in requests[:0]:
            yield one


@pytest.mark.parametrize("broken", [Quitter, Deaf])
def test_an_engine_that_breaks_the_contract_is_given_up_not_waited_for(broken):
    async def scenario():
        bad = broken(lambda one: "", checksum=lambda key: Checksum("wrong"))
        async with InferencePool({POLICY: [bad, scripted()]}).open() as pool:
            call = asyncio.create_task(pool.generate(request("r", max_tokens=10)))
            await asyncio.sleep(1)
            if broken is Deaf:
                await pool.load_weights(POLICY, Version(1), Checksum("sum:weights/solver/1"))
            assert text(await call) == LETTERS
            assert list(pool.lost) == ["solver/0"]

    run_virtual(scenario())


def test_unknown_policies_are_named_with_those_there_are():
    async def scenario():
        async with InferencePool({"verifier": [scripted()]}).open() as pool:
            with pytest.raises(EngineError, match=r"no policy 'solver' is served; there are: \['verifier'\]"):
                await pool.generate(request("r"))

    run_virtual(scenario())


def test_a_pool_that_is_not_open_says_so():
    async def scenario():
        with pytest.raises(EngineError, match="async with pool"):
            await InferencePool({POLICY: [scripted()]}).generate(request("r"))

    run_virtual(scenario())


def test_leaving_the_pool_ends_every_waiting_call():
    async def scenario():
        engine = scripted()
        async with InferencePool({POLICY: [engine]}).open() as pool:
            call = asyncio.create_task(pool.generate(request("r")))
            await asyncio.sleep(1.5)
        with pytest.raises(EngineError, match="not open"):
            await call
        assert (await engine.usage()).running == 0

    run_virtual(scenario())


@pytest.mark.parametrize("ticks", range(5))
def test_leaving_the_pool_ends_a_call_however_far_it_has_come(ticks):
    async def scenario():
        async with InferencePool({POLICY: [scripted()]}).open() as pool:
            call = asyncio.create_task(pool.generate(request("r")))
            for _ in range(ticks):
                await asyncio.sleep(0)
        with pytest.raises(EngineError, match="not open"):
            await call

    run_virtual(scenario())


class Killed(BaseException):
    """Nobody who expects errors expects this one."""


def test_a_pool_that_is_torn_down_gives_out_nothing_more():
    def kill(_):
        raise Killed

    async def serve(engines, calls):
        async with InferencePool({POLICY: engines}).open() as pool:
            pool.events.listen(Called, kill)
            calls += [asyncio.create_task(pool.generate(request(i))) for i in range(6)]
            try:
                await asyncio.sleep(1000)
            finally:
                calls.append(asyncio.create_task(pool.generate(request("late"))))
                await asyncio.wait(calls)

    async def scenario():
        faults, calls = [], []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        engines = [ScriptedEngine(lambda one: LETTERS), ScriptedEngine(lambda one: "a")]
        with pytest.raises(BaseExceptionGroup) as failure:
            await serve(engines, calls)
        assert failure.group_contains(Killed)
        refused = [isinstance(call.exception(), EngineError) for call in calls]
        assert (sum(refused), refused[-1]) == (6, True)
        assert sum(len(engine.requests) for engine in engines) == 6
        assert not faults

    run_virtual(scenario())


def test_every_instance_loads_and_the_checksums_come_back():
    async def scenario():
        engines = [scripted(), scripted()]
        async with InferencePool({POLICY: engines, "verifier": [scripted()]}).open() as pool:
            held = await pool.load_weights(POLICY, Version(3), Checksum("sum:weights/solver/3"))
            assert held == {"solver/0": "sum:weights/solver/3", "solver/1": "sum:weights/solver/3"}
            assert {name: use.version for name, use in (await pool.usage()).items()} == {
                "solver/0": 3,
                "solver/1": 3,
                "verifier/0": 0,
            }
            assert (await pool.generate(request("r"))).versions[0].version == 3

    run_virtual(scenario())


class Slow(ScriptedEngine):
    async def load_weights(self, policy, version):
        await asyncio.sleep(1000)
        return Checksum(f"sum:weights/{policy}/{version}")


def refuse(key):
    raise EngineError(f"no room for {key}")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: scripted(checksum=lambda key: Checksum("torn")),
            "has checksum sum:weights/solver/3, but it holds torn",
        ),
        (lambda: scripted(checksum=refuse), "loading version 3 failed: EngineError: no room for weights/solver/3"),
        (lambda: Slow(lambda one: LETTERS), "loading version 3 took more than 120.0 s"),
    ],
)
def test_an_instance_that_does_not_hold_the_version_is_deregistered_with_a_reason(make, reason):
    async def scenario():
        async with InferencePool({POLICY: [scripted(), make()]}).open() as pool:
            held = await pool.load_weights(POLICY, Version(3), Checksum("sum:weights/solver/3"))
            assert list(held) == ["solver/0"]
            assert reason in pool.lost["solver/1"]
            assert list(await pool.usage()) == ["solver/0"]
            answers = await asyncio.gather(*(pool.generate(request(i)) for i in range(4)))
            assert {answer.versions[0].version for answer in answers} == {3}

    run_virtual(scenario())


def test_a_version_that_nobody_holds_is_an_error():
    async def scenario():
        async with InferencePool({POLICY: [scripted(checksum=refuse)]}).open() as pool:
            with pytest.raises(EngineError, match=r"no instance of 'solver' serves version 3: solver/0: .*no room"):
                await pool.load_weights(POLICY, Version(3))

    run_virtual(scenario())


class Silent(ScriptedEngine):
    async def usage(self):
        return await asyncio.Event().wait()


def test_the_load_of_an_instance_that_does_not_say_it_is_left_out():
    async def scenario():
        async with InferencePool({POLICY: [Silent(lambda one: ""), scripted()]}).open() as pool:
            assert list(await pool.usage()) == ["solver/1"]
            assert now() == 5.0

    run_virtual(scenario())


def interrupted(pool, one, heard):
    return asyncio.create_task(pool.generate(one, interrupted=heard.append))


def test_what_was_sampled_of_a_call_that_its_caller_left_is_told():
    async def scenario():
        heard: list[asyncio.Future] = []
        async with InferencePool({POLICY: [scripted()]}).open() as pool:
            left = interrupted(pool, request("left", max_tokens=10), heard)
            await asyncio.sleep(2.5)
            left.cancel()
            await asyncio.wait([left])
            (answer,) = heard
            assert (text(await answer), (await answer).finish) == ("abc", FinishReason.ABORT)

    run_virtual(scenario())


def test_of_an_engine_that_does_not_answer_to_an_abort_nothing_is_told_within_the_grace():
    async def scenario():
        heard: list[asyncio.Future] = []
        async with InferencePool({POLICY: [Deaf(lambda one: "")]}, PoolSettings(abort_grace_s=2.0)).open() as pool:
            left = interrupted(pool, request("left"), heard)
            await asyncio.sleep(1.0)
            left.cancel()
            await asyncio.wait([left])
            assert ((await heard[0]).response_ids.size, now()) == (0, 3.0)

    run_virtual(scenario())


def test_a_coroutine_that_is_thrown_away_aborts_its_request_too():
    async def scenario():
        heard: list[asyncio.Future] = []
        async with InferencePool({POLICY: [scripted()]}).open() as pool:
            asking = pool.generate(request("left", max_tokens=10), interrupted=heard.append)
            asking.send(None)
            await asyncio.sleep(3.5)
            asking.close()
            assert text(await heard[0]) == "abcd"

    run_virtual(scenario())


class Dead(ScriptedEngine):
    """Its process has ended, and nobody has noticed yet."""

    async def usage(self):
        raise EngineError("engine/solver/0: it was lost in 'usage'")


def test_an_instance_that_is_lost_while_it_is_asked_for_its_load_spoils_nothing():
    async def scenario():
        async with InferencePool({POLICY: [Dead(lambda one: LETTERS), scripted()]}).open() as pool:
            assert list(await pool.usage()) == ["solver/1"]

    run_virtual(scenario())
