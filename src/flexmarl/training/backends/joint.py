"""Passes of several adapters on one base: each row goes through its own adapter, and the base computes for all at once.

rows of one ──► base W ─┬─ + A1, B1 ──► objective of one ──► S1 ─┐
rows of two ──►         └─ + A2, B2 ──► objective of two ──► S2 ─┴──► one backward pass: each adapter gets its own

The base has no peft layers here. Hooks on its linear layers add what the adapters add, each to its own rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.errors import TrainingError
from flexmarl.records import PolicyName, Sample, Version
from flexmarl.training.backends.adapter import Factors
from flexmarl.training.backends.forward import TokenOutputs, inputs_for, predict
from flexmarl.training.backends.gradients import Backward, Weighted, computed, rows_of_pass
from flexmarl.training.backends.logprobs import HeadForm, head_form
from flexmarl.training.backends.network import Network
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.merge import PrefixTree, side_by_side

Trained = Mapping[PolicyName, Sequence[Weighted]]
"""The rows of each policy's micro-batch that have a gradient."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one policy in a pass."""

    policy: PolicyName
    rows: NDArray[np.int64]
    """Their numbers among the rows of its micro-batch."""
    tree: PrefixTree | None = None
    """The same rows merged; in a pass all shares have one, or none."""
    tokens_saved: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A policy whose adapter is on the base."""

    backward: Backward
    version: Version
    """The version that it trains."""


class JointPasses:
    """Passes over rows of several policies."""

    def __init__(self, model: PreTrainedModel, settings: TrainingSettings, *, device: str, deterministic: bool) -> None:
        """`model` is the base. `settings` are those of any of the policies: they agree on how a pass is made."""
        bare = settings.model_copy(update={"lora": None, "kl": None, "critic": None})
        self._network = Network(model, bare, device=device, seed=0, deterministic=deterministic)
        model.requires_grad_(False)
        self._most, self._form = settings.max_tokens_per_forward, head_form(model)

    def plan(self, trained: Trained) -> list[tuple[Share, ...]]:
        """Divides the rows into passes. Trees are those that each policy's rows make by themselves.

        Equal rows give equal passes, in whatever order the policies are given.
        """
        trees, left = list[Share](), list[tuple[PolicyName, int, Sample]]()
        for policy in sorted(trained):
            samples = [sample for sample, _ in trained[policy]]
            for alone in self._network.plan(samples):
                if alone.tree is None:
                    left += [(policy, int(row), samples[row]) for row in alone.rows]
                else:
                    trees.append(Share(policy, alone.rows, alone.tree, alone.tokens_saved))
        passes = list(_filled(trees, self._most))
        for together in self._network.plan_rows([sample for _, _, sample in left]):
            chosen = sorted((left[row][:2] for row in together.rows), key=lambda row: row[0])
            of_policies = groupby(chosen, key=lambda row: row[0])
            passes.append(tuple(Share(policy, np.array([row for _, row in rows])) for policy, rows in of_policies))
        return passes

    def add(
        self, trained: Trained, shares: Sequence[Share], members: Mapping[PolicyName, Member]
    ) -> list[dict[str, float]]:
        """Adds one pass to the gradients of the policies. Returns the sums of each share for a LossReport."""
        rows = [rows_of_pass(trained[share.policy], share.rows) for share in shares]
        parts = [samples for samples, _ in rows]
        owners = [members[share.policy].backward for share in shares]
        references = self._references(shares, parts, owners)
        factors, found = [_factors(owner) for owner in owners], list[dict[str, float]]()
        needs_entropy = any(owner.objective.needs_entropy_gradient for owner in owners)
        with self._network.computing(), self._pass(shares, parts, factors) as run:
            total = torch.zeros(())
            for number, outputs in enumerate(run(owners, entropy_gradient=needs_entropy)):
                owner, (samples, weights) = owners[number], rows[number]
                version, reference = members[shares[number].policy].version, references.get(number)
                loss, figures = owner.objective(samples, weights, outputs, version=version, reference=reference)
                total = total.to(loss) + loss * owner.scale
                sums = owner.objective.sums(samples, figures)
                found.append(sums | computed(samples, shares[number].tokens_saved))
            total.backward()
        return found

    @torch.no_grad()
    def _references(
        self, shares: Sequence[Share], parts: Sequence[list[Sample]], owners: Sequence[Backward]
    ) -> dict[int, Tensor]:
        """Log-probabilities of the rows of each share that needs them, under the reference of its policy."""
        asked = [number for number, owner in enumerate(owners) if owner.objective.needs_reference]
        if not asked:
            return {}
        those, samples = [shares[number] for number in asked], [parts[number] for number in asked]
        factors = [_reference_factors(owners[number]) for number in asked]
        with self._network.computing(), self._pass(those, samples, factors) as run:
            return {number: outputs.logprobs for number, outputs in zip(asked, run(()), strict=True)}

    @contextmanager
    def _pass(
        self, shares: Sequence[Share], parts: Sequence[list[Sample]], factors: Sequence[Factors]
    ) -> Iterator["_Run"]:
        """Puts the adapters on the base for one pass. Stay inside for its backward, which may compute layers again."""
        model, trees = self._network.model, [share.tree for share in shares if share.tree is not None]
        inputs = inputs_for(model, [s for part in parts for s in part], side_by_side(trees) if trees else None)
        ids = inputs[0].input_ids
        trunk, head = [len(part) * ids.shape[1] for part in parts], [_tokens(part) for part in parts]
        if trees:
            trunk, head = [tree.num_tokens for tree in trees], [len(np.unique(tree.predictors)) for tree in trees]
            trunk[-1] += ids.size - sum(trunk)  # Padding, which is seen by nobody.
        with ExitStack() as hooks:
            form, outputs = self._form, model.get_output_embeddings()
            for name in dict.fromkeys(name for of_share, _ in factors for name in of_share):
                layer = model.get_submodule(name)
                form = None if layer is outputs else form  # A head with an adapter is more than a linear layer.
                hook = _Adapters(name, head if layer is outputs else trunk, [_of(name, each) for each in factors])
                hooks.enter_context(layer.register_forward_hook(hook))
            yield _Run(model, inputs, [_tokens(part) for part in parts], form)


@dataclass(frozen=True, slots=True)
class _Run:
    """One pass, with the adapters on the base."""

    model: PreTrainedModel
    inputs: Any
    """The result of `inputs_for`."""
    tokens: list[int]
    """Sampled tokens of each share."""
    form: HeadForm | None

    def __call__(self, owners: Sequence[Backward], *, entropy_gradient: bool = False) -> list[TokenOutputs]:
        """The outputs of each share, with the values of its owner's critic if there are owners."""
        rows, places, options = self.inputs
        asked: Any = {"form": self.form, "places": places, "entropy_gradient": entropy_gradient}
        found = predict(self.model, rows, **asked, **options)
        hidden = (found.hidden if places is None else found.hidden[places]).split(self.tokens)
        heads = [owner.network.value_head for owner in owners] or [None] * len(self.tokens)
        values = [None if head is None else head(states) for head, states in zip(heads, hidden, strict=True)]
        logprobs, entropy = found.logprobs.split(self.tokens), found.entropy.split(self.tokens)
        return [TokenOutputs(*of_share) for of_share in zip(logprobs, entropy, values, strict=True)]


@dataclass(frozen=True, slots=True)
class _Adapters:
    """Forward hook of one linear layer of the base: adds to each share of its tokens what the share's adapter adds."""

    name: str
    sizes: list[int]
    """Tokens of each share, in their order."""
    factors: list[tuple[Tensor, Tensor, float] | None]
    """A, B and the scale of each share; None if its policy has no adapter on this layer."""

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        tokens = inputs[0].flatten(0, -2)
        if len(tokens) != sum(self.sizes):
            raise TrainingError(
                f"layer '{self.name}' gets {len(tokens)} of the {sum(self.sizes)} tokens of a pass, so that nobody "
                f"knows whose they are; use training.together=false, or leave it out of lora.target_modules"
            )
        shares = zip(tokens.split(self.sizes), output.flatten(0, -2).split(self.sizes), self.factors, strict=True)
        return torch.cat([own if of is None else _adapted(x, own, *of) for x, own, of in shares]).view_as(output)


def _adapted(x: Tensor, own: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    return torch.addmm(own, x @ a.t(), b.t(), alpha=scaling)


def _of(name: str, factors: Factors) -> tuple[Tensor, Tensor, float] | None:
    pairs, scaling = factors
    return (*pairs[name], scaling) if name in pairs else None


def _factors(owner: Backward) -> Factors:
    assert owner.network.adapter is not None, "members have adapters"
    return owner.network.adapter.factors


def _reference_factors(owner: Backward) -> Factors:
    assert owner.network.adapter is not None, "members have adapters"
    return owner.network.adapter.reference_factors


def _tokens(samples: Sequence[Sample]) -> int:
    return sum(sample.num_tokens for sample in samples)


def _filled(shares: Sequence[Share], most: int) -> Iterator[tuple[Share, ...]]:
    """Passes of at most `most` nodes, filled in order; a larger tree goes alone."""
    filled, nodes = list[Share](), 0
    for share in shares:
        assert share.tree is not None
        if filled and nodes + share.tree.num_tokens > most:
            yield tuple(filled)
            filled, nodes = [], 0
        filled.append(share)
        nodes += share.tree.num_tokens
    if filled:
        yield tuple(filled)
