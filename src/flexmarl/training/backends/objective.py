"""Objective on torch: what one forward pass adds to the loss, S of docs/math.md section 1, and its figures.

    S = sum of a_i (w_it L_it + beta KL_it - c H_it + k V_it)

The sum is over sampled tokens. L is the policy loss, w the correction's weight, KL the divergence from the reference, H
the entropy, and V the critic's loss; terms that are not set are left out. All share the row's weight a_i and the
divisor D.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexmarl.errors import TrainingError
from flexmarl.records import Divisors, LossReport, Sample, Version
from flexmarl.training.aggregation import divisor
from flexmarl.training.backends.forward import TokenOutputs
from flexmarl.training.batching import Rows, rows_of
from flexmarl.training.corrections import Sampled
from flexmarl.training.kl import divergence
from flexmarl.training.settings import TrainingSettings

MEASURED = ("clipped", "kl_to_sampler", "entropy")
TOKENS = "measured_tokens"
_SQUARED = "correction_weight_squared"


class Objective:
    """The un-normalised loss of a policy. The trainer divides by D when the step ends."""

    def __init__(self, settings: TrainingSettings) -> None:
        self._settings = settings
        self._loss = settings.loss
        self._correction = settings.correction
        self._kl = settings.kl if settings.kl is not None and settings.kl.where == "loss" else None
        self._critic = settings.critic

    @property
    def names(self) -> tuple[str, ...]:
        """Columns of a call's figures: the loss, the number of weighted tokens, and the measures."""
        return ("loss", TOKENS, *self.measures)

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of the figures that are summed over weighted tokens."""
        more = (("kl_to_reference", self._kl), ("value_loss", self._critic))
        return (*MEASURED, *self._correction.measures, *(name for name, is_set in more if is_set is not None))

    @property
    def skips_zero_advantages(self) -> bool:
        """True if rows with advantage 0 have no gradient and are in no figure that the step needs."""
        every_row = self._kl is not None or bool(self._settings.entropy_coef) or self._correction.normalises
        return self._loss.zero_advantage_is_zero_gradient and not every_row

    @property
    def needs_reference(self) -> bool:
        """True if a call must be given the reference's log-probabilities."""
        return self._kl is not None

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the outputs' entropy must carry gradient."""
        return bool(self._settings.entropy_coef)

    def __call__(
        self,
        samples: Sequence[Sample],
        weights: Sequence[float],
        outputs: TokenOutputs,
        *,
        version: Version,
        reference: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """S, a number with gradient; and the figures [B, len(names)] in float64, sums over each row's tokens.

        `weights` [B] are the weights of each row's tokens in S. Rows with weight 0 are skipped, whatever they hold.
        `version` is the trained version. `reference` [N] are the log-probabilities under the initial weights.
        """
        trained = [number for number, weight in enumerate(weights) if weight]
        tokens = _Tokens.of(samples, trained, outputs, reference)
        sampled = tokens.sampled(version)
        if self._loss.one_advantage_per_row:
            _require_one_advantage(tokens.samples, getattr(self._loss, "type", ""))
        advantages = tokens.joined([s.token_advantages for s in tokens.samples])
        old_logprobs = self._correction.old_logprobs(sampled)
        losses, clipped = self._loss.per_token(tokens.logprobs, old_logprobs, advantages, tokens.rows)
        losses = losses * self._correction.weights(sampled)
        drift = (sampled.current - sampled.recorded).clamp(-20, 20)
        entropy = tokens.entropy.detach()
        measured = [torch.ones_like(entropy), clipped.to(entropy.dtype), drift.exp() - 1 - drift, entropy]
        measured += self._correction.measured(sampled)
        if self._settings.entropy_coef:
            losses = losses - self._settings.entropy_coef * tokens.entropy
        if self._kl is not None:
            assert tokens.reference is not None, "the trainer asks what the objective needs"
            kl = divergence(self._kl.type, tokens.logprobs, tokens.reference)
            losses, measured = losses + self._kl.coef * kl, [*measured, kl.detach()]
        if self._critic is not None:
            error = self._value_losses(tokens)
            losses, measured = losses + self._critic.coef * error, [*measured, error.detach()]
        weighted = losses * tokens.per_token([weights[number] for number in trained])
        own = tokens.per_token([s.weight for s in tokens.samples])
        columns = [weighted.detach(), *(own * values for values in measured)]
        figures = torch.stack([tokens.rows.sum(column.double()) for column in columns], dim=1)
        every_row = figures.new_zeros(len(samples), len(columns))
        every_row[trained] = figures
        return weighted.sum(), every_row

    def sums(self, samples: Sequence[Sample], figures: Tensor) -> dict[str, float]:
        """Sums of the figures [B, len(names)] over the samples. Measures of corrections are also summed per agent."""
        table, by_name = figures.cpu().numpy(), {name: place for place, name in enumerate(self.names)}
        sums = {name: float(table[:, place].sum()) for name, place in by_name.items()}
        if self._correction.measures:
            for agent in sorted({sample.turn.agent for sample in samples}):
                rows = [number for number, sample in enumerate(samples) if sample.turn.agent == agent]
                for name in (TOKENS, *self._correction.measures):
                    sums[f"{name}/{agent}"] = float(table[rows, by_name[name]].sum())
        return sums

    def total(self, sums: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Total of the sums of several calls. Without any call, every name has 0."""
        total = dict.fromkeys(self.names, 0.0)
        for of_call in sums:
            for name, value in of_call.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def divisor(self, divisors: Divisors, reports: Iterable[LossReport]) -> float:
        """Divisor of the summed gradient: D, times the batch's mean correction weight if the correction normalises.

        The mean is over everything that was accumulated, so it is as exact as D, and known as late.
        """
        total = divisor(divisors, self._settings.loss.aggregation)
        if not self._correction.normalises:
            return total
        return total * (self.means(reports).get("correction_weight", 1.0) or 1.0)

    def means(self, reports: Iterable[LossReport]) -> dict[str, float]:
        """The measures per weighted token, over everything that was accumulated."""
        totals = self.total(report.sums for report in reports)
        means: dict[str, float] = {}
        for suffix in [name.removeprefix(TOKENS) for name in totals if name.startswith(TOKENS)]:
            tokens = totals[TOKENS + suffix]
            measured = [name for name in self.measures if tokens and name + suffix in totals]
            found = {name: totals[name + suffix] / tokens for name in measured}
            if _SQUARED in found:
                found["correction_effective"] = _effective_size(found["correction_weight"], found.pop(_SQUARED))
            means |= {name + suffix: mean for name, mean in found.items()}
        return means

    def _value_losses(self, tokens: "_Tokens") -> Tensor:
        """[N] the critic's loss; 0 where credit has found no return."""
        assert self._critic is not None
        assert tokens.values is not None, "the trainer of a critic has a value head"
        has_return = tokens.per_token([s.returns is not None for s in tokens.samples], torch.bool)
        nothing = [np.zeros(s.num_tokens) for s in tokens.samples]
        pairs = list(zip(tokens.samples, nothing, strict=True))
        returns = tokens.joined([n if s.returns is None else s.returns for s, n in pairs])
        expected = tokens.joined([n if s.values is None else s.values for s, n in pairs])
        has_value = tokens.per_token([s.values is not None for s in tokens.samples], torch.bool)
        old = expected.where(has_value, tokens.values.detach())
        return self._critic.per_token(tokens.values, old, returns).where(has_return, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The N sampled tokens of the rows that have a weight."""

    samples: Sequence[Sample]
    rows: Rows
    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None
    reference: Tensor | None

    @classmethod
    def of(
        cls, samples: Sequence[Sample], trained: Sequence[int], outputs: TokenOutputs, reference: Tensor | None
    ) -> "_Tokens":
        """The tokens of the rows `trained`. The others are left out, not multiplied by 0: NaN times 0 is NaN."""
        device = outputs.logprobs.device
        of_row = rows_of([s.num_tokens for s in samples], device)
        counts = torch.zeros(len(samples), dtype=torch.bool)
        counts[trained] = True
        kept = of_row.spread(counts.to(device)).nonzero().squeeze(-1)
        chosen = [samples[number] for number in trained]
        return cls(
            samples=chosen,
            rows=rows_of([s.num_tokens for s in chosen], device),
            logprobs=outputs.logprobs[kept],
            entropy=outputs.entropy[kept],
            values=None if outputs.values is None else outputs.values[kept],
            reference=None if reference is None else reference[kept],
        )

    def per_token(self, of_rows: Sequence[float] | Sequence[bool], dtype: torch.dtype | None = None) -> Tensor:
        """[N] the value of each token's row."""
        values = torch.tensor(of_rows, dtype=dtype or self.logprobs.dtype, device=self.logprobs.device)
        return self.rows.spread(values)

    def joined(self, arrays: Sequence[np.ndarray]) -> Tensor:
        """[N] from one array per row."""
        joined = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.float32), *arrays]))
        return joined.to(self.logprobs.device, self.logprobs.dtype)

    def sampled(self, version: Version) -> Sampled:
        """The tokens in the form that corrections take."""
        return Sampled(
            current=self.logprobs.detach(),
            recorded=self.joined([s.turn.raw_logprobs for s in self.samples]),
            drawn_from=self.joined([s.turn.logprobs for s in self.samples]),
            fresh=self.per_token([{r.version for r in s.turn.versions} <= {version} for s in self.samples], torch.bool),
            rows=self.rows,
        )


def _effective_size(mean_weight: float, mean_square: float) -> float:
    """(sum w)^2 / (n sum w^2): the share of the tokens that would carry as much information with equal weights."""
    return mean_weight**2 / mean_square if mean_square else 0.0


def _require_one_advantage(samples: Sequence[Sample], loss: str) -> None:
    for sample in samples:
        advantages = sample.token_advantages
        if len(advantages) and advantages.min() != advantages.max():
            raise TrainingError(
                f"sample {sample.turn.sample_id} has advantages from {advantages.min():g} to {advantages.max():g}, "
                f"but training.loss '{loss}' gives a row one; use type: gspo, or an estimator with one per row"
            )
