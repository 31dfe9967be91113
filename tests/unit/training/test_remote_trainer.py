"""A trainer in another process, seen through a worker."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.credit.estimators.group_relative import Line
from flexmarl.errors import StoreError, TrainingError
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.divisors import divisors_of
from flexmarl.experience.rows import TURN_COLUMNS, credit_row
from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import AgentName, MicroBatch, PolicyName, RowState, Sample, SampleId, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer, check_trainer
from flexmarl.training.backends.host import TrainerHost, host_trainer
from flexmarl.training.backends.remote import RemoteTrainer
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import Accumulated
from flexmarl.training.session import TrainingSession
from flexmarl.training.settings import AdamWSettings, TrainingSettings
from tests.unit.training.conftest import tiny_model
from tests.unit.training.test_session import make_ready
from tests.unit.workers import LocalWorker

SOLVER = PolicyName("solver")
AGENT = AgentName("solver")
NAME = "trainer/solver"
DOUBLE = TrainingSettings(dtype="float64", optimizer=AdamWSettings(learning_rate=1e-2))
Samples = Callable[..., list[Sample]]


def new_store() -> SqliteStore:
    return SqliteStore(agents=[AgentName("solver")], columns=TURN_COLUMNS)


def micro_batches(*parts: Sequence[Sample]) -> list[MicroBatch]:
    return [MicroBatch(micro_batch_id=f"mb/{i}", policy=SOLVER, samples=tuple(p)) for i, p in enumerate(parts)]


class Hosted:
    """A trainer of one number in a worker, beside a store that the worker shares with the test."""

    def __init__(self, cost_s: float = 0.0, fail_on: Sequence[str] = (), latency_s: float = 0.0) -> None:
        self.store = new_store()
        self.fake = FakeTrainer(SOLVER, InlineObjectStore(), sample_cost_s=cost_s, fail_on=frozenset(fail_on))
        self.worker = LocalWorker(dict, name=NAME, latency_s=latency_s)
        self.worker.hosted = TrainerHost(self.fake, self.store, SOLVER)
        self.trainer = RemoteTrainer(self.worker, SOLVER)

    def session(self, on_report: Callable[[Accumulated], None] = lambda _: None) -> TrainingSession:
        return TrainingSession(
            SOLVER,
            self.store,
            self.trainer,
            micro_batch=4,
            version=Version(0),
            accumulate=self.trainer.accumulate_rows,
            on_report=on_report,
        )


def test_a_real_trainer_conforms_through_its_worker(make_samples: Samples, tmp_path: Path) -> None:
    samples = make_samples(5)
    threads: list[DeviceThread] = []

    def real_trainer(objects: ObjectStore, thread: DeviceThread) -> SingleProcessTrainer:
        threads.append(thread)
        return SingleProcessTrainer(SOLVER, tiny_model(), DOUBLE, objects, thread=thread)

    def make_trainer(objects: ObjectStore) -> RemoteTrainer:
        worker = LocalWorker(dict, name=NAME)
        worker.hosted = host_trainer(policy=SOLVER, make_trainer=partial(real_trainer, objects), open_store=new_store)
        return RemoteTrainer(worker, SOLVER)

    try:
        asyncio.run(check_trainer(make_trainer, micro_batches(samples[:3], samples[3:]), tmp_path))
    finally:
        for thread in threads:
            thread.close()


def test_the_trainer_reads_its_rows_where_it_is_and_only_ids_cross(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted, samples = Hosted(), make_samples(0, 20, weights=(1.0,))[:10]
        session = hosted.session()
        await make_ready(hosted.store, samples)
        session.close_step()
        await session.accumulate()
        assert set(hosted.worker.calls) == {"accumulate_rows"}
        assert await session.finish(divisors_of(samples)) == 1
        assert await hosted.store.counts(SOLVER) == {RowState.TRAINED: 10}
        expected = sum(s.weight * s.advantage * s.num_tokens for s in samples) / divisors_of(samples).num_tokens
        assert hosted.fake.weight == pytest.approx(expected, rel=1e-12)
        assert hosted.trainer.last_update == hosted.fake.last_update

    run_virtual(scenario())


def test_the_next_micro_batch_is_there_when_the_trainer_has_ended_one(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted, times = Hosted(cost_s=1.0, latency_s=0.5), []
        session = hosted.session(lambda a: times.append((a.began, a.ended)))
        await make_ready(hosted.store, make_samples(0, 20)[:14])
        session.close_step()
        await session.accumulate()
        assert times == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0), (13.0, 15.0)], "crossings take half a second each"

    run_virtual(scenario())


def test_micro_batches_that_end_while_a_group_is_closed_are_counted(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted = Hosted(cost_s=1.0, latency_s=0.5)
        samples = [sample for sample in make_samples(0, 40, weights=(1.0,)) if sample.num_tokens][:12]
        first, others = samples[:4], samples[4:]
        session = hosted.session()
        await make_ready(hosted.store, first, open_group="g")
        await make_ready(hosted.store, others)
        session.close_step()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.accumulate())
            await asyncio.sleep(2.0)
            line = Line(baseline=0.5, divisor=2.0)
            await session.close_group("g", [sample.turn.sample_id for sample in first], line)
        assert await session.finish(divisors_of(samples)) == 1
        advantages = [line.scale * sample.advantage + line.offset for sample in first]
        advantages += [sample.advantage for sample in others]
        expected = sum(a * s.num_tokens for a, s in zip(advantages, samples, strict=True))
        assert hosted.fake.weight == pytest.approx(expected / divisors_of(samples).num_tokens, rel=1e-12)

    run_virtual(scenario())


@given(
    closings=st.lists(
        st.tuples(st.floats(0, 12), st.sampled_from([Line(0.5, 2.0), Line(0.25, 1.0), None])), max_size=4
    ),
    opened=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    latency_s=st.sampled_from([0.0, 0.3, 0.5]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_of_open_groups_are_counted_once_or_dropped_whenever_their_groups_close(
    make_samples: Samples, closings: list[tuple[float, Line | None]], opened: list[int], latency_s: float
) -> None:
    samples = [sample for sample in make_samples(3, 40, weights=(1.0,)) if sample.num_tokens][:14]
    members = {n: [s for s, of in zip(samples, opened, strict=True) if of == n] for n in range(len(closings))}

    async def scenario() -> None:
        hosted = Hosted(cost_s=0.5, latency_s=latency_s)
        session = hosted.session()
        kept = [s for s, of in zip(samples, opened, strict=True) if of >= len(closings)]
        await make_ready(hosted.store, kept)
        for n, of_group in members.items():
            await make_ready(hosted.store, of_group, open_group=f"g{n}")

        async def close(n: int, after_s: float, line: Line | None) -> None:
            await asyncio.sleep(after_s)
            ids = [sample.turn.sample_id for sample in members[n]]
            if line is not None:
                credited = [replace(s, advantage=line.scale * s.advantage + line.offset) for s in members[n]]
                kept.extend(credited)
                await hosted.store.put(AGENT, [credit_row(replace(s, episode_tokens=1.0)) for s in credited])
            await session.close_group(f"g{n}", ids, line, "dropped")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.accumulate())
            async with asyncio.TaskGroup() as closing:
                for n, (after_s, line) in enumerate(closings):
                    closing.create_task(close(n, after_s, line))
            session.close_step()
        assert await session.finish(divisors_of(kept)) == (1 if kept else 0)
        dropped = len(samples) - len(kept)
        counts = {RowState.TRAINED: len(kept), RowState.FILTERED: dropped}
        assert await hosted.store.counts(SOLVER) == {state: count for state, count in counts.items() if count}
        expected = sum(s.advantage * s.num_tokens for s in kept) / (divisors_of(kept).num_tokens or 1)
        assert hosted.fake.weight == pytest.approx(expected, rel=1e-9, abs=1e-12)

    run_virtual(scenario())


def test_a_failed_micro_batch_gives_back_its_rows_and_not_those_of_the_next_which_is_accumulated(
    make_samples: Samples,
) -> None:
    async def scenario() -> None:
        hosted, samples = Hosted(cost_s=1.0, fail_on=["solver/0/0"]), make_samples(1, 20, weights=(1.0,))[:12]
        session = hosted.session()
        await make_ready(hosted.store, samples)
        session.close_step()
        with pytest.raises(TrainingError, match="accumulating micro-batch solver/0/0: RuntimeError: scripted failure"):
            await session.accumulate()
        assert await hosted.store.counts(SOLVER) == {RowState.READY: 8, RowState.ACCUMULATED: 4}

        await session.accumulate()
        assert [b.micro_batch_id for b in hosted.fake.accumulated] == [f"solver/0/{i}" for i in (1, 2, 3)]
        await session.finish(divisors_of(samples))
        expected = sum(s.weight * s.advantage * s.num_tokens for s in samples) / divisors_of(samples).num_tokens
        assert hosted.fake.weight == pytest.approx(expected, rel=1e-12)

    run_virtual(scenario())


def test_rows_of_cancelled_micro_batches_are_ready_again(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted = Hosted(cost_s=1.0)
        session = hosted.session()
        await make_ready(hosted.store, make_samples(2, 20)[:12])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.5):
                await session.accumulate()
        assert await hosted.store.counts(SOLVER) == {RowState.READY: 8, RowState.ACCUMULATED: 4}
        with pytest.raises(TrainingError, match=r"micro-batch solver/0/[12] was cancelled.*--resume"):
            await session.accumulate()

    run_virtual(scenario())


def test_a_trainer_whose_process_dies_says_so_and_how_to_go_on(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted = Hosted(cost_s=1.0)
        session = hosted.session()
        await make_ready(hosted.store, make_samples(1, 20)[:4])
        session.close_step()
        training = asyncio.create_task(session.accumulate())
        await asyncio.sleep(1.5)
        hosted.worker.die()
        with pytest.raises(TrainingError, match=r"policy 'solver'.*process died.*died in accumulate_rows.*--resume"):
            await training
        assert await hosted.store.counts(SOLVER) == {RowState.READY: 4}

    run_virtual(scenario())


def test_errors_of_trainer_and_store_come_back_as_themselves(make_samples: Samples) -> None:
    async def scenario() -> None:
        hosted = Hosted(fail_on=["mb/0"])
        with pytest.raises(RuntimeError, match="scripted failure on mb/0"):
            await hosted.trainer.accumulate(micro_batches(make_samples(2))[0])
        with pytest.raises(StoreError, match="nobody"):
            await hosted.trainer.accumulate_rows("mb/1", [SampleId("nobody_0_g0e0a0")])
        with pytest.raises(TrainingError, match="nothing to update from"):
            await hosted.trainer.step(divisors_of([]))

    run_virtual(scenario())


def test_after_a_cancelled_micro_batch_the_trainer_refuses_to_go_on_until_it_is_loaded(
    make_samples: Samples, tmp_path: Path
) -> None:
    async def scenario() -> None:
        hosted = Hosted(cost_s=1.0)
        first, second = micro_batches(make_samples(3)[:3], make_samples(3)[3:])
        await hosted.trainer.save(tmp_path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await hosted.trainer.accumulate(first)
        with pytest.raises(TrainingError, match=r"micro-batch mb/0 was cancelled.*--resume"):
            await hosted.trainer.accumulate(second)
        assert await hosted.trainer.load(tmp_path) == 0
        assert [b.micro_batch_id for b in hosted.fake.accumulated] == ["mb/0"], (
            "the work was not cancelled, and loading waited for its end"
        )
        await hosted.trainer.accumulate(second)
        await hosted.trainer.step(divisors_of(second.samples))
        assert hosted.trainer.last_update is not None
        assert hosted.trainer.last_update.num_samples == len(second.samples)

    run_virtual(scenario())
