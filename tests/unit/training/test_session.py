"""The training loop of one policy, in virtual time, on the real store and a trainer of one number."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TrainingError
from flexmarl.events.event import Events
from flexmarl.events.notices import RowsReady
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome
from flexmarl.experience.turn_rows import TURN_COLUMNS, closing_row, credit_row, open_row, response_row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import AgentName, Divisors, MicroBatch, PolicyName, RowState, Sample, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer, check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.interface import RowReader, StoreRows
from flexmarl.training.session import TrainingSession

SOLVER = PolicyName("solver")
AGENT = AgentName("solver")
Samples = Callable[..., list[Sample]]


def new_store() -> SqliteStore:
    return SqliteStore(agents=[AGENT], columns=TURN_COLUMNS)


async def make_ready(store: SqliteStore, samples: Sequence[Sample], *, open_group: str = "") -> None:
    for s in samples:
        turn = s.turn
        await store.put(AGENT, [response_row(turn), closing_row(turn.sample_id, SOLVER, reward=s.reward)])
        known = (
            open_row(replace(s, open_group=open_group)) if open_group else credit_row(replace(s, episode_tokens=1.0))
        )
        await store.put(AGENT, [known])
    await store.settle([s.turn.sample_id for s in samples], Outcome(state=RowState.READY))


def session_of(store: SqliteStore, trainer: FakeTrainer, events: Events | None = None) -> TrainingSession:
    trainer.rows = StoreRows(store)
    events = events or Events()
    return TrainingSession(SOLVER, store, trainer, micro_batch=4, version=Version(0), events=events)


def new_trainer(cost_s: float = 0.0, fail_on: Sequence[str] = ()) -> FakeTrainer:
    return FakeTrainer(SOLVER, InlineObjectStore(), sample_cost_s=cost_s, fail_on=frozenset(fail_on))


def now() -> float:
    return asyncio.get_running_loop().time()


def test_micro_batches_are_trained_while_rows_still_arrive(make_samples: Samples) -> None:
    samples = make_samples(0, 20, weights=(1.0,))[:10]

    async def collect(store: SqliteStore, session: TrainingSession, events: Events) -> None:
        for sample in samples:  # one row a second; a micro-batch of four costs two seconds
            await asyncio.sleep(1.0)
            await make_ready(store, [sample])
            events.emit(RowsReady(policies=frozenset({SOLVER})))
        session.close_step()

    async def check() -> None:
        store, trainer, reports, events = new_store(), new_trainer(cost_s=0.5), [], Events()
        events.listen(MicroBatchDone, lambda a: reports.append((a.began, a.ended, a.rows)))
        session = session_of(store, trainer, events)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.accumulate(), name="train")
            tasks.create_task(collect(store, session, events), name="collect")
        assert reports == [(4.0, 6.0, 4), (8.0, 10.0, 4), (10.0, 11.0, 2)]
        assert await store.counts(SOLVER) == {RowState.ACCUMULATED: 10}
        assert {row.cache for row in await store.get([s.turn.sample_id for s in samples])} == {"solver/0"}

        await session.finish(divisors_of(samples))
        assert session.version == 1
        assert await store.counts(SOLVER) == {RowState.TRAINED: 10}
        assert {row.settled_version for row in await store.get([s.turn.sample_id for s in samples])} == {1}
        expected = sum(s.weight * s.advantage * s.num_tokens for s in samples) / divisors_of(samples).num_tokens
        assert trainer.weight == pytest.approx(expected, rel=1e-12)

    run_virtual(check())


@given(seed=st.integers(0, 1000), data=st.data())
@settings(max_examples=20, deadline=None)
def test_every_ready_row_enters_exactly_one_update_whenever_it_arrives(
    make_samples: Samples, seed: int, data: st.DataObject
) -> None:
    samples = make_samples(seed, 8, weights=(1.0,), empty=0.0)
    arrivals = data.draw(st.lists(st.floats(0, 5), min_size=len(samples), max_size=len(samples)))
    cost_s = data.draw(st.sampled_from([0.0, 0.1, 1.0]))

    async def arrive(store: SqliteStore, events: Events, sample: Sample, at: float) -> None:
        await asyncio.sleep(at)
        await make_ready(store, [sample])
        events.emit(RowsReady(policies=frozenset({SOLVER})))

    async def collect(store: SqliteStore, session: TrainingSession, events: Events) -> None:
        async with asyncio.TaskGroup() as tasks:
            for sample, at in zip(samples, arrivals, strict=True):
                tasks.create_task(arrive(store, events, sample, at))
        session.close_step()

    async def check() -> None:
        store, trainer, events = new_store(), new_trainer(cost_s), Events()
        session = session_of(store, trainer, events)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(session.accumulate())
            tasks.create_task(collect(store, session, events))
        await session.finish(divisors_of(samples))
        trained = [s.turn.sample_id for batch in trainer.accumulated for s in batch.samples]
        assert sorted(trained) == sorted(s.turn.sample_id for s in samples)

    run_virtual(check())


def test_a_session_is_woken_by_rows_of_its_own_policy_alone(make_samples: Samples) -> None:
    async def check() -> None:
        store, events = new_store(), Events()
        session = session_of(store, new_trainer(), events)
        training = asyncio.create_task(session.accumulate(), name="train")
        await asyncio.sleep(1.0)
        await make_ready(store, make_samples(1, 4, weights=(1.0,), empty=0.0))
        events.emit(RowsReady(policies=frozenset({PolicyName("verifier")})))
        await asyncio.sleep(1.0)
        assert RowState.ACCUMULATED not in await store.counts(SOLVER)
        events.emit(RowsReady(policies=frozenset({SOLVER})))
        await asyncio.sleep(1.0)
        assert (await store.counts(SOLVER))[RowState.ACCUMULATED] >= 4
        session.close_step()
        await training

    run_virtual(check())


def test_micro_batch_ids_are_unique_and_the_same_in_every_run(make_samples: Samples) -> None:
    async def ids() -> list[str]:
        store, trainer = new_store(), new_trainer()
        session = session_of(store, trainer)
        rows = make_samples(1, 20, weights=(1.0,), empty=0.0)
        for samples in (rows[:6], rows[6:12]):
            await make_ready(store, samples)
            session.close_step()
            await session.accumulate()
            await session.finish(divisors_of(samples))
        return [batch.micro_batch_id for batch in trainer.accumulated]

    assert run_virtual(ids()) == run_virtual(ids()) == ["solver/0/0", "solver/0/1", "solver/1/0", "solver/1/1"]


def test_rows_of_a_failed_micro_batch_are_ready_again(make_samples: Samples) -> None:
    async def check() -> None:
        store, trainer = new_store(), new_trainer(fail_on=["solver/0/1"])
        session = session_of(store, trainer)
        samples = make_samples(2, 20, weights=(1.0,))[:8]
        await make_ready(store, samples)
        session.close_step()
        with pytest.raises(TrainingError, match="accumulating micro-batch solver/0/1: RuntimeError: scripted failure"):
            await session.accumulate()
        assert await store.counts(SOLVER) == {RowState.ACCUMULATED: 4, RowState.READY: 4}

        await session.accumulate()  # the same rows go in under a new id
        assert [batch.micro_batch_id for batch in trainer.accumulated] == ["solver/0/0", "solver/0/2"]
        await session.finish(divisors_of(samples))
        assert session.version == 1

    run_virtual(check())


def test_rows_of_a_cancelled_micro_batch_are_ready_again(make_samples: Samples) -> None:
    async def check() -> None:
        store = new_store()
        session = session_of(store, new_trainer(cost_s=10.0))
        await make_ready(store, make_samples(3, 20)[:4])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await session.accumulate()
        assert await store.counts(SOLVER) == {RowState.READY: 4}

    run_virtual(check())


def test_a_step_without_rows_makes_no_update() -> None:
    async def check() -> None:
        trainer = new_trainer()
        session = session_of(new_store(), trainer)
        session.close_step()
        await session.accumulate()
        await session.finish(Divisors())
        assert session.version == 0
        assert trainer.version == 0

    run_virtual(check())


def test_rows_that_the_divisors_do_not_count_are_an_error(make_samples: Samples) -> None:
    async def check() -> None:
        store = new_store()
        session = session_of(store, new_trainer())
        samples = make_samples(4, 20, weights=(1.0,), empty=0.0)[:8]
        await make_ready(store, samples)
        session.close_step()
        await session.accumulate()
        with pytest.raises(TrainingError, match="weighted tokens were accumulated, but the step's divisors count"):
            await session.finish(divisors_of(samples[:-1]))

    run_virtual(check())


def test_the_fake_trainer_keeps_the_contract(make_samples: Samples, tmp_path: Path) -> None:
    samples = make_samples(5)
    batches = [
        MicroBatch(micro_batch_id=f"mb/{i}", policy=SOLVER, samples=tuple(part))
        for i, part in enumerate((samples[:3], samples[3:]))
    ]

    def make(objects: ObjectStore, rows: RowReader) -> FakeTrainer:
        return FakeTrainer(SOLVER, objects, rows=rows, sample_cost_s=1.0)

    run_virtual(check_trainer(make, batches, tmp_path))
