"""Two ranks of one policy, real processes on gloo, train as one process does. This process is the first of them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from flexmarl.cluster.allocation import Lease
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.objects.backends.memory import InlineObjectStore, ShmObjectStore
from flexmarl.objects.interface import ObjectStore, weights_key
from flexmarl.records import CreditLine, MicroBatch, PolicyName, Sample, Version
from flexmarl.testing.training import accumulate, check_process_group, check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.rank import RankHost, Trained
from flexmarl.training.backends.ranks import ALONE, Ranks, meet
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.group import GroupTrainer, SetAside
from flexmarl.training.interface import HeldRows, RowReader
from flexmarl.training.settings import TrainingSettings
from tests.forked import FORKS
from tests.unit.training.standing_ranks import StandingRanks

pytestmark = pytest.mark.xdist_group("ranks")
Samples = Callable[..., list[Sample]]
SOLVER = PolicyName("solver")
OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1}
CASES: Mapping[str, dict[str, Any]] = {
    "full": {},
    "tied head": {"tied": True},
    "adapter": {"lora": {"rank": 2}, "publish": "merged", "kl": {"coef": 0.3}},
    "adapter alone": {"lora": {"rank": 2}, "publish": "adapter"},
    "tree": {"tree": "on", "tied": True},
    "critic": {"critic": {"learning_rate": 3e-2}},
    "divergence and entropy": {"kl": {"coef": 0.3}, "entropy_coef": 0.01, "tied": True},
    "open groups": {"open": True},
    "checkpointed activations": {"activation_checkpointing": True},
}


def model_of(*, tied: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=23, tie_word_embeddings=tied, **sizes, **more)).double()


def settings_of(case: str, dtype: str = "float64") -> TrainingSettings:
    chosen = {name: value for name, value in CASES[case].items() if name not in ("tied", "open")}
    return TrainingSettings.model_validate({"optimizer": OPTIMIZER, "publish": "merged", "dtype": dtype, **chosen})


def trainer_of(ranks: Ranks, case: str, dtype: str = "float64") -> tuple[SingleProcessTrainer, InlineObjectStore]:
    model, objects = model_of(tied=CASES[case].get("tied", False)), InlineObjectStore()
    return SingleProcessTrainer(SOLVER, model, settings_of(case, dtype), objects, seed=7, ranks=ranks), objects


def micro_batches(samples: Sequence[Sample], step: int, case: str) -> list[MicroBatch]:
    """One of many rows, one of a single row, one whose advantages are all zero."""
    if case == "critic":
        samples = [replace(s, returns=np.linspace(0, 1, s.num_tokens, dtype=np.float32)) for s in samples]
    if case == "open groups":
        samples = [replace(s, open_group=f"g{n % 2}") if n % 3 else s for n, s in enumerate(samples)]
    zero = [replace(sample, advantage=0.0, open_group="") for sample in samples[-3:]]
    parts = [samples[:-5], samples[-5:-4], samples[-4:-3], zero]
    return [
        MicroBatch(micro_batch_id=f"{step}/{number}", policy=SOLVER, samples=tuple(part))
        for number, part in enumerate(parts)
    ]


def play(ranks: Ranks, case: str, steps: Sequence[Sequence[Sample]], dtype: str = "float64") -> dict[str, Any]:
    """The reports and the weights of an update for each of `steps`, and what is asked of the trainer beside them."""

    async def trained() -> dict[str, Any]:
        trainer, objects = trainer_of(ranks, case, dtype)
        reports, updates = [], []
        for number, samples in enumerate(steps):
            batches = micro_batches(samples, number, case)
            reports += [await trainer.accumulate_batch(batch) for batch in batches]
            if case == "open groups":
                await trainer.close_groups({"g0": CreditLine(baseline=0.5, divisor=2.0), "g1": None})
            updates.append(await trainer.step(divisors_of([s for batch in batches for s in batch.samples])))
        version = Version(len(steps))
        await trainer.publish(version)
        asked = MicroBatch(micro_batch_id="asked", policy=SOLVER, samples=tuple(steps[0]))
        return {
            "reports": [report.sums | {"samples": report.num_samples} for report in reports],
            "updates": [{**u.means, "norm": u.grad_norm, "loss": u.loss, "tokens": u.num_tokens} for u in updates],
            "logprobs": await trainer.logprobs(asked),
            "appraised": await trainer.appraise_turns([sample.turn for sample in steps[0]]),
            "weights": dict(await objects.get(weights_key(SOLVER, version))) if ranks.is_first else {},
        }

    return asyncio.run(trained())


SAVED = ("tokens_saved", "tree_token_ratio")


def without(figures: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    return {name: figure for name, figure in figures.items() if name not in names}


def rank_host(views: Mapping[int, Ranks], case: str, objects: ObjectStore, rows: HeldRows, source: Path) -> RankHost:
    """A rank of a place, which computes on a thread of its own: the other one is called while it does."""
    settings, thread = settings_of(case), DeviceThread()

    def make(policy: PolicyName, model: PreTrainedModel, ranks: Ranks) -> SingleProcessTrainer:
        options: Any = {"rows": rows, "seed": 7, "ranks": ranks, "thread": thread}
        return SingleProcessTrainer(policy, model, settings, objects, **options)

    policies = {SOLVER: Trained(source=source, settings=settings)}
    return RankHost(policies, objects, make, thread=thread, ranks=views)


class SecondRank:
    """The rank in the child. A call brings the rows that it may need."""

    def __init__(self, pipe: Any, rows: HeldRows) -> None:
        self._pipe, self._rows = pipe, rows
        self._lock = asyncio.Lock()

    def __getattr__(self, method: str) -> Callable[..., Any]:
        async def call(*args: Any, **options: Any) -> Any:
            async with self._lock:
                self._pipe.send(("call", (method, args, options, list(self._rows._samples.values()))))
                assert await asyncio.to_thread(self._pipe.poll, 120), f"the second rank does not answer '{method}'"
                found = self._pipe.recv()
            if isinstance(found, Exception):
                raise found
            return found

        return call


class Pair:
    """Two ranks: this process, and a child that makes the same calls."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here, there = FORKS.Pipe()
        self.child = FORKS.Process(target=_serve, args=(there, folder / "place"), daemon=True)
        self.child.start()
        there.close()
        self.views = meet(folder / "place", 0, 2)
        self.ranks = self.views[2]
        self.source = folder / "model"
        model_of(tied=True).save_pretrained(self.source)

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """What `work(ranks, *args)` returns on the first rank, while the second one does the same."""
        self._here.send(("run", (work, args)))
        found = work(self.ranks, *args)
        assert self._here.poll(120), "the second rank does not answer"
        error = self._here.recv()
        assert error is None, error
        return found

    def place(self, case: str, objects: ObjectStore, rows: HeldRows, shared: Path | None = None) -> StandingRanks:
        """A new place of both. The child's objects are in the folder `shared`, if it needs any."""
        self._here.send(("rank", (case, self.source, shared)))
        return StandingRanks(rank_host(self.views, case, objects, rows, self.source), SecondRank(self._here, rows))

    def close(self) -> None:
        self._here.close()
        self.child.join(10)
        torch.distributed.destroy_process_group()


def _serve(pipe: Any, place: Path) -> None:
    torch.set_num_threads(1)
    views = meet(place, 1, 2)
    rows, host = HeldRows(), None
    with asyncio.Runner() as runner:
        while True:
            try:
                what, given = pipe.recv()
            except (EOFError, ConnectionResetError):
                return
            try:
                if what == "rank":
                    case, source, shared = given
                    objects = InlineObjectStore() if shared is None else ShmObjectStore(shared)
                    rows = HeldRows()
                    host = rank_host(views, case, objects, rows, source)
                elif what == "call":
                    method, args, options, samples = given
                    rows.hold(samples)
                    pipe.send(runner.run(getattr(host, method)(*args, **options)))
                else:
                    work, args = given
                    work(views[2], *args)
                    pipe.send(None)
            except Exception as error:
                pipe.send(error if what == "call" else f"{type(error).__name__}: {error}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("ranks"))
    yield pair
    pair.close()


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_after_five_steps(pair: Pair, make_samples: Samples, case: str) -> None:
    steps = [make_samples(seed, 7, version=seed) for seed in range(5)]
    alone, together = play(ALONE, case, steps), pair.run(play, case, steps)
    assert together["weights"].keys() == alone["weights"].keys()
    for name, tensor in alone["weights"].items():
        torch.testing.assert_close(together["weights"][name], tensor, rtol=0, atol=1e-9)
    for kind in ("reports", "updates"):
        for one, other in zip(alone[kind], together[kind], strict=True):
            apart = SAVED if case == "tree" else ()  # A prefix of rows on two ranks is computed twice.
            assert without(other, apart) == pytest.approx(without(one, apart), rel=1e-9, abs=1e-12)
    for one, other in zip(alone["logprobs"], together["logprobs"], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-6)
    for one, other in zip(alone["appraised"], together["appraised"], strict=True):
        for figure in ("values", "reference"):
            held = getattr(one, figure)
            assert held is None or np.allclose(getattr(other, figure), held, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "dtype", "apart"),
    [("tied head", "float32", 1e-5), ("tied head", "bfloat16", 1e-2), ("adapter", "bfloat16", 0.2)],
)
def test_in_lower_precision_two_ranks_publish_what_one_process_does(
    pair: Pair, make_samples: Samples, case: str, dtype: str, apart: float
) -> None:
    """To the digits of the type; of a merged adapter to two steps of AdamW, times its scale of 16."""
    steps = [make_samples(seed, 7, version=seed) for seed in range(2)]
    alone, together = play(ALONE, case, steps, dtype), pair.run(play, case, steps, dtype)
    for one, other in zip(alone["updates"], together["updates"], strict=True):
        assert other["norm"] == pytest.approx(one["norm"], rel=0.1)
    for name, tensor in alone["weights"].items():
        assert together["weights"][name].dtype == tensor.dtype
        torch.testing.assert_close(together["weights"][name], tensor, rtol=apart, atol=apart)


HERE = Lease(place=0, holder=SOLVER, because="the test")
RESUMED = ("critic", "adapter", "divergence and entropy")


def two_batches(samples: Sequence[Sample]) -> list[MicroBatch]:
    parts = samples[::2], samples[1::2]
    return [MicroBatch(micro_batch_id=f"mb/{n}", policy=SOLVER, samples=tuple(part)) for n, part in enumerate(parts)]


@pytest.mark.parametrize("case", ["full", *RESUMED])
def test_a_group_of_two_ranks_keeps_the_contract_of_a_trainer(
    pair: Pair, make_samples: Samples, tmp_path: Path, case: str
) -> None:
    async def make(objects: ObjectStore, rows: RowReader) -> GroupTrainer:
        assert isinstance(rows, HeldRows)
        trainer = GroupTrainer(SOLVER, [pair.place(case, objects, rows)], world=2)
        await trainer.resume(HERE)
        return trainer

    asyncio.run(check_trainer(make, two_batches(make_samples(14, 8)), tmp_path, streams=case == "full"))


@pytest.mark.parametrize("case", RESUMED)
def test_a_group_of_two_ranks_keeps_the_contract_of_a_process_group(
    pair: Pair, make_samples: Samples, tmp_path: Path, case: str
) -> None:
    """So suspend, then resume, is exact to the bit from two ranks to two."""
    made: list[Path] = []

    def make(objects: ObjectStore, rows: RowReader) -> tuple[GroupTrainer, GroupTrainer]:
        assert isinstance(rows, HeldRows)
        made.append(tmp_path / f"objects{len(made)}")
        shared = ShmObjectStore(made[-1])
        shared.create()
        place = pair.place(case, shared, rows, made[-1])
        trainer = GroupTrainer(SOLVER, [place, place], world=2)
        return trainer, trainer

    asyncio.run(check_process_group(make, two_batches(make_samples(14, 8))))


@pytest.mark.parametrize("case", RESUMED)
def test_a_state_moves_between_one_rank_and_two_bit_by_bit(
    pair: Pair, make_samples: Samples, tmp_path: Path, case: str
) -> None:
    """1 -> 2 -> 1 -> 2, with gradient sums; then the update of two ranks is that of one."""
    samples = make_samples(14, 8)
    first, second = two_batches(samples)

    async def play(worlds: Sequence[int], folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        objects, rows, states = ShmObjectStore(folder), HeldRows(samples), list[dict[str, Any]]()
        objects.create()
        place = pair.place(case, objects, rows, folder)
        aside: SetAside | None = None
        for number, world in enumerate(worlds):
            group = GroupTrainer(SOLVER, [place], world=world)
            group._aside = aside
            await group.resume(HERE)
            if number == 0:
                await accumulate(group, first)
                await group.step(divisors_of(first.samples))
                await accumulate(group, second)
            if number == len(worlds) - 1:
                await group.step(divisors_of(second.samples))
                await group.publish(Version(2))
                return states, dict(await objects.get(weights_key(SOLVER, Version(2))))
            await group.suspend()
            aside = group._aside
            assert aside is not None
            states.append({kind: dict(await objects.get(key)) for kind, key in aside.blocks.items()})
        raise AssertionError("there is a last world")

    states, moved = asyncio.run(play((1, 2, 1, 2), tmp_path / "moved"))
    _, alone = asyncio.run(play((1,), tmp_path / "alone"))
    for kind, tensors in states[0].items():
        for name, tensor in tensors.items():
            assert all(torch.equal(state[kind][name], tensor) for state in states[1:]), f"{kind} of {name}"
    assert {"moments", "sums"} <= states[0].keys(), "witness: both were there"
    for name, tensor in alone.items():
        torch.testing.assert_close(moved[name], tensor, rtol=0, atol=1e-10)


def test_files_of_two_ranks_are_those_of_one(pair: Pair, make_samples: Samples, tmp_path: Path) -> None:
    """Saved by two and loaded by one, and the other way round; both go on to the same weights."""
    steps = [make_samples(seed, 7, version=seed) for seed in range(2)]
    straight = play(ALONE, "critic", steps)["weights"]
    play_half(ALONE, "save", steps, tmp_path / "one")
    pair.run(play_half, "save", steps, tmp_path / "two")
    for found in (
        pair.run(play_half, "load", steps, tmp_path / "one"),
        play_half(ALONE, "load", steps, tmp_path / "two"),
    ):
        for name, tensor in straight.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9)


def play_half(ranks: Ranks, half: str, steps: Sequence[Sequence[Sample]], folder: Path) -> dict[str, torch.Tensor]:
    """The first step and half of the rows of the second, saved; or the other rows, the update, and its weights."""

    async def played() -> dict[str, torch.Tensor]:
        trainer, objects = trainer_of(ranks, "critic")
        of_first, of_second = (micro_batches(samples, number, "critic") for number, samples in enumerate(steps))
        rest = of_second[1:]
        if half == "save":
            for batch in of_first:
                await trainer.accumulate_batch(batch)
            await trainer.step(divisors_of([s for batch in of_first for s in batch.samples]))
            await trainer.accumulate_batch(of_second[0])
            await trainer.save(folder)
            return {}
        assert await trainer.load(folder) == 1
        for batch in rest:
            await trainer.accumulate_batch(batch)
        await trainer.step(divisors_of([s for batch in of_second for s in batch.samples]))
        await trainer.publish(Version(2))
        return dict(await objects.get(weights_key(SOLVER, Version(2)))) if ranks.is_first else {}

    return asyncio.run(played())
