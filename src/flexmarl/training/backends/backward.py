"""Gradients of a network: forward and backward through one pass of samples."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from flexmarl.records import Sample, Version
from flexmarl.training.backends.causal_lm import Updater
from flexmarl.training.backends.forward import Pass
from flexmarl.training.backends.gradients import OpenSums
from flexmarl.training.backends.network import Network
from flexmarl.training.objective import Objective
from flexmarl.training.tree.figures import ROW_TOKENS, SAVED

Weighted = tuple[Sample, float]
"""A sample, and what each of its tokens weighs in S."""


class Backward:
    """Leaves gradients of kappa S in the network's parameters, or takes them out where they are of an open group."""

    def __init__(self, network: Network, objective: Objective, updater: Updater, *, scale: float) -> None:
        """`scale` is kappa, `training.accumulation_scale`."""
        self._network = network
        self._objective = objective
        self._updater = updater
        self._scale = scale

    def add(self, trained: Sequence[Weighted], together: Pass, version: Version) -> dict[str, float]:
        """Adds one pass over some of `trained` to the gradients; its sums, as a LossReport has them."""
        objective, network = self._objective, self._network
        samples, weights = _of(trained, together)
        reference = network.reference_logprobs(samples, together.tree) if objective.needs_reference else None
        with network.computing():
            outputs = network.outputs(samples, together.tree, entropy_gradient=objective.needs_entropy_gradient)
            loss, figures = objective(samples, weights, outputs, version=version, reference=reference)
            (loss * self._scale).backward()
        return objective.sums(samples, figures) | _computed(samples, together)

    def open_sums(self, members: Sequence[Weighted], together: Pass, version: Version) -> OpenSums:
        """Of one pass over some rows of one open credit group; no gradients stay behind.

        One forward pass; a second backward pass only where scores differ: then sum of c g is no multiple of g's.
        """
        samples, weights = _of(members, together)
        scores = [sample.advantage for sample in samples]
        plain_samples = [replace(sample, advantage=1.0) for sample in samples]
        with self._network.computing():
            outputs = self._network.outputs(samples, together.tree)
            plain_loss, figures = self._objective(plain_samples, weights, outputs, version=version)
            scored_loss, _ = self._objective(samples, weights, outputs, version=version)
            differ = len(set(scores)) > 1
            (plain_loss * self._scale).backward(retain_graph=differ)
            plain = self._updater.take_gradients()
            if differ:
                (scored_loss * self._scale).backward()
                scored = self._updater.take_gradients()
            else:
                scored = list(torch._foreach_mul(plain, scores[0]))
        return OpenSums(
            plain=plain,
            scored=scored,
            num_samples=len(samples),
            num_tokens=sum(sample.weight * sample.num_tokens for sample in samples),
            sums=self._objective.sums(plain_samples, figures) | _computed(samples, together),
            scored_loss=float(scored_loss.detach()),
        )


def _of(weighted: Sequence[Weighted], together: Pass) -> tuple[list[Sample], list[float]]:
    rows = [weighted[row] for row in together.rows]
    return [sample for sample, _ in rows], [weight for _, weight in rows]


def _computed(samples: Sequence[Sample], together: Pass) -> dict[str, float]:
    row_tokens = sum(len(sample.turn.prompt_ids) + sample.num_tokens - 1 for sample in samples)
    return {ROW_TOKENS: row_tokens, SAVED: together.tokens_saved}
