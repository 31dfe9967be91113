"""Transformers' attention interface for prefix trees: how a model is given a tree, and which models can use one.

A model on this interface attends as before, unless a forward pass brings a tree: `model(..., prefix_tree=...)`. The
tree is an argument of the call, so activation checkpointing repeats a pass along the same tree.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flexmarl.errors import ConfigError
from flexmarl.training.tree.cost import ModelShape
from flexmarl.training.tree.kernels import FlexAttention, PiecewiseAttention
from flexmarl.training.tree.merge import PrefixTree, merge
from flexmarl.training.tree.pieces import attention_pieces

NAME = "prefix_tree"
"""Name of the attention implementation that accepts a tree."""

Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention of one tree. It takes queries, keys and values [1, H, T, D], and the scale."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    prefix_tree: Attention | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Called by every attention layer. It attends along the tree if there is one, else as `sdpa` does."""
    if prefix_tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    scale = options.get("scaling")
    out = prefix_tree(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return out.transpose(1, 2).contiguous(), None


def along(tree: PrefixTree, device: torch.device, dtype: torch.dtype) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Input ids [1, T], on a GPU padded to whole blocks, and the model's other arguments for a pass along the tree."""
    if device.type == "cuda":
        attention = FlexAttention(tree.ends, device)
        padding = attention.num_nodes - tree.num_tokens
    else:
        attention, padding = PiecewiseAttention(attention_pieces(tree), dtype), 0
    positions = torch.from_numpy(np.pad(tree.depths, (0, padding)))[None].to(device)
    # Without a mask of ones, transformers would take these positions for rows that were packed together.
    mask = torch.ones_like(positions, dtype=torch.bool)
    options = {"position_ids": positions, "attention_mask": mask, "prefix_tree": attention}
    return np.pad(tree.tokens, (0, padding))[None], options


_tried: set[tuple[type, str, torch.device, torch.dtype]] = set()
"""Kinds of models that this process has seen to be right: one that comes back to a place need not be tried again."""


def use_prefix_trees(model: PreTrainedModel, wanted: str) -> ModelShape | None:
    """Puts a model on this attention, in place, and returns its shape.

    Returns None and changes nothing if trees are off or the model cannot use them. `wanted` is `training.tree`. Raises
    ConfigError if it is "on" and the model cannot.
    """
    if wanted == "off":
        return None
    reason = why_not(model)
    if reason is None:
        model.set_attn_implementation(NAME)
        kind = (type(model), model.config.to_json_string(), model.device, model.dtype)
        if kind not in _tried:
            reason = _wrong_on_trial(model)
            if reason is None:
                _tried.add(kind)
            else:
                model.set_attn_implementation("sdpa")
    if reason is not None and wanted == "on":
        raise ConfigError(f"training.tree is 'on', but {reason}; use tree: auto, which then trains row by row")
    return None if reason is not None else shape_of(model)


def why_not(model: PreTrainedModel) -> str | None:
    """Reason why a model cannot run along a tree, as far as its config and class say so; None if there is none."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layers != {"full_attention"}:
        kinds = ", ".join(sorted(layers - {"full_attention"}))
        return f"the model has layers of {kinds}, which carry a state from token to token or see only a window of them"
    if getattr(config, "sliding_window", None) and not hasattr(config, "layer_types"):
        return f"the model's attention sees a window of {config.sliding_window} tokens, counted along the row"
    if not getattr(config, "is_causal", True):
        return "the model's attention is not causal: a token would depend on what comes after it"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{type(model).__name__} does not use Transformers' attention interface"
    if config._attn_implementation not in ("sdpa", NAME):
        return f"the model's attention is '{config._attn_implementation}', and trees replace 'sdpa'"
    if model.device.type not in ("cpu", "cuda"):
        return f"the model is on '{model.device}', and trees run on CPUs and CUDA devices"
    return None


def shape_of(model: PreTrainedModel) -> ModelShape:
    """Properties of the model that the cost of its passes depends on."""
    config = model.config.get_text_config()
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {id(p) for module in ends if module is not None for p in module.parameters()}
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(
        linear_parameters=sum(p.numel() for p in model.parameters() if id(p) not in outside),
        num_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * size,
        device=model.device.type,
    )


@torch.no_grad()
def _wrong_on_trial(model: PreTrainedModel) -> str | None:
    """Runs three short rows along their tree and one by one. Returns how the outputs differ; None if they agree.

    They differ if the model's attention does more than look at the tokens before.
    """
    rows = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 0, 3], [1, 2])]
    tree = merge(rows, [len(row) for row in rows])
    ids, options = along(tree, model.device, model.dtype)
    try:
        on_tree = model(input_ids=torch.from_numpy(ids).to(model.device), use_cache=False, **options).logits[0]
    except Exception as error:
        # On a GPU the first pass compiles. A missing compiler, or heads too small for the kernel, fails here.
        return f"{type(model).__name__} fails on a tree: {type(error).__name__}: {error}"
    found = on_tree[torch.from_numpy(tree.predictors).to(model.device)]
    alone = [model(input_ids=torch.from_numpy(row)[None].to(model.device), use_cache=False).logits[0] for row in rows]
    expected = torch.cat(alone)
    error = ((found - expected).norm() / expected.norm()).item()
    if error <= (0.1 if model.dtype == torch.bfloat16 else 1e-3):
        return None
    return (
        f"{type(model).__name__} gives other outputs on a tree than on rows (by {error:.1e}): its attention does "
        "more than look at the tokens before"
    )


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
