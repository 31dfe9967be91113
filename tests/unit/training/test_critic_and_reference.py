"""A critic on the policy's trunk, and a reference that stays what the run began with, in a whole trainer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from flexmarl.errors import TrainingError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import ObjectStore, weights_key
from flexmarl.records import MicroBatch, PolicyName, Sample, Turn, Version
from flexmarl.testing.training import check_trainer
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.causal_lm import KeepFloat64
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import RowReader
from flexmarl.training.settings import TrainingSettings

SOLVER = PolicyName("solver")
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
OPTIMIZER = {"learning_rate": 1e-2, "weight_decay": 0.1}
EVERYTHING: dict[str, Any] = {
    "kl": {"type": "k3", "coef": 0.3},
    "entropy_coef": 0.2,
    "critic": {"coef": 0.7, "clip": 0.1, "learning_rate": 3e-2},
}


def trainer_of(model: PreTrainedModel, **training: Any) -> SingleProcessTrainer:
    chosen = TrainingSettings.model_validate({"dtype": "float64", "optimizer": OPTIMIZER, **training})
    return SingleProcessTrainer(SOLVER, model, chosen, InlineObjectStore())


def with_returns(samples: Sequence[Sample]) -> list[Sample]:
    """Each token with an advantage, a return, and the value that credit saw."""
    random = np.random.default_rng(5)

    def drawn(sample: Sample) -> np.ndarray:
        return random.normal(size=sample.num_tokens)

    return [replace(s, advantages=drawn(s), returns=drawn(s), values=drawn(s)) for s in samples]


def batch_of(samples: Sequence[Sample], name: str = "mb") -> MicroBatch:
    return MicroBatch(micro_batch_id=name, policy=SOLVER, samples=tuple(samples))


def turns_of(samples: Sequence[Sample]) -> list[Turn]:
    return [sample.turn for sample in samples]


async def step(trainer: SingleProcessTrainer, *parts: Sequence[Sample]) -> None:
    for number, part in enumerate(parts):
        await trainer.accumulate_batch(batch_of(part, f"{trainer.version}/{number}"))
    await trainer.step(divisors_of(sample for part in parts for sample in part))


def naive_steps(model: PreTrainedModel, initial: PreTrainedModel, steps: Sequence[Sequence[Sample]]) -> torch.Tensor:
    """Row by row on PyTorch's plain AdamW: every term of `EVERYTHING`, token-mean, the head beside the model."""
    head = [torch.zeros(16, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
    trained = [*model.parameters(), *(part.requires_grad_() for part in head)]
    groups = [{"params": [*model.parameters()], "lr": 1e-2}, {"params": head, "lr": 3e-2}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, foreach=False, fused=False)
    for version, samples in enumerate(steps):
        total, tokens = torch.zeros((), dtype=torch.float64), 0.0
        for sample in samples:
            n = sample.num_tokens
            tokens += sample.weight * n
            if n and sample.weight:
                total = total + sample.weight * naive_row(model, initial, head, sample, fresh=version == 0)
        optimizer.zero_grad()
        (total / tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def naive_row(
    model: PreTrainedModel, initial: PreTrainedModel, head: Sequence[torch.Tensor], sample: Sample, *, fresh: bool
) -> torch.Tensor:
    n, ids = sample.num_tokens, torch.tensor([*sample.turn.prompt_ids, *sample.turn.response_ids], dtype=torch.long)
    out = model(input_ids=ids[None], output_hidden_states=True)
    every = out.logits[0, -n - 1 : -1].log_softmax(-1)
    values = out.hidden_states[-1][0, -n - 1 : -1] @ head[0] + head[1]
    with torch.no_grad():
        reference = initial(input_ids=ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    assert sample.returns is not None
    assert sample.values is not None
    for t in range(n):
        lp, a, v = every[t, ids[-n + t]], float(sample.token_advantages[t]), values[t]
        old = lp.detach() if fresh else float(sample.turn.raw_logprobs[t])
        rho = (lp - old).exp()
        policy = torch.maximum(-a * rho, -a * rho.clamp(0.8, 1.28))
        policy = policy.clamp(max=-a * 3.0) if a < 0 else policy
        d = (lp - reference[t, ids[-n + t]]).clamp(-20, 20)
        entropy = -(every[t].exp() * every[t]).sum()
        target, seen = float(sample.returns[t]), float(sample.values[t])
        value = torch.maximum((v - target) ** 2, (v.clamp(seen - 0.1, seen + 0.1) - target) ** 2) / 2
        total = total + policy + 0.3 * ((-d).exp() + d - 1) - 0.2 * entropy + 0.7 * value
    return total


def test_every_term_together_gives_the_weights_of_plain_pytorch(make_model: Model, make_samples: Samples) -> None:
    # The second step's rows are old, its reference is two updates away, and its trunk hears of the values.
    steps = [with_returns(make_samples(3, 4, version=version)) for version in (0, 0, 0)]

    async def ours() -> torch.Tensor:
        model = make_model()
        trainer = trainer_of(model, **EVERYTHING)
        for samples in steps:
            await step(trainer, samples[2:], [], samples[:2])
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found = asyncio.run(ours())
    with KeepFloat64():
        model, initial = make_model(dtype=torch.float64), make_model(dtype=torch.float64)
        expected = naive_steps(model, initial, steps)
    assert float((found - expected).norm() / expected.norm()) <= 1e-10


def test_what_is_published_and_exported_has_no_value_head_and_a_checkpoint_has(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    async def check() -> None:
        objects = InlineObjectStore()
        chosen = TrainingSettings.model_validate({"optimizer": OPTIMIZER, **EVERYTHING})
        trainer = SingleProcessTrainer(SOLVER, make_model(), chosen, objects)
        await step(trainer, with_returns(make_samples(1)))
        await trainer.publish(Version(1))
        published = await objects.get(weights_key(SOLVER, Version(1)))
        assert not [name for name in published if "value" in name]
        await trainer.save(tmp_path / "checkpoint")
        saved = load_file(tmp_path / "checkpoint" / "weights.safetensors")
        assert {"value_head.weight", "value_head.bias"} <= saved.keys()
        assert saved["value_head.weight"].abs().max() > 0, "it has learned something"
        await trainer.export(tmp_path / "export")
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert exported.state_dict().keys() == make_model().state_dict().keys()

    asyncio.run(check())


def test_a_resumed_run_compares_with_the_weights_it_began_with_and_keeps_its_critic(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    first, second = (with_returns(make_samples(seed)) for seed in (1, 2))

    async def check() -> None:
        undisturbed = trainer_of(make_model(), **EVERYTHING)
        at_first = await undisturbed.appraise_turns(turns_of(first))
        await step(undisturbed, first)
        await undisturbed.save(tmp_path / "checkpoint")
        resumed = trainer_of(make_model(), **EVERYTHING)
        await resumed.load(tmp_path / "checkpoint")
        for trainer in (undisturbed, resumed):
            await step(trainer, second)
        ends = [await trainer.appraise_turns(turns_of(first)) for trainer in (undisturbed, resumed)]
        for begun, went_on, came_back in zip(at_first, *ends, strict=True):
            assert went_on.values is not None
            assert begun.values is not None
            assert np.array_equal(went_on.values, came_back.values)
            assert np.array_equal(begun.reference, went_on.reference), "the reference never moves"
            assert np.array_equal(begun.reference, came_back.reference)
            assert not begun.values.any(), "a new critic expects nothing"
            assert went_on.values.any() or not len(went_on.values)

    asyncio.run(check())


def test_appraising_says_what_the_initial_weights_said_and_changes_nothing(
    make_model: Model, make_samples: Samples
) -> None:
    samples = make_samples(4)

    async def check() -> None:
        trainer = trainer_of(make_model(), kl={"type": "k1", "where": "reward"})
        before = await trainer.logprobs(batch_of(samples))
        await trainer.accumulate_batch(batch_of(samples, "mb/0"))
        appraised = await trainer.appraise_turns(turns_of(samples))
        for sample, said, lp in zip(samples, appraised, before, strict=True):
            assert said.values is None
            assert said.reference is not None
            assert said.reference.shape == (sample.num_tokens,)
            assert np.array_equal(said.reference, lp)
        await trainer.step(divisors_of(samples))
        plain = trainer_of(make_model())
        await step(plain, samples)
        after = [await one.logprobs(batch_of(samples)) for one in (trainer, plain)]
        for one, other in zip(*after, strict=True):
            assert np.array_equal(one, other), "in the reward it is no business of the loss"

    asyncio.run(check())


@pytest.mark.parametrize(("kind", "of"), [("k1", lambda d: d), ("k3", lambda d: np.exp(-d) + d - 1)])
def test_the_divergence_that_a_reward_pays_for_is_of_what_the_engine_recorded(
    make_model: Model, make_samples: Samples, kind: str, of: Callable[[np.ndarray], np.ndarray]
) -> None:
    samples = make_samples(4)

    async def check() -> None:
        trainer = trainer_of(make_model(), kl={"type": kind, "where": "reward"})
        before = await trainer.logprobs(batch_of(samples))
        await step(trainer, samples)
        for sample, said, initial in zip(samples, await trainer.appraise_turns(turns_of(samples)), before, strict=True):
            drift = sample.turn.raw_logprobs.astype(np.float64) - initial
            assert said.divergence == pytest.approx(of(drift), rel=1e-12)
        in_loss = trainer_of(make_model(), kl={"type": "k2"})
        assert all(said.divergence is None for said in await in_loss.appraise_turns(turns_of(samples)))

    asyncio.run(check())


def test_without_settings_that_need_it_there_is_nothing_to_say(make_model: Model, make_samples: Samples) -> None:
    appraised = asyncio.run(trainer_of(make_model()).appraise_turns(turns_of(make_samples(4))))
    assert all(said.values is None and said.reference is None for said in appraised)


def test_a_critic_learns_what_follows(make_model: Model, make_samples: Samples) -> None:
    samples = [replace(s, advantage=0.0, weight=1.0, returns=np.full(s.num_tokens, 2.0)) for s in make_samples(6)]

    async def check() -> None:
        critic = {"clip": None, "learning_rate": 0.1}
        trainer = trainer_of(make_model(), critic=critic, optimizer={"learning_rate": 0.1})
        for _ in range(60):
            await step(trainer, samples)
        said = [one.values for one in await trainer.appraise_turns(turns_of(samples))]
        assert np.concatenate([values for values in said if values is not None]) == pytest.approx(2.0, abs=0.2)

    asyncio.run(check())


def test_a_critic_has_a_rate_of_its_own_on_the_policys_schedule(make_model: Model, make_samples: Samples) -> None:
    samples = [replace(s, advantage=0.0, weight=1.0, returns=np.full(s.num_tokens, 2.0)) for s in make_samples(6)]
    optimizer = {"learning_rate": 1e-6}
    assert TrainingSettings.model_validate({"critic": {}}).critic.learning_rate == 1e-5  # type: ignore[union-attr]

    async def learned(rate: float, **training: Any) -> tuple[float, float]:
        """Largest change of a weight of the policy, and of the head."""
        model = make_model()
        trainer = trainer_of(model, critic={"learning_rate": rate}, optimizer=optimizer, **training)
        head = trainer._network.extra["value_head.weight"]
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            await step(trainer, samples)
        policy = max(float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True))
        return policy, float(head.detach().abs().max())

    async def check() -> None:
        for rate in (1e-5, 1e-2):
            policy, head = await learned(rate)
            assert head == pytest.approx(3 * rate, rel=0.05), "three steps of Adam, all one way"
            assert policy < 3.1e-6
        halved = {"type": "linear", "decay_steps": 4}
        assert (await learned(1e-2, schedule=halved))[1] == pytest.approx((1 + 0.75 + 0.5) * 1e-2, rel=0.05)

    asyncio.run(check())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trainer_with_every_term_keeps_the_contract(
    make_model: Model, make_samples: Samples, tmp_path: Path, dtype: str
) -> None:
    def make(objects: ObjectStore, rows: RowReader) -> SingleProcessTrainer:
        chosen = TrainingSettings.model_validate({"dtype": dtype, "optimizer": OPTIMIZER, **EVERYTHING})
        return SingleProcessTrainer(SOLVER, make_model(), chosen, objects, rows=rows)

    samples = with_returns(make_samples(1, 6))
    batches = [batch_of(samples[:3], "mb/1"), batch_of(samples[3:], "mb/2")]
    asyncio.run(check_trainer(make, batches, tmp_path, streams=False))


ADAPTER = {"lora": {"rank": 2}}


@pytest.mark.parametrize("more", [{}, ADAPTER], ids=["full", "adapter"])
def test_after_a_reset_the_divergence_is_0_and_the_optimiser_is_empty(
    make_model: Model, make_samples: Samples, more: dict[str, Any]
) -> None:
    """The rows are of every version, so the divergence is that of the weights, whoever sampled them."""
    samples = make_samples(6)
    trainer = trainer_of(make_model(), kl={"type": "k3", "coef": 0.3}, **more)

    async def divergence_of_an_update() -> float:
        await trainer.accumulate_batch(batch_of(samples, f"{trainer.version}"))
        return (await trainer.step(divisors_of(samples))).means["kl_to_reference"]

    async def play() -> list[float]:
        seen = [await divergence_of_an_update() for _ in range(3)]
        await trainer.reset_reference()
        assert not trainer._updater.optimizer.state, "the optimiser begins anew"
        return [*seen, await divergence_of_an_update(), await divergence_of_an_update()]

    first, *drifted, reset, again = asyncio.run(play())
    assert first == reset == 0.0
    assert all(drift > 0 for drift in (*drifted, again)), "witness: an update moves the policy from its reference"


@pytest.mark.parametrize("more", [{}, ADAPTER], ids=["full", "adapter"])
def test_a_reset_reference_is_in_the_checkpoint(
    make_model: Model, make_samples: Samples, tmp_path: Path, more: dict[str, Any]
) -> None:
    samples = make_samples(6)

    def made() -> SingleProcessTrainer:
        return trainer_of(make_model(), kl={"type": "k3", "coef": 0.3}, **more)

    async def ended(disturbed: bool) -> dict[str, torch.Tensor]:
        trainer = made()
        await step(trainer, samples)
        await trainer.reset_reference()
        await step(trainer, samples)
        if disturbed:
            await trainer.save(tmp_path / "killed")
            trainer = made()
            await trainer.load(tmp_path / "killed")
        await step(trainer, samples)
        return {name: tensor.detach().clone() for name, tensor in trainer._updater.masters.items()}

    undisturbed, resumed = asyncio.run(ended(False)), asyncio.run(ended(True))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in undisturbed.items())
    assert (tmp_path / "killed" / "reference.safetensors").exists()


def test_a_reference_is_not_reset_under_gradients_or_without_one(make_model: Model, make_samples: Samples) -> None:
    samples = make_samples(4)

    async def refused(trainer: SingleProcessTrainer, because: str) -> None:
        with pytest.raises(TrainingError, match=because):
            await trainer.reset_reference()

    async def play() -> None:
        await refused(trainer_of(make_model()), "no reference to reset; set training.kl")
        trainer = trainer_of(make_model(), kl={})
        await trainer.accumulate_batch(batch_of(samples))
        await refused(trainer, "gradients are accumulated")

    asyncio.run(play())
