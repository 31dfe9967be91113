"""What rows share is computed once in the trainer, and an update says how much that was."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from transformers import PreTrainedModel

from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.records import MicroBatch, PolicyName, Sample, SampleId
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.backends.single import SingleProcessTrainer
from flexmarl.training.interface import UpdateReport
from flexmarl.training.settings import TrainingSettings

POLICY = PolicyName("solver")
Model = Callable[..., PreTrainedModel]
NAMES = count()


def answers(sample: Sample, prompt: list[int], *responses: list[int]) -> list[Sample]:
    """Rows with one prompt, and these responses."""
    rows = []
    for response in responses:
        logprobs = np.full(len(response), -1.0, np.float32)
        turn = replace(
            sample.turn,
            sample_id=SampleId(f"task_0_g{next(NAMES)}e0a0"),
            prompt_ids=np.array(prompt, np.int32),
            response_ids=np.array(response, np.int32),
            logprobs=logprobs,
            raw_logprobs=logprobs,
        )
        rows.append(Sample(turn=turn, advantage=1.0, episode_tokens=float(len(response))))
    return rows


def update(model: PreTrainedModel, samples: list[Sample], tree: str) -> UpdateReport:
    settings = TrainingSettings.model_validate({"tree": tree, "dtype": "float64"})
    trainer = SingleProcessTrainer(POLICY, model, settings, InlineObjectStore())

    async def one() -> UpdateReport:
        await trainer.accumulate_batch(MicroBatch(micro_batch_id="m", policy=POLICY, samples=tuple(samples)))
        return await trainer.step(divisors_of(samples))

    return asyncio.run(one())


def test_an_update_says_what_its_trees_saved(make_model: Model, make_samples: Callable[..., list[Sample]]) -> None:
    sample = make_samples(0)[0]
    # Each row takes 5 + 2 - 1 tokens; together they have the prompt, and a first token of each answer.
    samples = answers(sample, [1, 2, 3, 4, 5], [6, 7], [8, 9], [10, 11])
    report = update(make_model(), samples, "on")
    assert report.means["tokens_saved"] == 2 * 5
    assert report.means["tree_token_ratio"] == pytest.approx(18 / 8)
    alone = update(make_model(), samples, "off")
    assert (alone.means["tokens_saved"], alone.means["tree_token_ratio"]) == (0, 1)
    assert (report.loss, report.grad_norm) == pytest.approx((alone.loss, alone.grad_norm), rel=1e-12)
