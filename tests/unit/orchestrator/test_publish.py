"""New weights reach every instance, or the instance is given up."""

import asyncio
from types import SimpleNamespace

import pytest

from flexmarl.agents.characters import character_renderer
from flexmarl.errors import EngineError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.serving_events import Called, InstanceLost, InstanceReplaced, Loaded
from flexmarl.events.training_events import Published
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.orchestrator.publish import Publisher, Versions
from flexmarl.records import Divisors, InstanceId, MicroBatch, PolicyName, Sample, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.testing.scripted_run import a_or_b, spoken
from flexmarl.testing.training import FakeTrainer
from tests.unit.inference.models import request
from tests.unit.orchestrator.groups import turn_of

SOLVER = PolicyName("solver")


class Corrupt(ScriptedEngine):
    """Holds other bytes than were published."""

    async def load_weights(self, policy, version):
        await super().load_weights(policy, version)
        return Checksum("torn")


class Late(ScriptedEngine):
    """Takes a minute to load."""

    async def load_weights(self, policy, version):
        await asyncio.sleep(60)
        return await super().load_weights(policy, version)


class TooLate(ScriptedEngine):
    """Loads its first version at once, and no other one in time."""

    async def load_weights(self, policy, version):
        await asyncio.sleep(1000 if version else 0)
        return await super().load_weights(policy, version)


def now():
    return asyncio.get_running_loop().time()


def stage(*kinds, spare=None):
    objects = InlineObjectStore()

    def engine(kind):
        renderer = character_renderer()
        return kind(spoken(a_or_b, renderer), latency_s=0.1, decode=renderer.decode, objects=objects)

    async def respawn(policy, name):
        await asyncio.sleep(10)
        return engine(spare[name])

    engines = [engine(kind) for kind in kinds]
    trainer = FakeTrainer(SOLVER, objects)
    settings = PoolSettings(replacements=1 if spare else 0)
    versions, events = Versions({SOLVER: Version(0)}), RememberedEvents(now)
    pool = InferencePool({SOLVER: engines}, settings, respawn=respawn, events=events)
    publisher = Publisher(trainers={SOLVER: trainer}, pool=pool, objects=objects, versions=versions, events=events)
    return SimpleNamespace(**locals())


async def train(trainer):
    sample = Sample(turn=turn_of(0, 0, 0), advantage=1.0)
    batch = MicroBatch(micro_batch_id=f"b{trainer.version}", policy=SOLVER, samples=(sample,))
    await trainer.accumulate_batch(batch)
    return (await trainer.step(Divisors(num_tokens=2.0))).version


def test_all_instances_serve_the_version_before_publishing_returns_and_the_old_object_is_released():
    async def scenario():
        at = stage(ScriptedEngine, Late)
        async with at.pool.open():
            await at.publisher.publish(SOLVER, Version(0))
            await at.objects.get(ObjectKey("weights/solver/0"))
            await at.publisher.publish(SOLVER, await train(at.trainer))
            assert now() == 120.0
            assert [engine.version for engine in at.engines] == [1, 1]
            assert at.versions.served == {SOLVER: 1}
            await at.objects.get(ObjectKey("weights/solver/1"))
            with pytest.raises(KeyError, match=r"no object 'weights/solver/0'; there are: .'weights/solver/1'"):
                await at.objects.get(ObjectKey("weights/solver/0"))
        assert [event.version for event in at.events.of(Published)] == [0, 1]
        assert len({event.checksum for event in at.events.of(Published)}) == 2

    run_virtual(scenario())


def test_the_journal_tells_how_long_publishing_took_and_the_loads_of_each_instance():
    async def scenario():
        await asyncio.sleep(5)
        at = stage(ScriptedEngine, Late)
        async with at.pool.open():
            await at.publisher.publish(SOLVER, Version(0))
            await at.pool.generate(request("r", prompt=(5, 6)))
        (published,) = at.events.of(Published)
        assert (published.process, published.began, published.t) == ("controller", 5.0, 65.0)
        loads = {load.process: load for load in at.events.of(Loaded)}
        assert {name: (load.began, load.t) for name, load in loads.items()} == {
            "engine/solver/0": (5.0, 5.0),
            "engine/solver/1": (5.0, 65.0),
        }
        assert {load.checksum for load in loads.values()} == {published.checksum}
        (call,) = at.events.of(Called)
        assert (call.process, call.began, call.t) == ("engine/solver/0", 65.0, 65.2)
        assert (call.prompt_tokens, call.sampled_tokens, call.finish) == (2, 2, "stop")

    run_virtual(scenario())


def test_an_instance_that_holds_other_bytes_is_deregistered_and_the_rest_serve():
    async def scenario():
        at = stage(ScriptedEngine, Corrupt)
        async with at.pool.open():
            await at.publisher.publish(SOLVER, Version(0))
            assert list(await at.pool.usage()) == ["solver/0"]
        assert "but it holds torn" in at.pool.lost["solver/1"]
        assert at.versions.served == {SOLVER: 0}

    run_virtual(scenario())


def test_an_instance_that_misses_the_deadline_is_deregistered_and_replaced():
    async def scenario():
        at = stage(ScriptedEngine, TooLate, spare={"solver/2": ScriptedEngine})
        async with at.pool.open():
            await at.publisher.publish(SOLVER, Version(0))
            await at.publisher.publish(SOLVER, await train(at.trainer))
            assert now() == 120.0
            assert list(await at.pool.usage()) == ["solver/0"]
            await asyncio.sleep(11)
            assert {name: use.version for name, use in (await at.pool.usage()).items()} == {
                "solver/0": 1,
                "solver/2": 1,
            }
        (lost,) = at.events.of(InstanceLost)
        assert (lost.t, lost.instance) == (120.0, "solver/1")
        assert lost.because == "loading version 1 took more than 120.0 s"
        (replaced,) = at.events.of(InstanceReplaced)
        assert (replaced.began, replaced.t, replaced.process) == (120.0, 130.0, "engine/solver/2")
        assert (replaced.replaces, replaced.version) == ("solver/1", 1)

    run_virtual(scenario())


def test_a_replacement_gets_the_newest_weights_however_long_ago_they_were_published():
    async def scenario():
        at = stage(ScriptedEngine, spare={"solver/1": ScriptedEngine})
        async with at.pool.open():
            await at.publisher.publish(SOLVER, Version(0))
            await at.publisher.publish(SOLVER, await train(at.trainer))
            await asyncio.sleep(10_000)
            at.pool.lose(InstanceId("solver", 0), "killed")
            assert (await at.pool.generate(request("r", prompt=(5, 6)))).versions[0].version == 1

    run_virtual(scenario())


def test_a_version_that_nobody_holds_is_not_acknowledged():
    async def scenario():
        at = stage(Corrupt, spare={"solver/1": Corrupt})
        async with at.pool.open():
            version = await train(at.trainer)
            with pytest.raises(EngineError, match=r"no instance of .* version 1: solver/0: .* solver/1: "):
                await at.publisher.publish(SOLVER, version)
        assert at.versions.served == {SOLVER: 0}
        assert at.events.of(Published) == []

    run_virtual(scenario())
