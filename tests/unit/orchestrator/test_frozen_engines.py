"""A judge behind an engine that only generates, in every mode; and engines that cannot do what the run asks for."""

from dataclasses import replace
from typing import Any

import pytest

from flexmarl.agents.characters import character_renderer
from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.interface import EngineCapabilities
from flexmarl.inference.pool import InferencePool
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import InstanceId, PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import FrozenEngine, ScriptedEngine
from flexmarl.testing.scripted_run import ScriptedRun, spoken

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
ALL = EngineCapabilities(
    loads_weights=True, sleeps=True, deterministic=True, continues=True, raw_logprobs=True, adapters=True
)


class Limited(ScriptedEngine):
    """A scripted engine that says that it can do all but this."""

    def __init__(self, objects, **changes):
        renderer = character_renderer()
        super().__init__(spoken(lambda *_: "a", renderer), latency_s=0.1, decode=renderer.decode, objects=objects)
        self._said = replace(ALL, **changes)

    async def capabilities(self):
        return self._said


def frozen(kind=FrozenEngine):
    """An engine that always answers `a`."""
    renderer = character_renderer()
    return kind(lambda request: renderer.encode("a"), encode=renderer.encode, decode=renderer.decode)


class Replacing(ScriptedRun):
    """A run whose lost engines are replaced by this one."""

    spare: Any = None

    def make_pool(self, *instances, **how):
        async def respawn(policy, name):
            return self.spare

        return super().make_pool(*instances, **{**how, "respawn": respawn if self.spare else None})


def run_with(policy, engine, spare=None, **sections):
    """A run of a trained solver and a frozen judge, one of which has this engine, or one that can do all but this."""
    policies = {"judge": {"trainable": False}, **sections.pop("policies", {})}
    run = Replacing(agents={"solver": "solver", "judge": "judge"}, policies=policies, steps=3, **sections)
    run.spare = spare
    run.engines[policy] = [Limited(run.objects, **engine) if isinstance(engine, dict) else engine]
    return run


@pytest.mark.parametrize("mode", list(Mode))
def test_an_engine_that_only_generates_serves_a_judge_in_every_mode(mode):
    judge = frozen()
    run = run_with(JUDGE, judge, mode=mode).play()
    assert run.trainers["solver"].version == 3
    assert run.world.pool.lost == {}
    assert len(judge.requests) >= 3 * 2 * 2


def test_a_frozen_engine_that_is_lost_is_replaced_by_another_one():
    first, second = frozen(), frozen()

    async def lose(run):
        run.world.pool.lose(InstanceId("judge", 0), "its server went away")

    run = run_with(JUDGE, first, spare=second, mode="colocated").play(lose)
    assert run.trainers["solver"].version == 3
    assert run.world.pool.lost == {"judge/0": "its server went away"}
    assert run.world.pool.capabilities[JUDGE] == (EngineCapabilities(),)
    assert second.requests


@pytest.mark.parametrize(
    ("engine", "sections", "complaint"),
    [
        (frozen(), {}, r"policies\.solver\.trainable is true, but .* does not load weights"),
        ({"sleeps": False}, {"mode": "colocated"}, "mode is 'colocated', .* does not sleep"),
        (
            {"adapters": False},
            {"policies": {"solver": {"training": {"lora": {}, "publish": "adapter"}}}},
            r"policies\.solver\.training\.publish is 'adapter', but .* takes whole weights only",
        ),
        ({"deterministic": False}, {"deterministic": True}, "deterministic is true, but the engine of"),
        (
            {"raw_logprobs": False},
            {"team": {"temperature": 0.5}},
            r"team\.agents\.solver\.sampling changes the model's distribution",
        ),
    ],
)
def test_a_setting_that_asks_for_more_than_an_engine_can_do_is_refused_by_name(engine, sections, complaint):
    team = sections.pop("team", {})
    run = run_with(SOLVER, engine, **sections)
    seats = {
        name: seat.model_copy(update={"sampling": seat.sampling.model_copy(update=team)})
        for name, seat in run.settings.team.agents.items()
    }
    settings = run.settings.model_copy(update={"team": run.settings.team.model_copy(update={"agents": seats})})
    run.blueprint = replace(run.blueprint, settings=settings)
    with pytest.raises(ConfigError, match=complaint):
        run.play()


@pytest.mark.parametrize("changes", [{"sleeps": False}, {"deterministic": False}, {"raw_logprobs": False}])
def test_what_no_setting_asks_for_an_engine_need_not_do(changes):
    assert run_with(SOLVER, changes).play().trainers["solver"].version == 3


def test_only_engines_that_load_weights_load_or_move():
    async def scenario():
        engines = {SOLVER: [frozen(ScriptedEngine)], JUDGE: [frozen(), frozen()]}
        async with InferencePool(engines).open() as pool:
            await pool.load_weights(SOLVER, Version(1))
            with pytest.raises(EngineError, match="'judge/0' cannot be moved to 'solver': its engine does not load"):
                await pool.move(InstanceId("judge", 0), to=SOLVER)
            with pytest.raises(EngineError, match="version 2 was published, but its engine does not load weights"):
                await pool.load_weights(JUDGE, Version(2))

    run_virtual(scenario())


def test_an_engine_that_does_not_say_what_it_can_do_is_lost():
    class Silent(FrozenEngine):
        async def capabilities(self):
            raise EngineError("no connection")

    async def scenario():
        async with InferencePool({JUDGE: [frozen(Silent), frozen()]}).open() as pool:
            assert pool.lost == {"judge/0": "asking what it can do failed: EngineError: no connection"}
            assert pool.capabilities == {JUDGE: (EngineCapabilities(),)}

    run_virtual(scenario())


def test_an_engine_without_the_method_is_a_mistake_that_ends_the_run():
    class Old:
        async def close(self):
            """Closes nothing."""

    async def scenario():
        async with InferencePool({JUDGE: [Old()]}).open():
            raise AssertionError("it must not open")

    with pytest.raises(AttributeError, match="capabilities"):
        run_virtual(scenario())
