"""Decides what one forward pass adds to the loss: S of docs/math.md section 1, and what is measured beside it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flexmarl.records import Sample, Version
from flexmarl.training.backends.forward import TokenOutputs
from flexmarl.training.corrections.base import Sampled
from flexmarl.training.settings import TrainingSettings

MEASURED = ("clipped", "kl_to_sampler", "entropy")


class Objective:
    """The loss of a policy, un-normalised; the trainer divides by D when the step ends."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._loss = settings.loss
        self._correction = settings.correction

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sums that a call gives: the loss, how many weighted tokens were measured, and the measures."""
        return ("loss", "measured_tokens", *self.measures)

    @property
    def measures(self) -> tuple[str, ...]:
        """What is summed up over weighted tokens."""
        return (*MEASURED, *self._correction.measures)

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether rows that teach nothing have no gradient either."""
        return self._loss.zero_advantage_is_zero_gradient

    def __call__(
        self, samples: Sequence[Sample], weights: Sequence[float], outputs: TokenOutputs, *, version: Version
    ) -> tuple[Tensor, Tensor]:
        """S, a number with gradient; and the sums [len(names)] in float64.

        `weights` [B] are those of each row's tokens in S; `version` is the one that is trained.
        """
        logprobs, entropy = outputs.logprobs, outputs.entropy
        counts = torch.tensor([s.num_tokens for s in samples])
        row_of_token = torch.arange(len(samples)).repeat_interleave(counts)

        def per_token(values: Sequence[float] | Sequence[bool], dtype: torch.dtype = logprobs.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype)[row_of_token].to(logprobs.device)

        def joined(arrays: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays)).to(logprobs.device, logprobs.dtype)

        recorded = joined([s.turn.raw_logprobs for s in samples])
        tokens = Sampled(
            current=logprobs.detach(),
            recorded=recorded,
            drawn_from=joined([s.turn.logprobs for s in samples]),
            fresh=per_token([_all_at(version, sample) for sample in samples], torch.bool),
        )
        advantages = joined([s.token_advantages for s in samples])
        losses, clipped = self._loss.per_token(logprobs, self._correction.old_logprobs(tokens), advantages)
        loss = (losses * per_token(weights) * self._correction.weights(tokens)).sum()
        with torch.no_grad():
            drift = (logprobs - recorded).clamp(-20, 20)
            measured = (torch.ones_like(entropy), clipped.to(entropy.dtype), drift.exp() - 1 - drift, entropy)
            measured += self._correction.measured(tokens)
            row_weights = per_token([s.weight for s in samples])
            return loss, torch.stack([loss.detach(), *(row_weights @ values for values in measured)]).double()


def _all_at(version: Version, sample: Sample) -> bool:
    return all(run.version == version for run in sample.turn.versions)
