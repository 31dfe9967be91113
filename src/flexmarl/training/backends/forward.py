"""Forward passes of a Hugging Face causal LM over samples: which rows go together, and what comes out of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import token_logprobs, trained_logits
from flexmarl.training.batching import PaddedRows, pad, plan_passes
from flexmarl.training.settings import TrainingSettings


@dataclass(frozen=True, slots=True)
class Pass:
    """Samples that go through the model together."""

    rows: NDArray[np.int64]
    """Their places among the samples that were planned."""


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Of N sampled tokens: those of the samples, in their order."""

    logprobs: Tensor
    """[N] at temperature 1, with gradient."""
    entropy: Tensor
    """[N] of the distribution that each token was drawn from; no gradient."""


def plan(samples: Sequence[Sample], settings: TrainingSettings) -> list[Pass]:
    """Every sample once, in passes of at most `max_tokens_per_forward` tokens."""
    lengths = np.array([len(s.turn.prompt_ids) + s.num_tokens for s in samples], dtype=np.int64)
    return [Pass(rows) for rows in plan_passes(lengths, settings.max_tokens_per_forward)]


def run(model: PreTrainedModel, samples: Sequence[Sample]) -> TokenOutputs:
    """One pass. Every sample must have sampled tokens."""
    return TokenOutputs(*token_logprobs(*trained_logits(model, _padded(samples))))


def _padded(samples: Sequence[Sample]) -> PaddedRows:
    return pad(
        [np.concatenate((s.turn.prompt_ids, s.turn.response_ids)) for s in samples],
        [np.arange(len(s.turn.prompt_ids) + s.num_tokens) >= len(s.turn.prompt_ids) for s in samples],
    )
