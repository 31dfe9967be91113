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

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import weights_key
from flexmarl.records import CreditLine, MicroBatch, PolicyName, Sample, Version
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.ranks import ALONE, Ranks, meet
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.settings import TrainingSettings
from tests.forked import FORKS

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


def trainer_of(ranks: Ranks, case: str, dtype: str = "float64") -> tuple[SingleProcessTrainer, InlineObjectStore]:
    chosen = {"optimizer": OPTIMIZER, "publish": "merged", "dtype": dtype, **CASES[case]}
    tied, _ = chosen.pop("tied", False), chosen.pop("open", False)
    objects = InlineObjectStore()
    settings = TrainingSettings.model_validate(chosen)
    return SingleProcessTrainer(SOLVER, model_of(tied=tied), settings, objects, seed=7, ranks=ranks), objects


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


class Pair:
    """Two ranks: this process, and a child that makes the same calls."""

    def __init__(self, folder: Path) -> None:
        self._here, there = FORKS.Pipe()
        self.child = FORKS.Process(target=_serve, args=(there, folder / "place"), daemon=True)
        self.child.start()
        there.close()
        self.ranks = meet(folder / "place", 0, 2)[2]

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """What `work(ranks, *args)` returns on the first rank, while the second one does the same."""
        self._here.send((work, args))
        found = work(self.ranks, *args)
        assert self._here.poll(120), "the second rank does not answer"
        error = self._here.recv()
        assert error is None, error
        return found

    def close(self) -> None:
        self._here.close()
        self.child.join(10)
        torch.distributed.destroy_process_group()


def _serve(pipe: Any, place: Path) -> None:
    torch.set_num_threads(1)
    ranks = meet(place, 1, 2)[2]
    while True:
        try:
            work, args = pipe.recv()
        except EOFError:
            return
        try:
            work(ranks, *args)
            pipe.send(None)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


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
