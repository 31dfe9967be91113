"""Instances change their policy on virtual time; every request is answered once, by its own policy."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flexmarl.errors import EngineError
from flexmarl.events.serving_events import Called, Moved
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum
from flexmarl.records import FinishReason, InstanceId
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import utf8_text
from tests.unit.inference.moving import JUDGE, LETTERS, SOLVER, Movable, ask, publish


def text(generation):
    return utf8_text(generation.response_ids.tolist())


def now():
    return asyncio.get_running_loop().time()


def play(scenario, *, solvers=2, judges=1, respawn=None, make=Movable, **settings):
    """Runs the scenario on a pool that has published version 1 of both policies."""

    async def main():
        engines = {SOLVER: [make(SOLVER) for _ in range(solvers)], JUDGE: [Movable(JUDGE) for _ in range(judges)]}
        async with InferencePool(engines, PoolSettings(**settings), respawn=respawn).open() as pool:
            at = SimpleNamespace(pool=pool, solvers=engines[SOLVER], judges=engines[JUDGE], moved=[], calls=[])
            pool.events.listen(Moved, at.moved.append)
            pool.events.listen(Called, at.calls.append)
            await publish(pool)
            await scenario(at)
        assert [engine.misdirected for engine in engines[SOLVER] + engines[JUDGE]] == [[]] * (solvers + judges)

    run_virtual(main())


def test_a_moved_instance_serves_its_new_policy_from_its_newest_weights_under_a_name_of_it():
    async def scenario(at):
        await publish(at.pool, 2, JUDGE)
        assert await at.pool.move(InstanceId("solver", 1), to=JUDGE, because="many wait") == "judge/1"
        assert at.solvers[1].loads[-1] == (JUDGE, 2)
        answers = await asyncio.gather(*(ask(at.pool, i, JUDGE) for i in range(4)))
        assert [text(answer) for answer in answers] == [LETTERS[JUDGE]] * 4
        assert {call.instance for call in at.calls} == {"judge/0", "judge/1"}
        (move,) = at.moved
        assert (move.instance, move.to, move.became, move.because) == ("solver/1", JUDGE, "judge/1", "many wait")

    play(scenario)


def test_requests_of_a_moved_instance_go_on_at_another_one_where_they_stopped():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert now() == 5.0, "the move waits for the token under way, and for nothing else"
        answers = await asyncio.gather(*calls)
        (rest,) = (one for one in at.solvers[0].requests if one.offset)
        assert (rest.request_id, rest.offset, rest.sampling.max_tokens) == ("1", 5, 5)
        assert [text(answer) for answer in answers] == [LETTERS[SOLVER]] * 2
        assert [(len(a.logprobs), a.finish) for a in answers] == [(10, FinishReason.STOP)] * 2
        assert now() == 10.0
        moved = at.calls[-1]
        assert (moved.request, moved.prompt_tokens, moved.sampled_tokens, moved.kept_tokens) == ("1", 3, 10, 5)
        assert moved.computed_tokens == len(rest.prompt_ids) == 3 + 5, "its new instance had none of its tokens"

    play(scenario)


def test_an_answer_says_which_version_sampled_what_on_which_side_of_a_move():
    async def scenario(at):
        call = ask(at.pool, "a"), ask(at.pool, "b")
        await asyncio.sleep(4.5)
        await asyncio.gather(at.pool.move(InstanceId("solver", 1), to=JUDGE), publish(at.pool, 2, SOLVER))
        answers = await asyncio.gather(*call)
        assert [[(run.start, run.version) for run in answer.versions] for answer in answers] == [[(0, 1), (5, 2)]] * 2

    play(scenario)


def test_with_drain_the_instance_ends_first_what_it_runs():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert now() == 10.0
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert all(not one.offset for one in at.solvers[0].requests)

    play(scenario, on_move="drain")


class Finishes(Movable):
    """Cannot go on with what another instance began."""

    async def capabilities(self):
        return replace(await super().capabilities(), continues=False)


def test_where_no_other_engine_can_continue_its_requests_the_instance_ends_them_first():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert now() == 10.0
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert all(not one.offset for one in at.solvers[0].requests)

    play(scenario, make=Finishes, on_move="continue")


def test_a_request_that_is_moved_keeps_its_patience_and_what_it_has():
    async def scenario(at):
        calls = [ask(at.pool, i, timeout_s=7.0) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        moved, _ = await asyncio.gather(*calls)
        assert (moved.finish, text(moved)) == (FinishReason.ABORT, "abcdefg")
        assert now() == 7.0

    play(scenario)


def test_a_request_in_line_again_whose_time_is_over_comes_back_with_what_it_has():
    async def scenario(at):
        calls = [ask(at.pool, i, timeout_s=7.0) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        assert at.pool.waiting == {SOLVER: 1, JUDGE: 0}
        moved, _ = await asyncio.gather(*calls)
        assert (moved.finish, text(moved)) == (FinishReason.ABORT, "abcde")
        assert at.pool.waiting == {SOLVER: 0, JUDGE: 0}

    play(scenario, max_running=1)


@pytest.mark.parametrize(
    ("instance", "to", "because"),
    [
        ("judge/0", SOLVER, "'judge/0' cannot be moved: it is the last live instance of 'judge'"),
        ("solver/7", JUDGE, r"'solver/7' cannot be moved: it is not live; live are: \['solver/0', 'solver/1'\]"),
        ("solver/0", SOLVER, "it serves that policy already"),
        ("solver/0", "critic", "no policy 'critic' is served"),
    ],
)
def test_a_move_that_cannot_be_is_refused_and_changes_nothing(instance, to, because):
    async def scenario(at):
        with pytest.raises(EngineError, match=because):
            await at.pool.move(InstanceId.parse(instance), to=to)
        assert list(await at.pool.usage()) == ["solver/0", "solver/1", "judge/0"]

    play(scenario)


def test_no_instance_moves_to_a_policy_without_weights_or_while_the_pool_sleeps():
    async def unpublished():
        async with InferencePool({SOLVER: [Movable(SOLVER), Movable(SOLVER)], JUDGE: [Movable(JUDGE)]}).open() as pool:
            await publish(pool, 1, SOLVER)
            with pytest.raises(EngineError, match="has published no weights that it could load"):
                await pool.move(InstanceId("solver", 0), to=JUDGE)

    async def asleep(at):
        await at.pool.sleep()
        with pytest.raises(EngineError, match="the pool is asleep"):
            await at.pool.move(InstanceId("solver", 0), to=JUDGE)

    run_virtual(unpublished())
    play(asleep)


def torn(policy):
    return Movable(policy, checksum=lambda key: Checksum("torn" if "judge" in key else f"sum:{key}"))


def test_an_instance_that_does_not_hold_the_new_policys_weights_is_lost_and_replaced_there():
    async def respawn(policy, name):
        await asyncio.sleep(10.0)
        return Movable(policy)

    async def scenario(at):
        with pytest.raises(EngineError, match=r"was not moved to 'judge': version 1 has checksum .* but it holds torn"):
            await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert list(at.pool.lost) == ["judge/1"]
        await asyncio.sleep(11.0)
        assert list(await at.pool.usage()) == ["solver/0", "judge/0", "judge/2"]
        assert at.moved == []

    play(scenario, make=torn, respawn=respawn)


def test_a_moved_instance_that_hangs_is_known_to_be_lost_before_its_process_has_ended():
    class Hung(Movable):
        async def load_weights(self, policy, version):
            if policy != self.policy:
                await asyncio.sleep(1000.0)
            return await super().load_weights(policy, version)

        async def close(self):
            try:
                await asyncio.sleep(1000.0)
            finally:
                await asyncio.sleep(10.0)  # The end of a process that stands still.

    async def scenario(at):
        with pytest.raises(EngineError, match=r"was not moved to 'judge': loading version 1 took more than 4\.0 s"):
            await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        assert now() == 4.0
        assert list(at.pool.lost) == ["judge/1"]

    play(scenario, make=Hung, load_timeout_s=4.0, close_timeout_s=2.0)


class Deaf(Movable):
    async def abort(self, request_ids):
        pass


def test_an_instance_that_does_not_end_its_requests_is_lost_and_they_start_again():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(0.5)
        with pytest.raises(EngineError, match=r"it did not end its requests within 4\.0 s"):
            await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert list(at.pool.lost) == ["solver/0"]
        assert now() == 15.0

    play(scenario, make=Deaf, abort_grace_s=2.0)


def test_an_instance_that_dies_while_it_drains_is_known_by_its_old_name():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 0), "its process was killed")
        with pytest.raises(EngineError, match="its process was killed"):
            await moving
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert now() == 16.0

    play(scenario, on_move="drain")


def test_a_moved_instance_that_dies_later_is_known_by_its_old_name_too():
    async def scenario(at):
        await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        at.pool.lose(InstanceId("solver", 0), "its process was killed")
        assert at.pool.lost == {"judge/1": "its process was killed"}

    play(scenario)


def test_an_instance_whose_policy_loses_all_others_meanwhile_stays():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 1), "its process was killed")
        with pytest.raises(EngineError, match="'solver' has lost its other instances meanwhile, so it stays"):
            await moving
        assert [text(await call) for call in calls] == [LETTERS[SOLVER]] * 2
        assert list(await at.pool.usage()) == ["solver/2", "judge/0"]

    play(scenario, on_move="drain")


@pytest.mark.parametrize("version", [1, 2])
def test_an_instance_comes_back_whose_policy_loses_all_others_while_it_loads(version):
    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 1), "its process was killed")
        call = ask(at.pool, "waits")
        if version == 2:
            await publish(at.pool, 2, SOLVER)
        with pytest.raises(EngineError, match="'solver' has lost its other instances meanwhile, so it stays"):
            await moving
        assert (text(await call), now()) == (LETTERS[SOLVER], 20.0)
        assert at.solvers[0].loads[-2:] == [(JUDGE, 1), (SOLVER, version)]
        assert list(await at.pool.usage()) == ["solver/2", "judge/0"]

    play(scenario)


def test_an_instance_goes_though_its_policy_loses_all_others_while_another_one_is_on_its_way():
    async def respawn(policy, name):
        await asyncio.sleep(10.0)
        return Movable(policy)

    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 1), "its process was killed")
        assert await moving == "judge/1"
        assert (text(await ask(at.pool, "waits")), now()) == (LETTERS[SOLVER], 21.0)

    play(scenario, respawn=respawn)


def test_an_instance_that_is_reported_dead_while_it_loads_is_lost_and_replaced_at_its_new_policy():
    async def respawn(policy, name):
        return Movable(policy)

    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        at.pool.lose(InstanceId("solver", 0), "its process was killed")
        with pytest.raises(EngineError, match="its process was killed"):
            await moving
        await asyncio.sleep(1.0)
        assert list(await at.pool.usage()) == ["solver/1", "judge/0", "judge/2"]
        assert at.pool.lost == {"solver/0": "its process was killed"}

    play(scenario, respawn=respawn)


def test_a_version_published_while_an_instance_loads_the_one_before_is_loaded_before_it_serves():
    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(2.0)
        await publish(at.pool, 2, JUDGE)
        assert now() == 2.0, "only live instances are waited for"
        assert await moving == "judge/1"
        assert at.solvers[0].loads[-2:] == [(JUDGE, 1), (JUDGE, 2)]
        assert {name: use.version for name, use in (await at.pool.usage()).items()}["judge/1"] == 2

    play(scenario)


def test_an_instance_that_loads_for_its_old_policy_moves_when_it_has():
    async def scenario(at):
        at.solvers[0].load_s = 5.0
        loading = asyncio.create_task(publish(at.pool, 2, SOLVER))
        await asyncio.sleep(2.0)
        assert await at.pool.move(InstanceId("solver", 0), to=JUDGE) == "judge/1"
        assert at.solvers[0].loads == [(SOLVER, 1), (SOLVER, 2), (JUDGE, 1)]
        await loading
        assert now() == 10.0

    play(scenario)


def test_a_move_goes_on_when_who_asked_for_it_is_gone():
    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        moving.cancel()
        await asyncio.sleep(5.0)
        assert [move.became for move in at.moved] == ["judge/1"]

    play(scenario)


def test_leaving_the_pool_ends_a_move():
    async def main():
        async with InferencePool(
            {SOLVER: [Movable(SOLVER, load_s=5.0) for _ in "ab"], JUDGE: [Movable(JUDGE)]}
        ).open() as p:
            await publish(p)
            moving = asyncio.create_task(p.move(InstanceId("solver", 0), to=JUDGE))
            await asyncio.sleep(1.0)
        with pytest.raises(EngineError, match="the pool was left meanwhile"):
            await moving

    run_virtual(main())


def test_of_requests_that_wait_each_goes_to_the_next_instance_with_a_place_in_order():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(5)]
        await asyncio.sleep(0.5)
        assert at.pool.waiting == {SOLVER: 3, JUDGE: 0}
        assert at.pool.given[SOLVER] == {"solver/0": 1, "solver/1": 1}
        await asyncio.gather(*calls)
        assert [one.request_id for engine in at.solvers for one in engine.requests] == ["0", "2", "4", "1", "3"]
        assert now() == 30.0

    play(scenario, max_running=1)


def test_a_waiting_request_whose_caller_leaves_or_loses_patience_leaves_the_line():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        hasty, left = ask(at.pool, "hasty", timeout_s=3.0), ask(at.pool, "left")
        await asyncio.sleep(2.0)
        assert at.pool.waiting[SOLVER] == 2
        left.cancel()
        answer = await hasty
        assert (answer.finish, answer.response_ids.size, now()) == (FinishReason.ABORT, 0, 3.0)
        assert at.pool.waiting[SOLVER] == 0
        await asyncio.gather(*calls)
        assert {one.request_id for engine in at.solvers for one in engine.requests} == {"0", "1"}

    play(scenario, max_running=1)


def test_a_moved_instance_finds_those_that_wait_for_its_new_policy():
    async def scenario(at):
        calls = [ask(at.pool, i, JUDGE) for i in range(2)]
        await asyncio.sleep(3.0)
        await at.pool.move(InstanceId("solver", 0), to=JUDGE)
        await asyncio.gather(*calls)
        assert now() == 13.0

    play(scenario, max_running=1)


def test_requests_that_come_while_the_pool_sleeps_wait_and_those_that_run_stand_still():
    async def scenario(at):
        running = ask(at.pool, "running")
        await asyncio.sleep(4.5)
        await at.pool.sleep()
        new = ask(at.pool, "new")
        await asyncio.sleep(100.0)
        assert (at.pool.waiting[SOLVER], at.pool.given[SOLVER]) == (1, {"solver/0": 1, "solver/1": 0})
        await publish(at.pool, 2)
        await at.pool.wake()
        await at.pool.wake()
        assert [text(answer) for answer in await asyncio.gather(running, new)] == [LETTERS[SOLVER]] * 2

    play(scenario)


def test_a_pool_that_is_to_sleep_lets_instances_arrive_first():
    async def scenario(at):
        at.solvers[0].load_s = 5.0
        moving = asyncio.create_task(at.pool.move(InstanceId("solver", 0), to=JUDGE))
        await asyncio.sleep(1.0)
        await at.pool.sleep()
        assert (moving.done(), now()) == (True, 5.0)

    play(scenario)


class Sleepless(Movable):
    async def sleep(self):
        raise EngineError("no room on the host")


def test_an_engine_that_cannot_sleep_is_lost_and_replaced_when_the_pool_wakes():
    started = []

    async def respawn(policy, name):
        started.append(now())
        return Movable(policy)

    async def scenario(at):
        await at.pool.sleep()
        assert at.pool.lost == dict.fromkeys(["solver/0", "solver/1"], "falling asleep failed: no room on the host")
        waiting = ask(at.pool, "r")
        await asyncio.sleep(50.0)
        assert started == []
        await at.pool.wake()
        assert text(await waiting) == LETTERS[SOLVER]
        assert started == [50.0, 50.0]

    play(scenario, make=Sleepless, respawn=respawn)


def test_a_moved_call_whose_last_instance_is_lost_comes_back_with_what_it_has():
    async def scenario(at):
        calls = [ask(at.pool, i) for i in range(2)]
        await asyncio.sleep(4.5)
        await at.pool.move(InstanceId("solver", 1), to=JUDGE)
        await asyncio.sleep(1.0)
        at.solvers[0].fail("it died")
        moved, other = (await asyncio.gather(*calls, return_exceptions=True))[::-1]
        assert (text(moved), moved.finish) == ("abcde", FinishReason.ERROR)
        assert "no instance of 'solver' is left" in moved.error
        assert isinstance(other, EngineError)

    play(scenario)
