"""The training loop while calls of the store overtake one another, and credit groups are closed in the meantime."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TrainingError
from flexmarl.events.event import Events
from flexmarl.events.notices import RowsReady
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome
from flexmarl.experience.turn_rows import TURN_COLUMNS, credit_row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import AgentName, CreditLine, Divisors, PolicyName, RowState, Sample, SampleId, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.faults.faulty import Around, AroundStore, SlowStore
from flexmarl.testing.training import FakeTrainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.interface import StoreRows
from flexmarl.training.session import TrainingSession
from tests.unit.training.test_session import make_ready

SOLVER, AGENT = PolicyName("solver"), AgentName("solver")
LINE = CreditLine(baseline=0.5, divisor=2.0)
Samples = Callable[..., list[Sample]]


class Slow:
    """A session on a store whose calls take up to `longest_s` seconds; `store` is the same one without delays."""

    def __init__(
        self,
        kind: Callable[[Any], Any] = lambda store: store,
        *,
        longest_s: float = 0.0,
        seed: int = 0,
        micro_batch: int = 2,
        fail_on: frozenset[str] = frozenset(),
    ) -> None:
        self.store = SqliteStore(agents=[AGENT], columns=TURN_COLUMNS)
        self.trainer = FakeTrainer(SOLVER, InlineObjectStore(), sample_cost_s=0.05, fail_on=fail_on)
        slow = kind(SlowStore(self.store, longest_s=longest_s, random=Random(seed)))
        self.trainer.rows = StoreRows(slow)
        self.events = Events()
        self.session = TrainingSession(
            SOLVER, slow, self.trainer, micro_batch=micro_batch, version=Version(0), events=self.events
        )

    async def close(self, name: str, members: Sequence[Sample], line: CreditLine | None) -> list[Sample]:
        """Closes a credit group; the samples that count, with their advantages."""
        scale, offset = (line.scale, line.offset) if line else (0.0, 0.0)
        counted = [replace(s, advantage=scale * s.advantage + offset) for s in members] if line else []
        await self.store.put(AGENT, [credit_row(replace(s, episode_tokens=1.0)) for s in counted])
        await self.session.close_group(name, [s.turn.sample_id for s in members], line, "dropped")
        return counted

    async def step(
        self, groups: Sequence[tuple[str, Sequence[Sample], float, float, CreditLine | None]]
    ) -> list[Sample]:
        """One step of open groups: name, members, when they are READY, when the group closes, and its line."""
        kept: list[Sample] = []

        async def play(
            name: str, members: Sequence[Sample], ready_s: float, after_s: float, line: CreditLine | None
        ) -> None:
            await asyncio.sleep(ready_s)
            await make_ready(self.store, members, open_group=name)
            self.events.emit(RowsReady(policies=frozenset({SOLVER})))
            await asyncio.sleep(after_s)
            kept.extend(await self.close(name, members, line))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.session.accumulate(), name="train")
            async with asyncio.TaskGroup() as playing:
                for group in groups:
                    playing.create_task(play(*group), name=group[0])
            self.session.close_step()
        return kept


def gradient(samples: Sequence[Sample]) -> float:
    return sum(s.advantage * s.num_tokens for s in samples) / (divisors_of(samples).num_tokens or 1)


def whole(make_samples: Samples, count: int) -> list[Sample]:
    return [sample for sample in make_samples(3, 60, weights=(1.0,)) if sample.num_tokens][:count]


class SettlesLate(Around[SlowStore]):
    """Rows change their state a second after the call."""

    async def settle(self, sample_ids: Sequence[SampleId], outcome: Outcome) -> None:
        await asyncio.sleep(1.0)
        await self.inner.settle(sample_ids, outcome)


def test_rows_that_are_filtered_before_they_are_claimed_leave_no_micro_batch_behind(make_samples: Samples) -> None:
    dropped, kept = whole(make_samples, 2)

    async def scenario() -> None:
        slow = Slow(SettlesLate)
        await make_ready(slow.store, [dropped], open_group="g")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(slow.close("g", [dropped], None), name="close")
            await asyncio.sleep(0.5)  # Of the second in which the row is still READY.
            slow.session.close_step()
            await slow.session.accumulate()
        assert slow.trainer.accumulated == []
        await slow.session.finish(Divisors())
        assert slow.session.version == 0

        await slow.step([("h", [kept], 0.0, 0.0, LINE)])
        await slow.session.finish(divisors_of([kept]))
        assert slow.session.version == 1, "the next step's row was taken for accumulated"
        assert await slow.store.counts(SOLVER) == {RowState.FILTERED: 1, RowState.TRAINED: 1}

    run_virtual(scenario())


def test_a_row_that_is_dropped_while_another_one_of_its_micro_batch_is_filtered_is_filtered_once(
    make_samples: Samples,
) -> None:
    one, other = whole(make_samples, 2)

    async def scenario() -> None:
        slow = Slow(SettlesLate)
        await make_ready(slow.store, [one], open_group="g")
        await make_ready(slow.store, [other], open_group="h")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(slow.session.accumulate(), name="train")
            await asyncio.sleep(0.01)  # The trainer has both.
            await slow.close("g", [one], None)
            await asyncio.sleep(0.5)  # Both are ACCUMULATED, and the first one's end is on its way.
            assert await slow.store.counts(SOLVER) == {RowState.ACCUMULATED: 2}
            await slow.close("h", [other], None)
            slow.session.close_step()
        await slow.session.finish(Divisors())
        assert slow.session.version == 0
        assert await slow.store.counts(SOLVER) == {RowState.FILTERED: 2}

    run_virtual(scenario())


@pytest.mark.parametrize("ending", ["the trainer fails", "the run is cancelled"])
def test_a_row_that_is_dropped_in_a_micro_batch_that_is_not_accumulated_is_filtered_and_the_others_are_ready_again(
    make_samples: Samples, ending: str
) -> None:
    fails = frozenset({"solver/0/0"} if ending == "the trainer fails" else ())
    dropped, kept = whole(make_samples, 2)

    async def scenario() -> None:
        slow = Slow(fail_on=fails)
        await make_ready(slow.store, [dropped], open_group="g")
        await make_ready(slow.store, [kept], open_group="h")
        training = asyncio.create_task(slow.session.accumulate(), name="train")
        await asyncio.sleep(0.01)  # The trainer has both.
        await slow.close("g", [dropped], None)
        if not fails:
            training.cancel()
        with pytest.raises((TrainingError, asyncio.CancelledError)):
            await training
        assert await slow.store.counts(SOLVER) == {RowState.FILTERED: 1, RowState.READY: 1}

        credited = await slow.close("h", [kept], LINE)
        slow.session.close_step()
        await slow.session.accumulate()
        await slow.session.finish(divisors_of(credited))
        assert slow.session.version == 1
        assert slow.trainer.weight == pytest.approx(gradient(credited), rel=1e-12)

    run_virtual(scenario())


@given(
    plays=st.lists(
        st.tuples(st.integers(1, 3), st.floats(0, 0.5), st.floats(0, 2), st.sampled_from([LINE, None, None])),
        min_size=2,
        max_size=8,
    ),
    longest_s=st.sampled_from([0.02, 0.3]),
    micro_batch=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_every_row_is_in_one_update_or_filtered_once_however_slow_the_store_is(
    make_samples: Samples,
    plays: list[tuple[int, float, float, CreditLine | None]],
    longest_s: float,
    micro_batch: int,
    seed: int,
) -> None:
    samples = iter(whole(make_samples, 3 * len(plays)))
    groups = [(f"g{at}", [next(samples) for _ in range(size)], *when) for at, (size, *when) in enumerate(plays)]

    async def scenario() -> None:
        slow = Slow(longest_s=longest_s, seed=seed, micro_batch=micro_batch)
        expected, trained = 0.0, 0
        for of_step in (groups[::2], groups[1::2]):
            kept = await slow.step(of_step)
            await slow.session.finish(divisors_of(kept))
            expected, trained = expected + gradient(kept), trained + len(kept)
        filtered = sum(len(members) for _, members, *_ in groups) - trained
        counts = {RowState.TRAINED: trained, RowState.FILTERED: filtered}
        assert await slow.store.counts(SOLVER) == {state: count for state, count in counts.items() if count}
        assert slow.trainer.weight == pytest.approx(expected, rel=1e-9, abs=1e-12)

    run_virtual(scenario())


class SlowToClaim(AroundStore):
    """A store whose claims take a second, and everything else no time."""

    async def call(self, name: str, do: Callable[[], Awaitable[Any]]) -> Any:
        done = await do()
        if name == "claim":
            await asyncio.sleep(1.0)
        return done


def test_a_group_that_is_dropped_while_its_rows_are_claimed_is_closed_after_them(make_samples: Samples) -> None:
    async def scenario() -> None:
        slow = Slow(SlowToClaim)
        dropped, kept = [sample for sample in make_samples(4, 40, weights=(1.0,)) if sample.num_tokens][:2]
        await make_ready(slow.store, [dropped], open_group="g")
        await make_ready(slow.store, [kept])
        training = asyncio.create_task(slow.session.accumulate(), name="train")
        await asyncio.sleep(0.5)
        await slow.close("g", [dropped], None)
        slow.session.close_step()
        await training
        assert (await slow.session.finish(divisors_of([kept]))) is not None
        assert await slow.store.counts(SOLVER) == {RowState.TRAINED: 1, RowState.FILTERED: 1}
        assert slow.trainer.weight == pytest.approx(kept.advantage, rel=1e-12)

    run_virtual(scenario())
