"""Micro-batches of several adapters in one pass: each adapter's gradients are those that it gets apart."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers import PreTrainedModel

from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.cluster.torch_device import cpu_multiplies_bfloat16
from flexmarl.errors import TrainingError, cause_of
from flexmarl.events.event import Events
from flexmarl.events.notices import RowsReady
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome
from flexmarl.experience.turn_rows import TURN_COLUMNS, closing_row, credit_row, response_row
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import (
    AgentName,
    Divisors,
    LossReport,
    MicroBatch,
    PolicyName,
    RowState,
    Sample,
    SampleId,
    Version,
    WorkerId,
)
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.training import check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.base_host import BaseHost
from flexmarl.training.backends.joint import JointPasses
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.backends.state import Base, Skeleton
from flexmarl.training.interface import HeldRows, RowReader, StoreRows
from flexmarl.training.session import TrainingSession
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.together import MemberTrainer, RowsOf, SharedBase, Together

Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
NAMES = [PolicyName(name) for name in ("one", "two", "three", "four")]
TARGETS = ["all-linear", ["q_proj", "down_proj"], ["gate_proj"]]


@pytest.fixture(scope="module")
def source(make_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    return folder


def settings_of(**more: Any) -> TrainingSettings:
    # AdamW divides by the root of the second moment: without such an eps, a gradient near 0 magnifies its last digits.
    optimizer = {"learning_rate": 3e-2, "eps": 1e-3}
    keys = {"dtype": "float64", "lora": {"rank": 2}, "optimizer": optimizer, "publish": "merged"}
    return TrainingSettings.model_validate(keys | more)


def host_of(
    source: Path,
    settings: Mapping[PolicyName, TrainingSettings],
    rows: RowReader,
    objects: ObjectStore | None = None,
) -> BaseHost:
    """A host of adapters on one base, whose B is not 0: they differ from the base and from each other."""
    first, objects = next(iter(settings.values())), objects or InlineObjectStore()
    base = Base(source, first.dtype, "cpu", Skeleton(source))
    trainers = {
        policy: SingleProcessTrainer(policy, base.model(), each, objects, rows=rows, seed=number)
        for number, (policy, each) in enumerate(settings.items())
    }
    for number, trainer in enumerate(trainers.values()):
        random = torch.Generator().manual_seed(number)
        for name, parameter in trainer.backward.network.model.named_parameters():
            if "lora_B" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=random).to(parameter)
    passes = JointPasses(base.model(), first, device="cpu", deterministic=False)
    return BaseHost(trainers, passes, rows)


def asked(samples: Mapping[PolicyName, Sequence[Sample]], micro_batch: str = "mb") -> list[RowsOf]:
    return [
        RowsOf(policy=policy, micro_batch_id=f"{policy}/{micro_batch}", ids=tuple(s.turn.sample_id for s in of))
        for policy, of in samples.items()
    ]


def own(samples: Sequence[Sample]) -> list[Sample]:
    """The samples under ids that no other policy's have."""
    turns = [replace(s.turn, sample_id=SampleId(f"{s.turn.policy}_{s.turn.sample_id}")) for s in samples]
    return [replace(sample, turn=turn) for sample, turn in zip(samples, turns, strict=True)]


Gradients = dict[PolicyName, torch.Tensor]


def trained(
    source: Path,
    settings: Mapping[PolicyName, TrainingSettings],
    steps: Sequence[Mapping[PolicyName, Sequence[Sample]]],
    *,
    together: bool,
) -> tuple[list[Gradients], list[LossReport], dict[str, torch.Tensor]]:
    """The gradient sums of each step, all reports, and the trained parameters, with a reset of references between."""
    rows = HeldRows()
    host = host_of(source, settings, rows)

    async def train() -> tuple[list[Gradients], list[LossReport]]:
        gradients, reports = [], []
        for samples in steps:
            calls = [asked(samples)] if together else [[each] for each in asked(samples)]
            for of_policy in samples.values():
                rows.hold(of_policy)
            for call in calls:
                reports += await host.accumulate(call)
            sums = {policy: host._trainers[policy]._cache.sums for policy in samples}
            gradients.append({p: torch.cat([t.flatten() for t in of]) for p, of in sums.items() if of})
            for policy, of_policy in samples.items():
                if divisors_of(of_policy).num_tokens:
                    await host.change(policy, "step", divisors_of(of_policy))
                    if settings[policy].kl:
                        await host.change(policy, "reset_reference")
        return gradients, reports

    gradients, reports = asyncio.run(train())
    weights = {
        f"{policy}/{name}": p.detach().clone()
        for policy, trainer in host._trainers.items()
        for name, p in trainer._updater.parameters.items()
    }
    return gradients, reports, weights


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error of a tensor of numbers around 1, which may happen to be 0: a divergence from equal weights has none."""
    return float((found - expected).norm() / max(float(expected.norm()), 1e-2))


POLICY = st.fixed_dictionaries(
    {
        "lora": st.fixed_dictionaries(
            {
                "rank": st.integers(1, 5),
                "alpha": st.sampled_from([1.0, 8.0]),
                "target_modules": st.sampled_from(TARGETS),
            }
        ),
        "kl": st.sampled_from([None, {"coef": 0.3, "where": "loss"}]),
        "entropy_coef": st.sampled_from([0.0, 0.1]),
        "critic": st.sampled_from([None, {"coef": 0.5}]),
        "loss": st.sampled_from([{"type": "ppo"}, {"type": "ppo", "aggregation": "seq-mean-token-mean"}]),
        "accumulation_scale": st.sampled_from([1.0, 4.0]),
    }
)


@examples(max_examples=25, deadline=None, phases=[Phase.generate])  # To shrink an example takes minutes.
@given(
    policies=st.lists(POLICY, min_size=2, max_size=4),
    episodes=st.lists(st.integers(1, 6), min_size=8, max_size=8),
    tree=st.sampled_from(["on", "off", "auto"]),
    most=st.sampled_from([12, 60, 4096]),
    seed=st.integers(0, 1000),
)
def test_together_equals_apart(
    source: Path,
    make_samples: Samples,
    policies: list[dict[str, Any]],
    episodes: list[int],
    tree: str,
    most: int,
    seed: int,
) -> None:
    """Gradient sums, figures and updated weights of two steps, within 1e-10 in float64."""
    settings = {
        policy: settings_of(tree=tree, max_tokens_per_forward=most, **each)
        for policy, each in zip(NAMES, policies, strict=False)
    }
    steps = [
        {
            policy: own(make_samples(seed + 10 * step + n, episodes[4 * step + n], policy=policy, version=step))
            for n, policy in enumerate(settings)
        }
        for step in range(2)
    ]
    joint, apart = (trained(source, settings, steps, together=together) for together in (True, False))
    for found, expected in zip(joint[0], apart[0], strict=True):
        assert found.keys() == expected.keys()
        assert all(relative(found[policy], expected[policy]) <= 1e-10 for policy in expected)
    for found, expected in zip(joint[1], apart[1], strict=True):
        assert (found.micro_batch_id, found.num_samples, found.num_tokens) == (
            expected.micro_batch_id,
            expected.num_samples,
            expected.num_tokens,
        )
        assert found.sums == pytest.approx(dict(expected.sums), rel=1e-9, abs=1e-10)
    assert all(relative(joint[2][name], tensor) <= 1e-10 for name, tensor in apart[2].items())


@pytest.mark.parametrize("more", [{"activation_checkpointing": True}, {"dtype": "float32"}, {"tree": "on"}])
def test_it_does_so_however_a_pass_is_made(source: Path, make_samples: Samples, more: dict[str, Any]) -> None:
    settings = {policy: settings_of(**more, kl={"coef": 0.3}) for policy in NAMES[:3]}
    steps = [{policy: own(make_samples(n, 4, policy=policy)) for n, policy in enumerate(settings)}]
    joint, apart = (trained(source, settings, steps, together=together)[0][0] for together in (True, False))
    bound = {"float32": 1e-4}.get(settings[NAMES[0]].dtype, 1e-10)
    assert all(relative(joint[policy], apart[policy]) <= bound for policy in settings)


def test_in_bfloat16_it_is_as_near_to_the_truth(source: Path, make_samples: Samples) -> None:
    """How far two roundings to bfloat16 are apart depends on the CPU's kernels; how far they are off does not."""

    def gradients(dtype: str, *, together: bool) -> Gradients:
        settings = {policy: settings_of(dtype=dtype, kl={"coef": 0.3}) for policy in NAMES[:3]}
        steps = [{policy: own(make_samples(n, 4, policy=policy)) for n, policy in enumerate(settings)}]
        return trained(source, settings, steps, together=together)[0][0]

    truth = gradients("float64", together=False)
    joint, apart = (gradients("bfloat16", together=together) for together in (True, False))
    off = {policy: (relative(joint[policy], truth[policy]), relative(apart[policy], truth[policy])) for policy in truth}
    assert all(ours <= 1.25 * theirs and theirs <= 0.15 for ours, theirs in off.values()), off
    if cpu_multiplies_bfloat16():
        assert all(relative(joint[policy], apart[policy]) <= 5e-2 for policy in truth)


def test_an_adapter_may_be_on_the_head(make_samples: Samples, tmp_path: Path, make_model: Model) -> None:
    model = make_model()
    config = type(model.config)(**{**model.config.to_dict(), "tie_word_embeddings": False})
    type(model)(config).save_pretrained(tmp_path)
    loras = (
        {"rank": 2, "target_modules": ["lm_head", "q_proj"]},
        {"rank": 2},
        {"rank": 3, "target_modules": ["lm_head"]},
    )
    for tree in ("on", "off"):
        settings = {policy: settings_of(lora=lora, tree=tree) for policy, lora in zip(NAMES, loras, strict=False)}
        steps = [{policy: own(make_samples(n, 4, policy=policy)) for n, policy in enumerate(settings)}]
        joint, apart = (trained(tmp_path, settings, steps, together=together)[0][0] for together in (True, False))
        assert all(relative(joint[policy], apart[policy]) <= 1e-10 for policy in settings)


def test_the_rows_of_all_policies_share_passes(source: Path, make_samples: Samples) -> None:
    """Witness for the above: with room for all of them there is one pass, and every policy has a share of it."""
    for tree in ("on", "off"):
        settings = {policy: settings_of(tree=tree) for policy in NAMES}
        host = host_of(source, settings, HeldRows())
        rows = {
            policy: [(s, 1.0) for s in make_samples(n, 3, empty=0.0, policy=policy)] for n, policy in enumerate(NAMES)
        }
        (one,) = host._passes.plan(rows)
        assert [share.policy for share in one] == sorted(NAMES)
        assert {len(share.rows) for share in one} == {len(of) for of in rows.values()}


def test_a_member_keeps_the_contract_of_a_trainer(source: Path, make_samples: Samples, tmp_path: Path) -> None:
    """Its base is called through a crossing, as on Ray."""
    samples, solver = make_samples(14, 8), PolicyName("solver")
    batches = [
        MicroBatch(micro_batch_id=f"mb/{number}", policy=solver, samples=tuple(samples[number::3]))
        for number in range(3)
    ]

    async def check() -> None:
        async with AsyncExitStack() as opened:
            cluster = await opened.enter_async_context(inproc_cluster(crosses=True))

            async def make(objects: ObjectStore, rows: RowReader) -> MemberTrainer:
                spec = ResidentSpec(
                    name=WorkerId.trainer(PolicyName(f"number-{len(cluster.residents)}")),
                    kind=ResidentKind.TRAINER,
                    contract=SharedBase,
                    make=lambda: host_of(source, {solver: settings_of()}, rows, objects),
                )
                (resident,) = await cluster.spawn([spec])
                together = Together(resident.remote, [solver], in_rounds=False)
                await opened.enter_async_context(together.open())
                return together.trainers[solver]

            await check_trainer(make, batches, tmp_path)

    asyncio.run(check())


class ScriptedBase:
    """A base whose calls take a second, and which fails at the call of number `fails_at`."""

    def __init__(self, store: SqliteStore, fails_at: int | None = None) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.held = set[SampleId]()
        """Rows of which it has gradients."""
        self._rows, self._fails_at = StoreRows(store), fails_at

    async def accumulate(self, waiting: Sequence[RowsOf]) -> Sequence[LossReport]:
        await asyncio.sleep(1.0)
        if len(self.calls) == self._fails_at:
            raise ValueError("scripted failure")
        self.calls.append(tuple(each.micro_batch_id for each in waiting))
        reports = []
        for each in waiting:
            batch = MicroBatch(
                micro_batch_id=each.micro_batch_id, policy=each.policy, samples=await self._rows.read(each.ids)
            )
            self.held.update(each.ids)
            reports.append(LossReport(micro_batch_id=batch.micro_batch_id, **batch.counts(), sums={}, duration_s=1.0))
        return reports

    async def change(self, policy: PolicyName, method: str, *args: Any) -> Any:
        raise AssertionError("no session got that far")

    async def ask(self, policy: PolicyName, method: str, *args: Any) -> Any:
        raise AssertionError("no session got that far")


@dataclass(slots=True)
class Played:
    """A step of several sessions on one base."""

    calls: list[tuple[str, ...]]
    held: set[SampleId]
    """Rows of which the base has gradients."""
    ready: set[SampleId] = field(default_factory=set)
    """Rows that became READY."""
    states: dict[SampleId, RowState] = field(default_factory=dict)
    """States of the rows at the end."""
    failure: str = ""


def play(
    samples: Mapping[PolicyName, Sequence[Sample]],
    every_s: Sequence[float],
    *,
    in_rounds: bool,
    ahead: bool,
    fails_at: int | None = None,
    dies_after_s: float | None = None,
) -> Played:
    """Each policy's rows become READY in intervals of its own, in micro-batches of three."""

    async def collect(played: Played, store: SqliteStore, policy: PolicyName, events: Events, pause_s: float) -> None:
        for sample in samples[policy]:
            await asyncio.sleep(pause_s)
            await store.settle([sample.turn.sample_id], Outcome(state=RowState.READY))
            played.ready.add(sample.turn.sample_id)
            events.emit(RowsReady(policies=frozenset({policy})))

    async def step(played: Played, store: SqliteStore, base: SharedBase) -> None:
        events = Events()
        async with Together(base, list(samples), in_rounds=in_rounds).open() as together, asyncio.TaskGroup() as tasks:
            sessions = {
                policy: TrainingSession(
                    policy,
                    store,
                    together.trainers[policy],
                    micro_batch=3,
                    version=Version(0),
                    ahead=ahead,
                    events=events,
                    together=together,
                )
                for policy in samples
            }
            for policy, session in sessions.items():
                tasks.create_task(session.accumulate(), name=f"train {policy}")
            async with asyncio.TaskGroup() as collecting:
                for policy, pause_s in zip(samples, every_s, strict=False):
                    collecting.create_task(collect(played, store, policy, events, pause_s), name=f"collect {policy}")
            for session in sessions.values():
                session.close_step()

    async def run() -> Played:
        store = SqliteStore(agents=[AgentName(policy) for policy in samples], columns=TURN_COLUMNS)
        scripted = ScriptedBase(store, fails_at)
        played = Played(scripted.calls, scripted.held)
        for turn, sample in ((sample.turn, sample) for of_policy in samples.values() for sample in of_policy):
            await store.put(turn.agent, [response_row(turn), closing_row(turn.sample_id, turn.policy, reward=0.0)])
            await store.put(turn.agent, [credit_row(replace(sample, episode_tokens=1.0))])
        async with inproc_cluster(crosses=True) as cluster:
            spec = ResidentSpec(
                name=WorkerId.trainer(next(iter(samples))),
                kind=ResidentKind.TRAINER,
                contract=SharedBase,
                make=lambda: scripted,
                error=TrainingError,
            )
            (resident,) = await cluster.spawn([spec])
            if dies_after_s is not None:
                asyncio.get_running_loop().call_later(dies_after_s, cluster.residents[0].die)
            try:
                await step(played, store, resident.remote)
            except (TrainingError, ExceptionGroup) as error:
                played.failure = str(cause_of(error))
        rows = await store.get([sample.turn.sample_id for of_policy in samples.values() for sample in of_policy])
        played.states = {row.sample_id: row.state for row in rows}
        await store.close()
        return played

    return run_virtual(run())


ROWS = st.lists(st.integers(0, 8), min_size=2, max_size=3)
PAUSES = st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5]), min_size=3, max_size=3)


def rows_of(make_samples: Samples, counts: Sequence[int]) -> dict[PolicyName, list[Sample]]:
    return {
        policy: own(make_samples(n, 8, policy=policy, empty=0.0))[:count]
        for n, (policy, count) in enumerate(zip(NAMES, counts, strict=False))
    }


@examples(max_examples=60, deadline=None)
@given(counts=ROWS, pauses=PAUSES, in_rounds=st.booleans(), ahead=st.booleans())
def test_every_row_is_accumulated_once(
    make_samples: Samples, counts: list[int], pauses: list[float], in_rounds: bool, ahead: bool
) -> None:
    played = play(rows_of(make_samples, counts), pauses, in_rounds=in_rounds, ahead=ahead)
    assert set(played.states.values()) <= {RowState.ACCUMULATED}
    assert played.held == set(played.states)
    calls = [micro_batch for call in played.calls for micro_batch in call]
    assert len(calls) == len(set(calls)) == sum(-(-count // 3) for count in counts)


@examples(max_examples=60, deadline=None)
@given(
    counts=ROWS,
    pauses=PAUSES,
    in_rounds=st.booleans(),
    ahead=st.booleans(),
    fault=st.one_of(
        st.fixed_dictionaries({"fails_at": st.integers(0, 3)}),
        st.fixed_dictionaries({"dies_after_s": st.floats(0.1, 6.0)}),
    ),
)
def test_a_lost_or_failing_pass_loses_no_rows(
    make_samples: Samples, counts: list[int], pauses: list[float], in_rounds: bool, ahead: bool, fault: dict[str, Any]
) -> None:
    """No row stays CLAIMED: it is READY again, or ACCUMULATED in a call that has ended."""
    played = play(rows_of(make_samples, counts), pauses, in_rounds=in_rounds, ahead=ahead, **fault)
    assert {played.states[sample_id] for sample_id in played.ready} <= {RowState.READY, RowState.ACCUMULATED}
    accumulated = {sample_id for sample_id, state in played.states.items() if state is RowState.ACCUMULATED}
    assert accumulated <= played.held
    if not played.failure:
        assert accumulated == set(played.states), "no call came to the fault"


def test_a_failing_pass_is_a_failure_of_every_policy_in_it(make_samples: Samples) -> None:
    """Witness for the above."""
    samples = rows_of(make_samples, [6, 6])
    failed = play(samples, [0.0, 0.0], in_rounds=True, ahead=False, fails_at=1)
    assert failed.calls == [("one/0/0", "two/0/0")]
    assert "accumulating one/0/1, two/0/1: ValueError: scripted failure" in failed.failure
    assert sorted(failed.states.values()) == [RowState.ACCUMULATED] * 6 + [RowState.READY] * 6
    lost = play(samples, [0.0, 0.0], in_rounds=True, ahead=False, dies_after_s=1.5)
    assert "trainer/one: it was lost in 'accumulate'" in lost.failure
    assert sorted(lost.states.values()) == [RowState.ACCUMULATED] * 6 + [RowState.READY] * 6


@examples(max_examples=60, deadline=None)
@given(counts=ROWS, pauses=PAUSES, ahead=st.booleans())
def test_in_rounds_time_does_not_decide_what_goes_together(
    make_samples: Samples, counts: list[int], pauses: list[float], ahead: bool
) -> None:
    samples = rows_of(make_samples, counts)
    found = play(samples, pauses, in_rounds=True, ahead=ahead).calls
    rounds = max(-(-count // 3) for count in counts)
    assert found == [
        tuple(f"{policy}/0/{n}" for policy, count in zip(samples, counts, strict=True) if 3 * n < count)
        for n in range(rounds)
    ]


def test_without_rounds_nobody_waits_for_a_policy_that_has_nothing(make_samples: Samples) -> None:
    """`one` begins alone, and `two` joins it as soon as it has a micro-batch."""
    played = play(rows_of(make_samples, [8, 3]), [0.0, 0.1], in_rounds=False, ahead=True)
    assert played.calls == [("one/0/0",), ("one/0/1", "two/0/0"), ("one/0/2",)]


def test_a_micro_batch_that_was_cancelled_while_it_ran_leaves_a_state_that_nobody_knows(make_samples: Samples) -> None:
    samples = rows_of(make_samples, [3])[NAMES[0]]
    ids = [sample.turn.sample_id for sample in samples]

    async def check() -> None:
        base = ScriptedBase(SqliteStore(agents=[AgentName("one")], columns=TURN_COLUMNS))
        base.change = lambda policy, method, *args: asyncio.sleep(0, Version(3))  # type: ignore[method-assign]
        async with Together(base, NAMES[:1], in_rounds=False).open() as together:
            trainer = together.trainers[NAMES[0]]
            first = asyncio.create_task(trainer.accumulate("mb/0", ids))
            waiting = asyncio.create_task(trainer.accumulate("mb/1", ids))
            await asyncio.sleep(0.5)
            waiting.cancel()
            await asyncio.wait([waiting])
            together.check(NAMES[0])
            first.cancel()
            await asyncio.wait([first])
            with pytest.raises(TrainingError, match="'accumulate' of mb/0 was cancelled while it ran, so its state is"):
                await trainer.step(Divisors())
            assert await trainer.load(Path("checkpoint")) == 3
            together.check(NAMES[0])

    run_virtual(check())
