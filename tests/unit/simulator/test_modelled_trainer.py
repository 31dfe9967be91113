"""The trainer of one number: what its work costs, and how it dies."""

import asyncio
from pathlib import Path

import pytest

from flexmarl.analysis.costs import SharedHost, TrainerCosts
from flexmarl.cluster.allocation import Lease
from flexmarl.errors import CheckpointError, TrainingError, WorkerError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import MicroBatch, PolicyName, Sample, Version
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup, ModelledTrainer
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import check_process_group, check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.interface import RowReader
from tests.unit.training.conftest import random_samples

SOLVER = PolicyName("solver")
COSTS = TrainerCosts(
    micro_batch_s=1.0, sample_s=0.5, token_s=0.01, update_s=3.0, publish_s=2.0, resume_s=4.0, suspend_s=6.0
)


def new_trainer(**more) -> ModelledTrainer:
    return ModelledTrainer(SOLVER, COSTS, InlineObjectStore(), **more)


def batch_of(samples: list[Sample], name: str = "mb/0") -> MicroBatch:
    return MicroBatch(micro_batch_id=name, policy=SOLVER, samples=tuple(samples))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_it_keeps_the_contract(tmp_path: Path) -> None:
    samples = random_samples(5)
    batches = [batch_of(samples[:3], "mb/0"), batch_of(samples[3:], "mb/1")]

    def make(objects: ObjectStore, rows: RowReader) -> ModelledTrainer:
        return ModelledTrainer(SOLVER, COSTS, objects, rows=rows)

    run_virtual(check_trainer(make, batches, tmp_path))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"weight": 1, "version": 2}'])
def test_a_damaged_checkpoint_is_an_error_that_names_the_policy(tmp_path: Path, text: str) -> None:
    (tmp_path / "trainer.json").write_text(text)
    with pytest.raises(CheckpointError, match="policy 'solver': loading"):
        run_virtual(new_trainer().load(tmp_path))


def test_its_process_group_keeps_the_contract() -> None:
    def make(objects: ObjectStore, rows: RowReader) -> tuple[ModelledTrainer, ModelledProcessGroup]:
        trainer = ModelledTrainer(SOLVER, COSTS, objects, rows=rows)
        return trainer, ModelledProcessGroup(trainer)

    samples = random_samples(5)
    run_virtual(check_process_group(make, [batch_of(samples[:3], "mb/0"), batch_of(samples[3:], "mb/1")]))


def test_the_suite_notices_a_group_that_forgets_its_gradient_sums() -> None:
    class Forgetful(ModelledProcessGroup):
        async def suspend(self) -> None:
            await super().suspend()
            self._trainer.lose_cache()

    def make(objects: ObjectStore, rows: RowReader) -> tuple[ModelledTrainer, ModelledProcessGroup]:
        trainer = ModelledTrainer(SOLVER, COSTS, objects, rows=rows)
        return trainer, Forgetful(trainer)

    samples = random_samples(5)
    with pytest.raises(TrainingError, match="weighted tokens are in the gradient cache"):
        run_virtual(check_process_group(make, [batch_of(samples[:3], "mb/0"), batch_of(samples[3:], "mb/1")]))


def test_work_takes_what_its_costs_say_and_reports_it() -> None:
    samples = random_samples(0, weights=(1.0,))[:4]
    tokens = sum(len(s.turn.prompt_ids) + s.num_tokens for s in samples)

    async def scenario() -> None:
        trainer = new_trainer()
        report = await trainer.accumulate_batch(batch_of(samples))
        assert report.duration_s == now() == pytest.approx(1.0 + 4 * 0.5 + 0.01 * tokens)
        before = now()
        update = await trainer.step(divisors_of(samples))
        assert now() == before + 3.0
        assert update.duration_s == 3.0
        await trainer.publish(Version(1))
        assert now() == before + 5.0
        assert trainer.busy_s == before + 3.0

    run_virtual(scenario())


def test_on_a_shared_machine_it_takes_longer_and_is_seen() -> None:
    async def scenario() -> None:
        host = CpuShare(SharedHost(trainer_per_engine=0.5, trainer_per_trainer=0.25, engine_per_trainer=1.0))
        host.engine_busy(lambda: None)
        trainer, empty = new_trainer(host=host), batch_of([])
        work = asyncio.create_task(trainer.accumulate_batch(empty))
        await asyncio.sleep(0)
        assert host.engine_factor() == 2.0
        other = asyncio.create_task(new_trainer(host=host).accumulate_batch(empty))
        assert (await work).duration_s == trainer.busy_s == now() == 1.5
        assert (await other).duration_s == now() == 1.75
        assert host.engine_factor() == 1.0

    run_virtual(scenario())


def test_every_version_has_a_checksum_of_its_own_though_the_weight_stays() -> None:
    samples = random_samples(0, weights=(1.0,), zero_advantages=1.0, empty=0.0)[:2]

    async def scenario() -> None:
        trainer = new_trainer()
        first = await trainer.publish(Version(0))
        await trainer.accumulate_batch(batch_of(samples))
        await trainer.step(divisors_of(samples))
        assert trainer.weight == 0.0
        assert await trainer.publish(Version(1)) != first

    run_virtual(scenario())


def test_a_death_fails_the_call_that_runs_and_every_later_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = new_trainer()
        work = asyncio.create_task(trainer.accumulate_batch(batch_of(random_samples(0)[:2])))
        await asyncio.sleep(1.0)
        trainer.fail("its machine lost power")
        for call in (work, trainer.publish(Version(0)), trainer.save(tmp_path)):
            with pytest.raises(WorkerError, match="trainer/solver died: its machine lost power"):
                await call
        assert now() == 1.0
        assert trainer.busy_s == 0.0

    run_virtual(scenario())


def test_a_lost_gradient_cache_is_missed_by_the_update() -> None:
    async def scenario() -> None:
        samples = random_samples(0, weights=(1.0,), empty=0.0)
        trainer = new_trainer()
        await trainer.accumulate_batch(batch_of(samples[:2], "mb/0"))
        trainer.lose_cache()
        await trainer.accumulate_batch(batch_of(samples[2:4], "mb/1"))
        with pytest.raises(TrainingError, match="weighted tokens are in the gradient cache, nothing to update from"):
            await trainer.step(divisors_of(samples[:4]))
        assert trainer.version == 0

    run_virtual(scenario())


def test_set_aside_it_can_be_saved_but_not_trained(tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = new_trainer()
        group = ModelledProcessGroup(trainer)
        with pytest.raises(TrainingError, match="policy 'solver' holds no devices; resume its process group first"):
            await trainer.accumulate_batch(batch_of(random_samples(0)))
        await trainer.save(tmp_path)
        await group.resume(Lease(place=0, holder=SOLVER, because="nobody has been there"))
        assert now() == 4.0
        await trainer.accumulate_batch(batch_of([]))
        await group.suspend()
        assert now() == 4.0 + 1.0 + 6.0
        with pytest.raises(TrainingError, match="holds no devices"):
            await trainer.step(divisors_of(random_samples(0)))

    run_virtual(scenario())
