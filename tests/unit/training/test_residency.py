"""Policies that share training devices, in virtual time: who holds them, and that everybody's turn comes."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.analysis.costs import TrainerCosts
from flexmarl.cluster.allocation import Lease
from flexmarl.errors import TrainingError, WorkerError
from flexmarl.events.event import Events
from flexmarl.events.notices import RowsReady
from flexmarl.events.training_events import Swapped
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome
from flexmarl.experience.turn_rows import TURN_COLUMNS, closing_row, credit_row, response_row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import AgentName, PolicyName, RowState, Sample, Version
from flexmarl.records.ids import make_sample_id, split_sample_id
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import FakeTrainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.interface import StoreRows
from flexmarl.training.residency import Residency
from flexmarl.training.session import TrainingSession
from flexmarl.training.settings import ProcessGroupSettings
from tests.unit.training.conftest import random_samples

NAMES = ("critic", "planner", "solver", "verifier")
COSTS = TrainerCosts(sample_s=0.5, update_s=1.0, publish_s=1.0, resume_s=4.0, suspend_s=2.0)


class WatchedGroup(ModelledProcessGroup):
    """Notes who has devices, from the beginning of the resume to the end of the suspend."""

    def __init__(self, trainer: FakeTrainer, holders: list[PolicyName]) -> None:
        super().__init__(trainer)
        self._holders = holders
        self.most = 0
        self.leases: list[Lease] = []

    async def resume(self, lease: Lease) -> None:
        self._holders.append(self.policy)
        self.most = len(self._holders)
        self.leases.append(lease)
        await super().resume(lease)

    async def suspend(self) -> None:
        await super().suspend()
        self._holders.remove(self.policy)


class Stage:
    """Policies with their trainers and sessions, which share devices."""

    def __init__(self, names: Sequence[str], costs: TrainerCosts = COSTS, micro_batch: int = 4, **chosen) -> None:
        self.policies = [PolicyName(name) for name in names]
        self.store = SqliteStore(agents=[AgentName(name) for name in names], columns=TURN_COLUMNS)
        rows = StoreRows(self.store)
        self.trainers = {p: FakeTrainer(p, InlineObjectStore(), costs=costs, rows=rows) for p in self.policies}
        self.holders: list[PolicyName] = []
        self.groups = {p: WatchedGroup(trainer, self.holders) for p, trainer in self.trainers.items()}
        self.swaps: list[Swapped] = []
        self.left: dict[PolicyName, float] = {}
        """When each policy's step was over."""
        self.events = Events()
        self.events.listen(Swapped, self.swaps.append)
        self.residency = Residency(self.groups, ProcessGroupSettings(**chosen), events=self.events)
        self.sessions = {
            p: TrainingSession(
                p,
                self.store,
                trainer,
                micro_batch=micro_batch,
                version=Version(0),
                events=self.events,
                residency=self.residency,
            )
            for p, trainer in self.trainers.items()
        }

    async def ready(self, samples: Sequence[Sample]) -> None:
        for s in samples:
            agent, policy = s.turn.agent, s.turn.policy
            await self.store.put(agent, [response_row(s.turn), closing_row(s.turn.sample_id, policy, reward=s.reward)])
            await self.store.put(agent, [credit_row(replace(s, episode_tokens=1.0))])
        await self.store.settle([s.turn.sample_id for s in samples], Outcome(state=RowState.READY))
        for policy in {s.turn.policy: None for s in samples}:
            self.events.emit(RowsReady(policies=frozenset({policy})))

    async def step(self, arrivals: Sequence[tuple[float, Sample]], closes: float = 0.0) -> None:
        """One step: rows become ready when they arrive; each policy goes through it on its own."""
        began = now()
        samples = {p: [s for _, s in arrivals if s.turn.policy == p] for p in self.policies}
        async with asyncio.TaskGroup() as tasks:
            for policy in self.policies:
                tasks.create_task(self._train(policy, samples[policy]), name=f"train/{policy}")
            for at, sample in sorted(arrivals, key=lambda arrival: arrival[0]):
                await asyncio.sleep(began + at - now())
                await self.ready([sample])
            await asyncio.sleep(began + closes - now())
            for session in self.sessions.values():
                session.close_step()

    async def _train(self, policy: PolicyName, samples: Sequence[Sample]) -> None:
        session = self.sessions[policy]
        await session.accumulate()
        if await session.finish(divisors_of(samples)):
            await self.trainers[policy].publish(session.version)
        session.leave()
        self.left[policy] = now()

    def told(self) -> list[tuple[str, str, float, float]]:
        return [(s.policy, s.direction, s.began, s.ended) for s in self.swaps]

    def because(self, policy: str, direction: str) -> list[str]:
        return [s.because for s in self.swaps if (s.policy, s.direction) == (policy, direction)]


def now() -> float:
    return asyncio.get_running_loop().time()


def rows_of(policy: str, number: int, seed: int = 0) -> list[Sample]:
    """Rows of tasks that no other policy or seed has."""
    samples = random_samples(seed, number, policy=policy, weights=(1.0,), empty=0.0)[:number]
    ids = [make_sample_id(f"{policy}{seed}", *split_sample_id(s.turn.sample_id)[1:]) for s in samples]
    return [replace(s, turn=replace(s.turn, sample_id=name)) for s, name in zip(samples, ids, strict=True)]


def at_once(seconds: float, *samples: Sequence[Sample]) -> list[tuple[float, Sample]]:
    return [(seconds, sample) for part in samples for sample in part]


@dataclass(frozen=True)
class Load:
    rows: Mapping[str, Sequence[float]]
    """When each row becomes ready, by policy."""
    at_once: int | None
    suspend: str
    prefetch: bool
    sample_s: float
    resume_s: float


loads = st.builds(
    Load,
    rows=st.fixed_dictionaries({n: st.lists(st.floats(0, 60), max_size=8) for n in NAMES[:1]}).flatmap(
        lambda first: st.dictionaries(st.sampled_from(NAMES[1:]), st.lists(st.floats(0, 60), max_size=8)).map(
            lambda more: {**first, **more}
        )
    ),
    at_once=st.sampled_from([1, 1, 2, 3, None]),
    suspend=st.sampled_from(["eager", "on_demand"]),
    prefetch=st.booleans(),
    sample_s=st.sampled_from([0.0, 0.5, 5.0]),
    resume_s=st.sampled_from([0.0, 4.0]),
)


@given(load=loads)
@settings(max_examples=60, deadline=None)
def test_every_policy_updates_from_all_its_rows_whatever_shares_its_devices_and_whenever_rows_come(load: Load) -> None:
    costs = COSTS.model_copy(update={"sample_s": load.sample_s, "resume_s": load.resume_s})

    async def scenario() -> None:
        stage = Stage(
            list(load.rows), costs, micro_batch=3, at_once=load.at_once, suspend=load.suspend, prefetch=load.prefetch
        )
        arrivals = [
            arrival
            for name, times in load.rows.items()
            for arrival in zip(times, rows_of(name, len(times)), strict=True)
        ]
        async with stage.residency.open():
            await stage.step(arrivals[::2], closes=30.0)
            await stage.step(arrivals[1::2], closes=30.0)
            await stage.residency.suspend_all()
        assert stage.holders == []
        for name, trainer in stage.trainers.items():
            trained = sorted(s.turn.sample_id for batch in trainer.accumulated for s in batch.samples)
            assert trained == sorted(s.turn.sample_id for _, s in arrivals if s.turn.policy == name)
            assert stage.groups[name].most <= (load.at_once or len(load.rows)), "a place was given twice (law 4)"
            if not trained:
                assert not stage.because(name, "resume"), "nothing to train, but it took devices"

    run_virtual(scenario())


def test_the_state_comes_while_rows_still_arrive_so_that_the_swap_is_hidden() -> None:
    async def scenario(prefetch: bool) -> float:
        stage = Stage(["solver"], prefetch=prefetch)
        async with stage.residency.open():
            rows = rows_of("solver", 4)
            await stage.step([(float(at), sample) for at, sample in zip((0, 5, 9, 10), rows, strict=True)], closes=10.0)
        assert stage.because("solver", "resume") == [
            "1 of 4 rows are ready, and devices are free" if prefetch else "4 rows are ready"
        ]
        return stage.left[PolicyName("solver")]

    assert run_virtual(scenario(True)) == 10 + 4 * 0.5 + 1 + 1
    assert run_virtual(scenario(False)) == 10 + 4.0 + 4 * 0.5 + 1 + 1


def test_a_process_group_is_given_the_lease_of_the_place_that_the_swap_names() -> None:
    async def scenario() -> None:
        stage = Stage(["critic", "solver", "verifier"], at_once=2)
        async with stage.residency.open():
            await stage.step([*at_once(0, *(rows_of(name, 4) for name in ("critic", "solver", "verifier")))])
        for policy, group in stage.groups.items():
            resumed = [swap.place for swap in stage.swaps if (swap.policy, swap.direction) == (policy, "resume")]
            assert resumed
            assert [(lease.holder, lease.place) for lease in group.leases] == [(policy, place) for place in resumed]

    run_virtual(scenario())


def test_on_demand_a_policy_keeps_its_devices_until_another_one_needs_them() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1, prefetch=False)
        async with stage.residency.open():
            await stage.step(at_once(0, rows_of("solver", 4)) + at_once(20, rows_of("verifier", 4)), closes=20.0)
        assert stage.told() == [
            ("solver", "resume", 0.0, 4.0),
            ("solver", "suspend", 20.0, 22.0),
            ("verifier", "resume", 22.0, 26.0),
            ("verifier", "suspend", 30.0, 32.0),  # updated and published; the solver has its update before it
            ("solver", "resume", 32.0, 36.0),
        ]
        assert stage.because("solver", "suspend") == ["'verifier' needs its devices, 0 rows are ready for it"]
        assert stage.because("solver", "resume") == ["4 rows are ready", "its update is due"]

    run_virtual(scenario())


def test_eagerly_a_policy_gives_its_devices_back_as_soon_as_nothing_is_ready() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1, suspend="eager", prefetch=False)
        async with stage.residency.open():
            await stage.step(at_once(0, rows_of("solver", 4)), closes=20.0)
            assert stage.told() == [
                ("solver", "resume", 0.0, 4.0),
                ("solver", "suspend", 6.0, 8.0),
                ("solver", "resume", 20.0, 24.0),
            ]
            await stage.residency.suspend_all()
        assert stage.because("solver", "suspend") == ["nothing is ready for it"] * 2

    run_virtual(scenario())


@pytest.mark.parametrize(("leave", "left"), [("published", 7.0), ("updated", 6.0)])
def test_devices_are_left_with_the_publication_or_with_the_update_before_it(leave: str, left: float) -> None:
    """Resume 4 s, two rows 1 s, update 1 s; then a publication of 1 s."""

    async def scenario() -> None:
        stage = Stage(["solver"], leave=leave, suspend="eager", prefetch=False)
        async with stage.residency.open():
            await stage.step(at_once(0, rows_of("solver", 2)))
            await asyncio.sleep(5.0)
            assert stage.told()[1:] == [("solver", "suspend", left, left + 2.0)]
            assert stage.left == {"solver": 7.0}

    run_virtual(scenario())


def test_devices_with_nothing_on_the_way_go_to_the_policy_that_will_be_next() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1)
        async with stage.residency.open():
            verifier = rows_of("verifier", 4)
            late = [(20.0, verifier[0]), *at_once(30, verifier[1:])]
            await stage.step([*at_once(0, rows_of("solver", 4)), *late], closes=40.0)
        assert stage.because("solver", "suspend")[0] == "'verifier' is next, 1 of 4 rows are ready"
        assert stage.told()[1:3] == [("solver", "suspend", 20.0, 22.0), ("verifier", "resume", 22.0, 26.0)]

    run_virtual(scenario())


def test_a_policy_that_always_has_work_gives_way_to_one_that_has_waited_long_enough() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1)
        async with stage.residency.open():
            rows = at_once(0, rows_of("solver", 120)) + at_once(1, rows_of("verifier", 4))
            await stage.step(rows, closes=200.0)
        first = next(s for s in stage.swaps if s.policy == "verifier")
        assert first.began < 60.0, "the solver had work for a minute"
        assert stage.because("solver", "suspend")[0].startswith("'verifier' has waited ")

    run_virtual(scenario())


def test_when_the_step_closes_policies_on_devices_train_there_first() -> None:
    async def scenario() -> None:
        stage = Stage(["critic", "planner", "solver", "verifier"], at_once=2, prefetch=False)
        async with stage.residency.open():
            await stage.step(at_once(0, *(rows_of(name, 1) for name in stage.policies)), closes=60.0)
            for seed in (1, 2):
                here = [p for p in stage.policies if p in stage.holders]
                stage.swaps.clear()
                await stage.step(at_once(0, *(rows_of(name, 3, seed) for name in stage.policies)), closes=60.0)
                assert not {s.policy for s in stage.swaps[:2]} - set(here), "they leave when they have trained"
                assert len(stage.swaps) == 4, "two leave, and two come"

    run_virtual(scenario())


def test_a_policy_whose_last_rows_were_dropped_keeps_nobody_from_its_devices() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1)
        rows = {name: rows_of(name, 2) for name in ("solver", "verifier")}
        async with stage.residency.open(), asyncio.TaskGroup() as tasks:
            for policy in stage.policies:
                tasks.create_task(stage._train(policy, rows[policy] if policy == "verifier" else []))
            await stage.ready(rows["solver"])
            await asyncio.sleep(10)
            assert stage.holders == ["solver"]
            await stage.ready(rows["verifier"])
            dropped = [s.turn.sample_id for s in rows["solver"]]
            await stage.store.settle(dropped, Outcome(state=RowState.FILTERED, reason="dropped"))
            for session in stage.sessions.values():
                session.close_step()
        assert stage.sessions[PolicyName("verifier")].version == 1

    run_virtual(scenario())


def test_most_ready_work_per_second_comes_first() -> None:
    async def scenario() -> None:
        stage = Stage(["critic", "solver", "verifier"], at_once=1, prefetch=False)
        async with stage.residency.open():
            await stage.step(at_once(0, *(rows_of(name, 1) for name in stage.policies)))  # now all swaps are known
            stage.swaps.clear()
            await stage.step(at_once(0, rows_of("verifier", 4, 1), rows_of("solver", 12, 1), rows_of("critic", 4, 1)))
        first = next(s for s in stage.swaps if s.direction == "resume")
        assert (first.policy, first.because) == ("solver", "12 rows are ready: 1.5/s, most of 2 that wait")

    run_virtual(scenario())


def test_a_policy_comes_back_to_its_own_place() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=2, suspend="eager", prefetch=False)
        async with stage.residency.open():
            rows = at_once(0, rows_of("solver", 4)) + at_once(0.5, rows_of("verifier", 4))
            await stage.step(rows, closes=60.0)
        assert {(s.policy, s.place) for s in stage.swaps} == {("solver", 0), ("verifier", 1)}

    run_virtual(scenario())


def test_devices_are_kept_from_the_end_of_the_step_until_the_session_leaves() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1)
        async with stage.residency.open():
            await stage.step(at_once(0, rows_of("solver", 4), rows_of("verifier", 4)))
        left, taken = stage.left[PolicyName("solver")], [s.began for s in stage.swaps if s.policy == "solver"]
        assert (left, taken) == (8.0, [0.0, 8.0]), "the verifier waits for the publication"

    run_virtual(scenario())


def test_suspending_all_while_a_session_trains_is_an_error() -> None:
    async def scenario() -> None:
        stage = Stage(["solver"])
        async with stage.residency.open():
            training = asyncio.create_task(stage.step(at_once(0, rows_of("solver", 4))))
            await asyncio.sleep(5)
            with pytest.raises(TrainingError, match="policy 'solver' is holding on training devices; its session must"):
                await stage.residency.suspend_all()
            await training

    run_virtual(scenario())


def test_a_trainer_that_is_sent_work_ahead_ends_it_before_it_gives_way() -> None:
    async def scenario() -> None:
        stage = Stage(["solver", "verifier"], at_once=1)
        solver, trainer = PolicyName("solver"), stage.trainers[PolicyName("solver")]
        stage.sessions[solver] = TrainingSession(
            solver,
            stage.store,
            trainer,
            micro_batch=4,
            version=Version(0),
            ahead=True,
            events=stage.events,
            residency=stage.residency,
        )
        async with stage.residency.open():
            rows = at_once(0, rows_of("solver", 120)) + at_once(1, rows_of("verifier", 4))
            await stage.step(rows, closes=200.0)
        assert len([s for s in stage.swaps if s.policy == "solver" and s.direction == "resume"]) > 1

    run_virtual(scenario())


def test_a_swap_that_fails_ends_the_session_that_waits_for_it() -> None:
    async def scenario() -> None:
        stage = Stage(["solver"])
        async with stage.residency.open():
            training = asyncio.create_task(stage.step(at_once(0, rows_of("solver", 4))))
            await asyncio.sleep(2)
            stage.trainers[PolicyName("solver")].fail("the machine is gone")
            with pytest.raises(ExceptionGroup) as raised:
                await training
            assert raised.group_contains(WorkerError, match="trainer/solver died: the machine is gone")

    run_virtual(scenario())


def test_leaving_the_block_ends_the_swaps_under_way() -> None:
    async def scenario() -> None:
        stage = Stage(["solver"])
        with suppress(TimeoutError):
            async with stage.residency.open(), asyncio.timeout(1):
                await stage.step(at_once(0, rows_of("solver", 4)))
        assert now() == 1.0
        assert stage.swaps == []

    run_virtual(scenario())
