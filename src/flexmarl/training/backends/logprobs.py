"""Log-probabilities of tokens on torch, from hidden states: with all logits at once, or block by block.

                      head      form                  softmax
hidden [M, H] ──► W h + b ──► cap tanh(scale x / cap) ──► log-probability [N] of the targets, entropy [M]

All logits of a pass, [M, V], and what the softmax needs beside them are the largest arrays of training: 10 GiB each for
16 384 tokens and a vocabulary of 152 000. The lean way makes a block of tokens and columns at a time, keeps a running
maximum and sum of each token, and lets the block go. Backward makes each block again: one product more with the head.

With p the probabilities, E the entropy, and g, e the gradients of a log-probability and an entropy that arrive:

    d logit[j] = g (1[j is the target] - p[j]) - e p[j] (log p[j] + E)
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from flexmarl.training.backends.causal_lm import OneDnnLinear, product

LEAN_FROM = 1 << 24
"""Logits of a pass from which on it is lean: 64 MiB of float32. Below, one product less counts more than the memory."""
BLOCK_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Logits of a block, by the type of device: 16 and 256 MiB of float32. Far smaller blocks make slow products and, on
CUDA, more calls than its queue can be given in time; larger ones are only more memory."""
BLOCK_TOKENS = 4096
"""Tokens of a block. Each further block of tokens reads and writes the gradient of the head's weight once more."""


@dataclass(frozen=True, slots=True)
class HeadForm:
    """The function that a model applies to the outputs of its head's linear layer: cap tanh(scale x / cap)."""

    scale: float = 1.0
    cap: float | None = None
    """None: the outputs are only scaled."""

    def apply_(self, outputs: Tensor) -> Tensor:
        """The logits, in the memory of `outputs`."""
        if self.scale != 1.0:
            outputs.mul_(self.scale)
        return outputs if self.cap is None else outputs.div_(self.cap).tanh_().mul_(self.cap)

    def gradient_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the outputs from that of the logits, in the memory of `gradient`; overwrites `logits`."""
        if self.cap is not None:
            gradient.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


def is_linear(head: nn.Module | None) -> bool:
    """True if a head is a linear layer and no more, so that lean log-probabilities can be made of it."""
    return type(head) in (nn.Linear, OneDnnLinear)


_PROBE = 50.0
"""Largest output of the head in the trial. A soft cap shows only in large logits; those of models reach tens."""


_found: dict[tuple[type, type, str], HeadForm] = {}
"""Forms of kinds of models that this process has tried: one that comes back to a place need not be tried again."""


def head_form_of_kind(model: PreTrainedModel) -> HeadForm | None:
    """As `head_form`, which is asked once for the classes of model and head and the config."""
    kind = (type(model), type(model.get_output_embeddings()), model.config.to_json_string())
    if kind not in _found and (form := head_form(model)) is not None:
        _found[kind] = form
    return _found.get(kind)


@torch.no_grad()
def head_form(model: PreTrainedModel) -> HeadForm | None:
    """The form of the model's head; None if it has none, and then its log-probabilities need all logits at once.

    Names in configs differ between families, and a config may say nothing. So every form that the config may mean is
    tried: the one whose logits are the model's, on large outputs of the head, is returned.
    """
    head = model.get_output_embeddings()
    if head is None or not is_linear(head):
        return None
    seen: list[Tensor] = []

    def enlarge(_: nn.Module, __: Any, outputs: Tensor) -> Tensor:
        seen.append(outputs * (_PROBE / outputs.abs().max().clamp(min=torch.finfo(outputs.dtype).tiny)))
        return seen[0].clone()

    with head.register_forward_hook(enlarge):
        logits = model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False).logits
    outputs, eps = seen[0], torch.finfo(seen[0].dtype).eps
    if not outputs.abs().max() > 0:
        return None
    for form in _forms(model.config.get_text_config()):
        found = form.apply_(outputs.clone()).to(logits.dtype)
        if found.shape == logits.shape and torch.allclose(found, logits, rtol=16 * eps, atol=eps * _PROBE):
            return form
    return None


def _forms(config: Any) -> Iterator[HeadForm]:
    """Forms that a config may mean, the plain one first."""
    scales = [1.0]
    for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if isinstance(number := getattr(config, name, None), int | float) and number:
            scales += [float(number), 1 / number]
    cap = getattr(config, "final_logit_softcapping", None)
    for scale in scales:
        yield HeadForm(scale)
        if cap:
            yield HeadForm(scale, float(cap))


def whole_logprobs(
    logits: Tensor, targets: Tensor, *, places: Tensor | None = None, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each target, at temperature 1, and the entropy [N] of its distribution.

    Target i has the logits at `places[i]`, or at i without `places`. The entropy has a gradient only if
    `entropy_gradient` is set, because that keeps another tensor of the logits' size until backward.
    """
    logprobs = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    if places is not None:
        return logprobs[places, targets], entropy[places]
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def lean_logprobs(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    form: HeadForm,
    *,
    places: Tensor | None = None,
    entropy_gradient: bool = False,
    block: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `whole_logprobs` of the head's logits, from its inputs `hidden` [M, H]; no more than a block of logits exists.

    Gradients reach `hidden` and the head's weight and bias. `block`: most tokens of a block, and most logits.
    """
    most = block or (BLOCK_TOKENS, BLOCK_LOGITS.get(hidden.device.type, BLOCK_LOGITS["cpu"]))
    logprobs, entropy = _Lean.apply(  # pyright: ignore[reportGeneralTypeIssues] - torch types it as one tensor
        hidden, head.weight, head.bias, targets, places, form, entropy_gradient, most
    )
    return logprobs, entropy if places is None else entropy[places]


@dataclass(frozen=True, slots=True)
class _Block:
    """Some tokens' logits in some columns."""

    tokens: slice
    columns: slice
    logits: Tensor
    """[m, v], in float32 or float64."""
    own: slice | Tensor
    """Which of the N targets have a row in the block: n of them."""
    targets: tuple[Tensor, Tensor]
    """[n] row and [n] column in the block of each of those; 0 or the last for a column outside."""
    inside: Tensor
    """[n] True for targets in the block."""


def _blocks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    places: Tensor | None,
    form: HeadForm,
    most: tuple[int, int],
) -> Iterator[_Block]:
    """All blocks; those of the same tokens follow one another."""
    num_tokens, num_columns = len(hidden), len(weight)
    high = min(most[0], max(num_tokens, 1))
    wide = max(1, most[1] // high)
    for start, own, rows in _rows_of_blocks(num_tokens, high, places, targets.device):
        tokens = slice(start, min(start + high, num_tokens))
        for left in range(0, num_columns, wide):
            columns = slice(left, min(left + wide, num_columns))
            outputs = product(hidden[tokens], weight[columns], None if bias is None else bias[columns])
            logits = form.apply_(outputs)
            within = targets[own] - columns.start
            column = within.clamp(0, columns.stop - columns.start - 1)
            yield _Block(tokens, columns, logits.to(_precise(logits.dtype)), own, (rows, column), within == column)


def _rows_of_blocks(
    num_tokens: int, high: int, places: Tensor | None, device: torch.device
) -> Iterator[tuple[int, slice | Tensor, Tensor]]:
    """First token of each block of tokens, which targets have a row in it, and these rows, from 0.

    A gradient is added to few entries of a block, each for one or some targets: CUDA's kernel, which adds in order,
    took a fifth of a step when the targets of all blocks were added to each, with 0 for those of the others.
    """
    starts = range(0, num_tokens, high)
    if places is None:
        for start in starts:
            end = min(start + high, num_tokens)
            yield start, slice(start, end), torch.arange(end - start, device=device)
        return
    rows, order = places.sort(stable=True)
    ends = [0, len(rows)]
    if len(starts) > 1:
        ends = torch.searchsorted(rows, torch.tensor([*starts, num_tokens], device=device)).tolist()
    for start, begin, end in zip(starts, ends, ends[1:], strict=False):
        yield start, order[begin:end], rows[begin:end] - start


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _Lean(torch.autograd.Function):
    """Log-probabilities [N] of the targets, and entropies [M]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        places: Tensor | None,
        form: HeadForm,
        entropy_gradient: bool,
        most: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:
        precise, many = _precise(hidden.dtype), len(hidden)
        top = hidden.new_full((many,), torch.finfo(precise).min, dtype=precise)
        total, moment = top.new_zeros(many), top.new_zeros(many)  # Sums of e^(l - top) and of e^(l - top) (l - top).
        picked = top.new_zeros(len(targets))
        for block in _blocks(hidden, weight, bias, targets, places, form, most):
            logits, at = block.logits, block.tokens
            picked[block.own] = torch.where(block.inside, logits[block.targets], picked[block.own])
            higher = torch.maximum(top[at], logits.amax(1))
            lift = top[at] - higher
            shrink = lift.exp()
            shares = logits.sub_(higher[:, None]).exp()
            moment[at] = (moment[at] + lift * total[at]) * shrink + logits.mul_(shares).sum(1)
            total[at] = total[at] * shrink + shares.sum(1)
            top[at] = higher
        log_total = total.log()
        log_sum, entropy = top + log_total, log_total - moment / total
        ctx.save_for_backward(hidden, weight, bias, targets, places, log_sum, entropy)
        ctx.form, ctx.entropy_gradient, ctx.most = form, entropy_gradient, most
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return picked - (log_sum if places is None else log_sum[places]), entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the name of ctx
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        of_logprobs, of_entropy = grads
        hidden, weight, bias, targets, places, log_sum, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # The sums of one block of tokens may be in the weight's own dtype: nothing is added to them.
        once = weight.dtype if len(hidden) <= ctx.most[0] else log_sum.dtype
        d_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=once) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=once) if needs_bias else None
        pull = of_logprobs if places is None else torch.zeros_like(log_sum).index_add_(0, places, of_logprobs)
        for block in _blocks(hidden, weight, bias, targets, places, ctx.form, ctx.most):
            at, columns = block.tokens, block.columns
            logits = block.logits if ctx.form.cap is None else block.logits.clone()
            logprobs = logits.sub_(log_sum[at, None])
            gradient = logprobs.exp()
            if ctx.entropy_gradient:
                gradient.mul_(-pull[at, None] - of_entropy[at, None] * (logprobs + entropy[at, None]))
            else:
                gradient.mul_(-pull[at, None])
            gradient.index_put_(block.targets, of_logprobs[block.own].where(block.inside, 0), accumulate=True)
            gradient = ctx.form.gradient_(gradient, block.logits).to(weight.dtype)
            if d_hidden is not None:
                d_hidden[at] += product(gradient, weight[columns].t())
            if d_weight is not None:
                d_weight[columns] += product(gradient.t(), hidden[at].t())
            if d_bias is not None:
                d_bias[columns] += gradient.sum(0)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(weight.dtype),
            *[None] * 5,
        )
