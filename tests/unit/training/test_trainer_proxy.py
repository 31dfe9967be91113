"""A trainer that lives elsewhere, called through its proxy."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.inproc import InprocResident, inproc_cluster
from flexmarl.errors import StoreError, TrainingError
from flexmarl.events.event import Events
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.turn_rows import TURN_COLUMNS, credit_row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import AgentName, CreditLine, MicroBatch, PolicyName, RowState, Sample, SampleId, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer, accumulate, check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import HeldRows, RowReader, StoreRows, Trainer
from flexmarl.training.session import TrainingSession
from flexmarl.training.settings import AdamWSettings, TrainingSettings
from tests.unit.hosted import resident_of, trainer_spec
from tests.unit.training.conftest import tiny_model
from tests.unit.training.test_session import make_ready

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
    """A trainer of one number in a resident, beside a store that the resident shares with the test."""

    def __init__(self, resident: InprocResident[Trainer], store: SqliteStore, fake: FakeTrainer) -> None:
        self.resident, self.store, self.fake = resident, store, fake
        self.trainer = resident.remote

    def session(self, hear: Callable[[MicroBatchDone], None] = lambda _: None) -> TrainingSession:
        events = Events()
        events.listen(MicroBatchDone, hear)
        return TrainingSession(
            SOLVER, self.store, self.trainer, micro_batch=4, version=Version(0), ahead=True, events=events
        )


@asynccontextmanager
async def hosting(
    cost_s: float = 0.0, fail_on: Sequence[str] = (), latency_s: float = 0.0, rows: RowReader | None = None
) -> AsyncIterator[Hosted]:
    store = new_store()
    fake = FakeTrainer(
        SOLVER,
        InlineObjectStore(),
        sample_cost_s=cost_s,
        fail_on=frozenset(fail_on),
        rows=rows or StoreRows(store),
    )
    async with resident_of(trainer_spec(lambda: fake), latency_s=latency_s) as resident:
        yield Hosted(resident, store, fake)


def test_a_real_trainer_conforms_through_its_worker(make_samples: Samples, tmp_path: Path) -> None:
    samples, numbers = make_samples(5), itertools.count()

    async def scenario() -> None:
        thread = DeviceThread()
        async with inproc_cluster(crosses=True) as cluster:

            async def make_trainer(objects: ObjectStore, rows: RowReader) -> Trainer:
                make = partial(SingleProcessTrainer, SOLVER, tiny_model(), DOUBLE, objects, thread=thread, rows=rows)
                (resident,) = await cluster.spawn([trainer_spec(make, str(next(numbers)))])
                return resident.remote

            await check_trainer(make_trainer, micro_batches(samples[:3], samples[3:]), tmp_path)
        thread.close()

    asyncio.run(scenario())


def test_the_trainer_reads_its_rows_where_it_is_and_only_ids_cross(make_samples: Samples) -> None:
    async def scenario() -> None:
        samples = make_samples(0, 20, weights=(1.0,))[:10]
        async with hosting() as hosted:
            session = hosted.session()
            await make_ready(hosted.store, samples)
            session.close_step()
            await session.accumulate()
            assert set(hosted.resident.crossings) == {"accumulate"}
            update = await session.finish(divisors_of(samples))
            assert session.version == 1
            assert await hosted.store.counts(SOLVER) == {RowState.TRAINED: 10}
            expected = sum(s.weight * s.advantage * s.num_tokens for s in samples) / divisors_of(samples).num_tokens
            assert hosted.fake.weight == pytest.approx(expected, rel=1e-12)
            assert update is not None
            assert (update.version, update.num_samples, update.loss) == (1, 10, -hosted.fake.weight)

    run_virtual(scenario())


def test_the_next_micro_batch_is_there_when_the_trainer_has_ended_one(make_samples: Samples) -> None:
    async def scenario() -> None:
        times = []
        async with hosting(cost_s=1.0, latency_s=0.5) as hosted:
            session = hosted.session(lambda a: times.append((a.began, a.ended)))
            await make_ready(hosted.store, make_samples(0, 20)[:14])
            session.close_step()
            await session.accumulate()
            assert times == [(1.0, 5.0), (5.0, 9.0), (9.0, 13.0), (13.0, 15.0)], "crossings take half a second each"

    run_virtual(scenario())


def test_micro_batches_that_end_while_a_group_is_closed_are_counted(make_samples: Samples) -> None:
    async def scenario() -> None:
        async with hosting(cost_s=1.0, latency_s=0.5) as hosted:
            samples = [sample for sample in make_samples(0, 40, weights=(1.0,)) if sample.num_tokens][:12]
            first, others = samples[:4], samples[4:]
            session = hosted.session()
            await make_ready(hosted.store, first, open_group="g")
            await make_ready(hosted.store, others)
            session.close_step()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(session.accumulate())
                await asyncio.sleep(2.0)
                line = CreditLine(baseline=0.5, divisor=2.0)
                await session.close_group("g", [sample.turn.sample_id for sample in first], line)
            await session.finish(divisors_of(samples))
            assert session.version == 1
            advantages = [line.scale * sample.advantage + line.offset for sample in first]
            advantages += [sample.advantage for sample in others]
            expected = sum(a * s.num_tokens for a, s in zip(advantages, samples, strict=True))
            assert hosted.fake.weight == pytest.approx(expected / divisors_of(samples).num_tokens, rel=1e-12)

    run_virtual(scenario())


@given(
    closings=st.lists(
        st.tuples(st.floats(0, 12), st.sampled_from([CreditLine(0.5, 2.0), CreditLine(0.25, 1.0), None])), max_size=4
    ),
    opened=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    latency_s=st.sampled_from([0.0, 0.3, 0.5]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_rows_of_open_groups_are_counted_once_or_dropped_whenever_their_groups_close(
    make_samples: Samples, closings: list[tuple[float, CreditLine | None]], opened: list[int], latency_s: float
) -> None:
    samples = [sample for sample in make_samples(3, 40, weights=(1.0,)) if sample.num_tokens][:14]
    members = {n: [s for s, of in zip(samples, opened, strict=True) if of == n] for n in range(len(closings))}

    async def scenario() -> None:
        async with hosting(cost_s=0.5, latency_s=latency_s) as hosted:
            session = hosted.session()
            kept = [s for s, of in zip(samples, opened, strict=True) if of >= len(closings)]
            await make_ready(hosted.store, kept)
            for n, of_group in members.items():
                await make_ready(hosted.store, of_group, open_group=f"g{n}")

            async def close(n: int, after_s: float, line: CreditLine | None) -> None:
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
            await session.finish(divisors_of(kept))
            assert session.version == (1 if kept else 0)
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
        samples = make_samples(1, 20, weights=(1.0,))[:12]
        async with hosting(cost_s=1.0, fail_on=["solver/0/0"]) as hosted:
            session = hosted.session()
            await make_ready(hosted.store, samples)
            session.close_step()
            failure = "accumulating micro-batch solver/0/0: RuntimeError: scripted failure"
            with pytest.raises(TrainingError, match=failure):
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
        async with hosting(cost_s=1.0) as hosted:
            session = hosted.session()
            await make_ready(hosted.store, make_samples(2, 20)[:12])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5.5):
                    await session.accumulate()
            assert await hosted.store.counts(SOLVER) == {RowState.READY: 8, RowState.ACCUMULATED: 4}
            with pytest.raises(TrainingError, match=r"'accumulate' of solver/0/[12] was cancelled.*--resume"):
                await session.accumulate()

    run_virtual(scenario())


def test_a_trainer_whose_process_dies_says_so_and_how_to_go_on(make_samples: Samples) -> None:
    async def scenario() -> None:
        async with hosting(cost_s=1.0) as hosted:
            session = hosted.session()
            await make_ready(hosted.store, make_samples(1, 20)[:4])
            session.close_step()
            training = asyncio.create_task(session.accumulate())
            await asyncio.sleep(1.5)
            hosted.resident.die()
            loss = r"trainer/solver: it was lost in 'accumulate'.*died: was killed.*--resume"
            with pytest.raises(TrainingError, match=loss):
                await training
            assert await hosted.store.counts(SOLVER) == {RowState.READY: 4}

    run_virtual(scenario())


def test_errors_of_trainer_and_store_come_back_as_themselves(make_samples: Samples) -> None:
    async def scenario() -> None:
        batch, rows = micro_batches(make_samples(2))[0], HeldRows(make_samples(2))
        async with hosting(fail_on=["mb/0"], rows=rows) as hosted:
            with pytest.raises(RuntimeError, match="scripted failure on mb/0"):
                await accumulate(hosted.trainer, batch)
            with pytest.raises(StoreError, match="nobody"):
                await hosted.trainer.accumulate("mb/1", [SampleId("nobody_0_g0e0a0")])
            with pytest.raises(TrainingError, match="nothing to update from"):
                await hosted.trainer.step(divisors_of([]))

    run_virtual(scenario())


def test_after_a_cancelled_micro_batch_the_trainer_refuses_to_go_on_until_it_is_loaded(
    make_samples: Samples, tmp_path: Path
) -> None:
    async def scenario() -> None:
        first, second = micro_batches(make_samples(3)[:3], make_samples(3)[3:])
        async with hosting(cost_s=1.0, rows=HeldRows(make_samples(3))) as hosted:
            await hosted.trainer.save(tmp_path)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.5):
                    await accumulate(hosted.trainer, first)
            with pytest.raises(TrainingError, match=r"'accumulate' of mb/0 was cancelled.*--resume"):
                await accumulate(hosted.trainer, second)
            assert await hosted.trainer.load(tmp_path) == 0
            assert [b.micro_batch_id for b in hosted.fake.accumulated] == ["mb/0"], (
                "the work was not cancelled, and loading waited for its end"
            )
            await accumulate(hosted.trainer, second)
            update = await hosted.trainer.step(divisors_of(second.samples))
            assert update.num_samples == len(second.samples)

    run_virtual(scenario())
