"""New weights reach every instance, or the instance is given up."""

import asyncio
from types import SimpleNamespace

import pytest

from flexmarl.errors import EngineError
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.observability.journal import MemoryJournal
from flexmarl.orchestrator.publish import Publisher
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import Divisors, MicroBatch, PolicyName, Sample, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.run import ServedEngine, a_or_b, character_renderer
from flexmarl.testing.training import FakeTrainer
from tests.unit.orchestrator.groups import turn_of

SOLVER = PolicyName("solver")


class Corrupt(ServedEngine):
    """Holds other bytes than were published."""

    async def load_weights(self, policy, version, key):
        await super().load_weights(policy, version, key)
        return Checksum("torn")


class Late(ServedEngine):
    """Takes a minute to load."""

    async def load_weights(self, policy, version, key):
        await asyncio.sleep(60)
        return await super().load_weights(policy, version, key)


def stage(*kinds):
    objects = InlineObjectStore()
    engines = [
        kind(a_or_b, character_renderer(), objects, seconds_per_token=0.1, fails=lambda request: "") for kind in kinds
    ]
    trainer = FakeTrainer(SOLVER, objects)
    pool = InferencePool({SOLVER: engines})
    versions, journal = Versions({SOLVER: Version(0)}), MemoryJournal()
    publisher = Publisher(trainers={SOLVER: trainer}, pool=pool, objects=objects, versions=versions, journal=journal)
    return SimpleNamespace(**locals())


async def train(trainer):
    sample = Sample(turn=turn_of(0, 0, 0), advantage=1.0)
    batch = MicroBatch(micro_batch_id=f"b{trainer.version}", policy=SOLVER, samples=(sample,))
    await trainer.accumulate(batch)
    return await trainer.step(Divisors(num_tokens=2.0))


def test_all_instances_serve_the_version_before_publishing_returns_and_the_old_object_is_released():
    async def scenario():
        at = stage(ServedEngine, Late)
        async with at.pool:
            await at.publisher.publish(SOLVER, Version(0))
            await at.objects.get(ObjectKey("weights/solver/0"))
            await at.publisher.publish(SOLVER, await train(at.trainer))
            assert asyncio.get_running_loop().time() == 120.0
            assert [engine.version for engine in at.engines] == [1, 1]
            assert at.versions.served == {SOLVER: 1}
            await at.objects.get(ObjectKey("weights/solver/1"))
            with pytest.raises(KeyError, match=r"no object 'weights/solver/0'; there are: .'weights/solver/1'"):
                await at.objects.get(ObjectKey("weights/solver/0"))
        assert [event["version"] for event in at.journal.events("published")] == [0, 1]
        assert len({event["checksum"] for event in at.journal.events("published")}) == 2

    run_virtual(scenario())


def test_an_instance_that_holds_other_bytes_is_deregistered_and_the_rest_serve():
    async def scenario():
        at = stage(ServedEngine, Corrupt)
        async with at.pool:
            await at.publisher.publish(SOLVER, Version(0))
            assert list(await at.pool.usage()) == ["solver/0"]
        assert "but it holds torn" in at.pool.lost["solver/1"]
        assert at.versions.served == {SOLVER: 0}

    run_virtual(scenario())


def test_a_version_that_nobody_holds_is_not_acknowledged():
    async def scenario():
        at = stage(Corrupt)
        async with at.pool:
            version = await train(at.trainer)
            with pytest.raises(EngineError, match="no instance of 'solver' serves version 1"):
                await at.publisher.publish(SOLVER, version)
        assert at.versions.served == {SOLVER: 0}
        assert at.journal.events("published") == []

    run_virtual(scenario())
