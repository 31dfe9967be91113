"""Forward passes of a Hugging Face causal LM over samples: which rows go together, and what comes out of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.records import Sample
from flexmarl.training.backends.causal_lm import token_logprobs, trained_logits
from flexmarl.training.backends.value_head import ValueHead, hidden_states
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
    """[N] of the distribution that each token was drawn from; with gradient only if asked for."""
    values: Tensor | None = None
    """[N] what the value head expects in front of each token, with gradient."""


def plan(samples: Sequence[Sample], settings: TrainingSettings) -> list[Pass]:
    """Every sample once, in passes of at most `max_tokens_per_forward` tokens."""
    lengths = np.array([len(s.turn.prompt_ids) + s.num_tokens for s in samples], dtype=np.int64)
    return [Pass(rows) for rows in plan_passes(lengths, settings.max_tokens_per_forward)]


def run(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    value_head: ValueHead | None = None,
    entropy_gradient: bool = False,
) -> TokenOutputs:
    """One pass. Every sample must have sampled tokens."""
    with hidden_states(model) as hidden:
        logits, targets = trained_logits(model, _padded(samples))
    logprobs, entropy = token_logprobs(logits, targets, entropy_gradient=entropy_gradient)
    return TokenOutputs(logprobs, entropy, None if value_head is None else value_head(hidden[0]))


def _padded(samples: Sequence[Sample]) -> PaddedRows:
    return pad(
        [np.concatenate((s.turn.prompt_ids, s.turn.response_ids)) for s in samples],
        [np.arange(len(s.turn.prompt_ids) + s.num_tokens) >= len(s.turn.prompt_ids) for s in samples],
    )
