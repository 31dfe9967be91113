"""Rows that are trained before their group is complete give the update that they give afterwards."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from flexmarl.errors import TrainingError
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import CreditLine, MicroBatch, PolicyName, Sample
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import UpdateReport
from flexmarl.training.losses import LOSSES
from flexmarl.training.settings import AdamWSettings, TrainingSettings

torch.set_num_threads(1)
SOLVER = PolicyName("solver")
Samples = Callable[..., list[Sample]]
Model = Callable[..., PreTrainedModel]
few = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def chosen(loss: str = "ppo", **more) -> TrainingSettings:
    return TrainingSettings(
        dtype="float64",
        optimizer=AdamWSettings(learning_rate=1e-2, weight_decay=0.1),
        loss={"type": loss},  # type: ignore[arg-type]
        **more,
    )


def batch_of(name: str, samples: Sequence[Sample]) -> MicroBatch:
    return MicroBatch(micro_batch_id=name, policy=SOLVER, samples=tuple(samples))


def weights_of(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


class Groups:
    """Samples in credit groups: each has a score c, and its group a line, or is dropped."""

    def __init__(self, samples: Sequence[Sample], seed: int, binary: bool) -> None:
        random = np.random.default_rng(seed)
        count = 3
        self.names = [f"group-{number}" for number in range(count)]
        self.lines: dict[str, CreditLine | None] = {
            name: None if random.random() < 0.25 else CreditLine(random.normal(), random.choice([1.0, 0.3, np.inf]))
            for name in self.names
        }
        self.open: list[Sample] = []
        self.final: dict[str, Sample] = {}
        for sample in samples:
            name, score = str(random.choice(self.names)), float(random.integers(2) if binary else random.normal())
            self.open.append(replace(sample, advantage=score, open_group=name, weight=1.0))
            line = self.lines[name]
            if line is not None:
                advantage = line.scale * score + line.offset
                self.final[sample.turn.sample_id] = replace(sample, advantage=advantage, weight=1.0)


async def streamed(trainer: SingleProcessTrainer, groups: Groups, data: st.DataObject) -> None:
    """Accumulates rows one by one or more at a time; each group is closed at some moment, with rows still to come."""
    left, to_close, part = list(groups.open), dict(groups.lines), 0
    while left or to_close:
        if to_close and (not left or data.draw(st.booleans(), "close")):
            name = data.draw(st.sampled_from(sorted(to_close)), "which")
            tokens = await trainer.close_groups({name: to_close.pop(name)})
            assert tokens >= 0
            left = [
                groups.final[s.turn.sample_id] if s.open_group == name else s
                for s in left
                if s.open_group != name or s.turn.sample_id in groups.final
            ]
        elif left:
            size = data.draw(st.integers(1, len(left)), "size")
            await trainer.accumulate_batch(batch_of(f"open/{part}", left[:size]))
            left, part = left[size:], part + 1


@pytest.mark.parametrize("loss", sorted(name for name in LOSSES.built_in if LOSSES[name].linear_in_advantage))
@given(seed=st.integers(0, 10_000), binary=st.booleans(), data=st.data())
@few
def test_streaming_credit_equals_group_credit_in_any_split_and_whenever_groups_close(
    make_model: Model, make_samples: Samples, loss: str, seed: int, binary: bool, data: st.DataObject
) -> None:
    groups = Groups(make_samples(seed, 5, empty=0.0), seed, binary)
    divisors = divisors_of(groups.final.values())

    async def updated(stream: bool) -> tuple[torch.Tensor, object]:
        model = make_model(dtype=torch.float64)
        trainer = SingleProcessTrainer(SOLVER, model, chosen(loss, skip_zero_advantage=False), InlineObjectStore())
        if stream:
            await streamed(trainer, groups, data)
        else:
            await trainer.accumulate_batch(batch_of("whole", list(groups.final.values())))
        if not divisors.num_tokens:
            with pytest.raises(TrainingError, match="nothing to update from"):
                await trainer.step(divisors)
            return weights_of(model), None
        return weights_of(model), await trainer.step(divisors)

    (weights, report), (expected, expected_report) = asyncio.run(updated(True)), asyncio.run(updated(False))
    assert float((weights - expected).norm() / expected.norm()) <= 1e-10
    if report is not None and expected_report is not None:
        assert report.num_samples == expected_report.num_samples
        assert report.num_tokens == expected_report.num_tokens
        for name in ("loss", "grad_norm"):
            assert getattr(report, name) == pytest.approx(getattr(expected_report, name), rel=1e-9, abs=1e-10)
        assert report.means == pytest.approx(expected_report.means, rel=1e-9, abs=1e-10)


def test_sums_of_open_groups_are_kept_by_a_save_and_an_update_waits_for_their_lines(
    make_model: Model, make_samples: Samples, tmp_path: Path
) -> None:
    groups = Groups(make_samples(3, 5, empty=0.0), 4, binary=False)
    groups.lines = dict.fromkeys(groups.names, CreditLine(0.25, 2.0))

    async def scenario() -> None:
        trainer, restored = (
            SingleProcessTrainer(SOLVER, make_model(dtype=torch.float64), chosen(), InlineObjectStore()) for _ in "ab"
        )
        await trainer.accumulate_batch(batch_of("open", groups.open))
        divisors = divisors_of(groups.open)
        with pytest.raises(TrainingError, match="credit groups are open: group-"):
            await trainer.step(divisors)
        await trainer.save(tmp_path / "saved")
        await restored.load(tmp_path / "saved")
        updates: list[UpdateReport] = []
        for one in (trainer, restored):
            assert await one.close_groups(groups.lines) == divisors.num_tokens
            assert await one.close_groups(groups.lines) == 0.0, "a group is closed once"
            updates.append(await one.step(divisors))
        assert updates[0] == updates[1]

    asyncio.run(scenario())


def test_losses_and_terms_that_are_not_linear_in_the_advantage_are_refused_by_name() -> None:
    assert not all(LOSSES[loss].linear_in_advantage for loss in LOSSES.built_in)
    for loss in LOSSES.built_in:
        found = chosen(loss).streaming_obstacle
        assert (found == "") == LOSSES[loss].linear_in_advantage
    assert "entropy_coef" in chosen(entropy_coef=0.1).streaming_obstacle
    assert "kl" in chosen(kl={}).streaming_obstacle
    assert "critic" in chosen(critic={}).streaming_obstacle
    assert "correction" in chosen(correction={"type": "tis"}).streaming_obstacle
    by_episode = chosen().loss.model_copy(update={"aggregation": "traj-mean-token-mean"})
    assert "traj-mean-token-mean" in chosen().model_copy(update={"loss": by_episode}).streaming_obstacle
