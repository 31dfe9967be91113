"""Gradient sums on a device: the passes that make them, the cache that holds them until the update, and their files.

rows with an advantage ───────────────────────────────► sums
rows of an open credit group ──► two sums of its own ──► scale x (sum of c g) + offset x (sum of g), or nothing
                                                         (docs/math.md, Streaming credit)

A manifest proves that a checkpoint's bytes are those that were written. The checks here find files of another model,
and files that were edited and sealed again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexmarl.errors import CheckpointError
from flexmarl.records import CreditLine, LossReport, Sample, Version
from flexmarl.training.backends.causal_lm import Updater
from flexmarl.training.backends.forward import Pass
from flexmarl.training.backends.network import Network
from flexmarl.training.backends.objective import Objective
from flexmarl.training.backends.ranks import Ranks
from flexmarl.training.tree.cost import ROW_TOKENS, SAVED


@dataclass(slots=True, kw_only=True)
class OpenSums:
    """Gradient sums of one credit group that is not complete."""

    plain: list[Tensor]
    """Sum of g_i, the gradient of row i with advantage 1."""
    scored: list[Tensor]
    """Sum of c_i g_i, where c_i is the score of row i."""
    num_samples: int
    num_tokens: float
    sums: dict[str, float] = field(default_factory=dict)
    """Sums of a LossReport, with advantage 1."""
    scored_loss: float = 0.0
    """The loss with advantage c_i."""

    def add(self, more: Self) -> None:
        """Adds other sums of the same group."""
        torch._foreach_add_(self.plain, more.plain)
        torch._foreach_add_(self.scored, more.scored)
        self.num_samples += more.num_samples
        self.num_tokens += more.num_tokens
        self.sums = {name: value + more.sums.get(name, 0.0) for name, value in {**more.sums, **self.sums}.items()}
        self.scored_loss += more.scored_loss

    def total(self, ranks: Ranks) -> None:
        """Makes the counts and sums those of all ranks. Each keeps its parts of the gradients."""
        figures = {"samples": self.num_samples, "tokens": self.num_tokens, "scored": self.scored_loss}
        totals, self.sums = ranks.total(figures), ranks.total(self.sums)
        self.num_samples, self.num_tokens = round(totals["samples"]), totals["tokens"]
        self.scored_loss = totals["scored"]

    def gradients(self, line: CreditLine) -> list[Tensor]:
        """scale x scored + offset x plain, computed in the memory of `scored`."""
        torch._foreach_mul_(self.scored, line.scale)
        torch._foreach_add_(self.scored, self.plain, alpha=line.offset)
        return self.scored

    def report(self, name: str, line: CreditLine) -> LossReport:
        """The report of a micro-batch of the same rows, as if their advantages had been known."""
        loss = line.scale * self.scored_loss + line.offset * self.sums["loss"]
        return LossReport(
            micro_batch_id=f"line/{name}",
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            sums={**self.sums, "loss": loss},
        )


class GradientCache:
    """One gradient sum per parameter, in the parameters' order. `sums` is None while there is no gradient."""

    def __init__(self) -> None:
        self.sums: list[Tensor] | None = None
        self.open: dict[str, OpenSums] = {}
        """Sums of open credit groups, by name: two per parameter each."""

    def add(self, gradients: list[Tensor]) -> None:
        """Adds gradients. It takes the tensors over, and the caller may not use them afterwards."""
        if self.sums is None:
            self.sums = gradients
        else:
            torch._foreach_add_(self.sums, gradients)

    def add_open(self, more: Mapping[str, OpenSums]) -> None:
        """Adds a micro-batch's sums of open credit groups, and takes them over."""
        for name, of_group in more.items():
            if name in self.open:
                self.open[name].add(of_group)
            else:
                self.open[name] = of_group

    def close(self, name: str, line: CreditLine | None) -> LossReport | None:
        """Closes an open group: adds its sums by `line`, or drops them if `line` is None. None if nothing was added."""
        of_group = self.open.pop(name, None)
        if of_group is None or line is None:
            return None
        report = of_group.report(name, line)
        self.add(of_group.gradients(line))
        return report

    def clear(self) -> None:
        """Drops all sums."""
        self.sums = None
        self.open.clear()

    @property
    def tensors(self) -> Sequence[Tensor]:
        """All tensors of the cache."""
        open_sums = [tensor for of_group in self.open.values() for tensor in (*of_group.plain, *of_group.scored)]
        return [*(self.sums or ()), *open_sums]

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        names = [each.name for each in fields(OpenSums)]
        open_sums = {group: {name: getattr(sums, name) for name in names} for group, sums in self.open.items()}
        return {"sums": self.sums, "open": open_sums}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self.sums = state["sums"]
        self.open = {name: OpenSums(**of_group) for name, of_group in state["open"].items()}


Weighted = tuple[Sample, float]
"""A sample, and the weight of each of its tokens in S."""


class Backward:
    """Makes gradients of kappa S. They stay in the network's parameters, but those of open groups are taken out."""

    def __init__(self, network: Network, objective: Objective, updater: Updater, *, scale: float) -> None:
        """`scale` is kappa, `training.accumulation_scale`."""
        self.network, self.objective = network, objective
        self._updater, self.scale = updater, scale

    def add(self, trained: Sequence[Weighted], together: Pass, version: Version) -> dict[str, float]:
        """Adds one pass over some of `trained` to the gradients. Returns its sums for a LossReport."""
        objective, network = self.objective, self.network
        samples, weights = rows_of_pass(trained, together.rows)
        reference = network.reference_logprobs(samples, together.tree) if objective.needs_reference else None
        with network.computing():
            outputs = network.outputs(samples, together.tree, entropy_gradient=objective.needs_entropy_gradient)
            if together.idle:
                outputs.nothing().backward()
                return {}
            loss, figures = objective(samples, weights, outputs, version=version, reference=reference)
            (loss * self.scale).backward()
        return objective.sums(samples, figures) | computed(samples, together.tokens_saved)

    def open_sums(self, members: Sequence[Weighted], together: Pass, version: Version) -> OpenSums:
        """Sums of one pass over some rows of one open credit group. No gradients stay in the parameters.

        It takes one forward pass. A second backward pass is needed only if scores differ: if they are equal, the sum of
        c g is a multiple of the sum of g. Several ranks look at the scores of all their rows: they need equally many.
        """
        samples, weights = rows_of_pass(members, together.rows)
        compared = samples if self.network.ranks.world == 1 else [sample for sample, _ in members]
        scores = [sample.advantage for sample in compared]
        differ = len(set(scores)) > 1
        plain_samples = [replace(sample, advantage=1.0) for sample in samples]
        with self.network.computing():
            outputs = self.network.outputs(samples, together.tree)
            if together.idle:
                plain_loss, scored_loss, sums, counted = outputs.nothing(), outputs.nothing(), {}, []
            else:
                plain_loss, figures = self.objective(plain_samples, weights, outputs, version=version)
                scored_loss, _ = self.objective(samples, weights, outputs, version=version)
                sums = self.objective.sums(plain_samples, figures) | computed(samples, together.tokens_saved)
                counted = samples
            (plain_loss * self.scale).backward(retain_graph=differ)
            plain = self._updater.take_gradients()
            if differ:
                (scored_loss * self.scale).backward()
                scored = self._updater.take_gradients()
            else:
                scored = list(torch._foreach_mul(plain, scores[0]))
        return OpenSums(
            plain=plain,
            scored=scored,
            num_samples=len(counted),
            num_tokens=sum(sample.weight * sample.num_tokens for sample in counted),
            sums=sums,
            scored_loss=float(scored_loss.detach()),
        )


def rows_of_pass(weighted: Sequence[Weighted], rows: NDArray[np.int64]) -> tuple[list[Sample], list[float]]:
    """The samples and the weights of some rows."""
    chosen = [weighted[row] for row in rows]
    return [sample for sample, _ in chosen], [weight for _, weight in chosen]


def computed(samples: Sequence[Sample], tokens_saved: int) -> dict[str, float]:
    """Sums of a LossReport on what a pass computed."""
    row_tokens = sum(len(sample.turn.prompt_ids) + sample.num_tokens - 1 for sample in samples)
    return {ROW_TOKENS: row_tokens, SAVED: tokens_saved}


MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors that AdamW keeps of each parameter."""


def check_weights(path: Path, weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the weights in folder `path` have the names, shapes and kinds of the masters."""
    if weights.keys() != masters.keys():
        differing = sorted(weights.keys() ^ masters.keys())
        raise CheckpointError(f"{path} is of another model: only one of the two has {', '.join(differing[:5])}")
    for name, master in masters.items():
        _check_tensor(path, name, weights[name], master)


def check_optimizer(path: Path, state: Mapping[str, Any], masters: Sequence[Tensor]) -> None:
    """Raises CheckpointError unless `state`, of AdamW, has the moments of every master, or of none before an update.

    `masters` are in the optimizer's order.
    """
    held: Mapping[int, Mapping[str, Any]] = state["state"]
    if not held:
        return
    for number, master in enumerate(masters):
        for moment in MOMENTS:
            found = held.get(number, {}).get(moment)
            if not isinstance(found, Tensor):
                raise CheckpointError(f"{path} lacks the moment {moment} of parameter {number} of {len(masters)}")
            _check_tensor(path, f"{moment} of parameter {number}", found, master)


def _check_tensor(path: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or not found.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} is {found.dtype} {tuple(found.shape)}, not a floating-point tensor of shape "
            f"{tuple(wanted.shape)}"
        )
