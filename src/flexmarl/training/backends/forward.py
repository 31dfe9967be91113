"""Forward passes of a Hugging Face causal LM over samples: which samples go together, and what comes out of them.

`plan` divides samples into passes, along prefix trees or as padded rows. `run` makes one pass. `ValueHead` is the
critic's part of the network. `predict` serves supervised training too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from flexmarl.records import IntArray, Sample
from flexmarl.training.backends.logprobs import LEAN_FROM, HeadForm, lean_logprobs, whole_logprobs
from flexmarl.training.batching import PASS_OVERHEAD_TOKENS, PaddedRows, pad, plan_passes
from flexmarl.training.settings import TrainingSettings
from flexmarl.training.tree.attention import along
from flexmarl.training.tree.cost import ModelShape, pays, shares_enough
from flexmarl.training.tree.merge import PrefixTree, cut, merge, sort_rows


@dataclass(frozen=True, slots=True)
class Predicted:
    """Outputs of a model for N trained tokens."""

    logprobs: Tensor
    """[N] log-probabilities at temperature 1."""
    entropy: Tensor
    """[N] entropy of the distribution at each token, at temperature 1; with gradient only if asked for."""
    hidden: Tensor
    """[M, H] inputs of the model's head."""


def predict(
    model: PreTrainedModel,
    rows: PaddedRows,
    *,
    form: HeadForm | None,
    places: Tensor | None = None,
    entropy_gradient: bool = False,
    **options: Any,
) -> Predicted:
    """Runs the model over rows. Target i is predicted at `rows.positions[places[i]]`, or at [i] without `places`.

    The hidden states are gathered before the head, so no logits are made for prompts and padding. Where there would be
    many logits and the head has a `form`, the head itself gets no row, and the log-probabilities are computed lean.
    Otherwise everything that the model does after its head stays in place. No attention mask and no positions are
    passed: both defaults are right for right-padded rows, and they keep attention on its fast causal path. `options`
    are passed to the model.
    """
    positions = torch.from_numpy(rows.positions).to(model.device)
    targets = torch.from_numpy(rows.targets).to(model.device)
    head, seen = model.get_output_embeddings(), list[Tensor]()
    assert head is not None, "a causal LM has a head"
    lean = form is not None and len(positions) * len(head.weight) >= LEAN_FROM

    def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor]:
        seen.append(inputs[0].flatten(0, 1).index_select(0, positions))
        return (seen[0][:0] if lean else seen[0],)

    with head.register_forward_pre_hook(gather):
        logits = model(input_ids=torch.from_numpy(rows.input_ids).to(model.device), use_cache=False, **options).logits
    (hidden,) = seen
    wanted: Any = {"places": places, "entropy_gradient": entropy_gradient}
    if lean:
        assert form is not None, "without a form it is not lean"
        assert isinstance(head, nn.Linear), "only linear heads have a form"
        logprobs, entropy = lean_logprobs(hidden, head, targets, form, **wanted)
    else:
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        logprobs, entropy = whole_logprobs(logits, targets, **wanted)
    return Predicted(logprobs, entropy, hidden)


class ValueHead(nn.Module):
    """The critic: a linear layer with one output, on the same hidden states as the model's head.

    It is trained and saved with the model but is not part of it; it is neither published nor exported. It starts at 0,
    so a new critic expects 0 and sends no gradient into the trunk before it has learned something.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Puts the head on the model's device, in float32, or float64 as the model: values must keep their digits."""
        super().__init__()
        embeddings = model.get_input_embeddings()
        width = int(model.config.get_text_config().hidden_size)
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        device = next(embeddings.parameters()).device
        self.weight = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))  # FSDP2 cannot share out a number.

    def forward(self, hidden: Tensor) -> Tensor:
        """[N] values from hidden states [N, H]."""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


@dataclass(frozen=True, slots=True)
class Pass:
    """Samples that go through the model together."""

    rows: NDArray[np.int64]
    """Indices of the samples among those that were planned."""
    tree: PrefixTree | None = None
    """The same samples merged, in this order; None if they go as padded rows."""
    tokens_saved: int = 0
    """Tokens of the samples that are not computed because other samples share them."""
    idle: bool = False
    """True if it counts for nothing: its rank has none left, and the others need it for theirs."""


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """Outputs for N sampled tokens: those of the samples, in their order."""

    logprobs: Tensor
    """[N] log-probabilities at temperature 1, with gradient."""
    entropy: Tensor
    """[N] entropy of the distribution at each token, at temperature 1; with gradient only if asked for."""
    values: Tensor | None = None
    """[N] output of the value head before each token, with gradient."""

    def nothing(self) -> Tensor:
        """0, with a gradient of 0 for every parameter."""
        values = 0.0 if self.values is None else self.values[:0].sum()
        return self.logprobs[:0].sum() + values


def plan(
    samples: Sequence[Sample],
    settings: TrainingSettings,
    shape: ModelShape | None = None,
    *,
    overhead: float = PASS_OVERHEAD_TOKENS,
) -> list[Pass]:
    """Divides samples into passes of at most `max_tokens_per_forward` tokens; each sample is in one pass.

    `shape` is given for a model that can run along trees (`use_prefix_trees`). With `tree: auto`, samples whose tree
    would not pay go as rows. `overhead` is the cost of one more pass in tokens (`ModelShape.overhead_tokens`).
    """
    trees = list(_trees(samples, settings, shape)) if shape is not None and samples else []
    in_tree = {row for together in trees for row in together.rows.tolist()}
    left = np.array([row for row in range(len(samples)) if row not in in_tree], dtype=np.int64)
    lengths = np.array([len(inputs_of(samples[row])) + 1 for row in left], dtype=np.int64)
    return trees + [Pass(left[rows]) for rows in plan_passes(lengths, settings.max_tokens_per_forward, overhead)]


def run(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    tree: PrefixTree | None = None,
    value_head: ValueHead | None = None,
    entropy_gradient: bool = False,
    form: HeadForm | None = None,
    dtype: torch.dtype | None = None,
) -> TokenOutputs:
    """Makes one pass. Every sample must have sampled tokens. `tree` merges them, for a model that can run along it.

    A node of the tree goes through the head once, however many rows it predicts a token of. `form` is the model's
    `head_form`; without it, all logits of the pass are made at once. `dtype` is the type in which the model computes;
    None: that of its weights.
    """
    rows, places, options = inputs_for(model, samples, tree, dtype)
    found = predict(model, rows, form=form, places=places, entropy_gradient=entropy_gradient, **options)
    if value_head is None:
        return TokenOutputs(found.logprobs, found.entropy)
    values = value_head(found.hidden)
    return TokenOutputs(found.logprobs, found.entropy, values if places is None else values[places])


def inputs_for(
    model: PreTrainedModel, samples: Sequence[Sample], tree: PrefixTree | None, dtype: torch.dtype | None = None
) -> tuple[PaddedRows, Tensor | None, dict[str, Any]]:
    """Arguments of `predict` for one pass: rows, `places`, and the model's own options."""
    if tree is None:
        return _padded(samples), None, {}
    return _merged(samples, tree, model.device, dtype or model.dtype)


def _trees(samples: Sequence[Sample], settings: TrainingSettings, shape: ModelShape) -> Iterator[Pass]:
    inputs = [inputs_of(sample) for sample in samples]
    lengths = np.array([len(row) for row in inputs], dtype=np.int64)
    order, shared = sort_rows(inputs)
    always = settings.tree == "on"
    for part in cut(lengths[order], shared, settings.max_tokens_per_forward, shape.overhead_tokens):
        rows = order[part]
        as_rows = np.inf if always else _cost_of_rows(lengths[rows], settings, shape)
        common = np.append(0, shared[part][1:])
        # For tiny rows in tiny models, merging takes a tenth of a pass's time: skip it where a tree cannot pay.
        least = shape.least_cost_of_tree(lengths[rows], common)
        if not (always or (shares_enough(lengths[rows], common) and pays(least, as_rows))):
            continue
        tree = merge([inputs[i] for i in rows], [samples[i].num_tokens for i in rows])
        if always or pays(shape.cost_of_tree(tree), as_rows):
            yield Pass(rows, tree, int(lengths[rows].sum()) - tree.num_tokens)


def _cost_of_rows(lengths: NDArray[np.int64], settings: TrainingSettings, shape: ModelShape) -> float:
    passes = plan_passes(lengths + 1, settings.max_tokens_per_forward, shape.overhead_tokens)
    return sum(shape.cost_of_rows(lengths[rows]) for rows in passes)


def inputs_of(sample: Sample) -> IntArray:
    """Tokens of a row that must be computed: all but the last, which predicts nothing."""
    return np.concatenate((sample.turn.prompt_ids, sample.turn.response_ids[:-1]))


def _merged(
    samples: Sequence[Sample], tree: PrefixTree, device: torch.device, dtype: torch.dtype
) -> tuple[PaddedRows, Tensor, dict[str, Any]]:
    """The tree as one row; [N] which gathered node predicts each token; the model's other arguments."""
    ids, options = along(tree, device, dtype)
    nodes, places = np.unique(tree.predictors, return_inverse=True)
    targets = np.concatenate([s.turn.response_ids for s in samples]).astype(np.int64)
    return PaddedRows(ids, nodes, targets), torch.from_numpy(places).to(device), options


def _padded(samples: Sequence[Sample]) -> PaddedRows:
    return pad(
        [np.concatenate((s.turn.prompt_ids, s.turn.response_ids)) for s in samples],
        [np.arange(len(s.turn.prompt_ids) + s.num_tokens) >= len(s.turn.prompt_ids) for s in samples],
    )
