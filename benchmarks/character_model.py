"""A tiny model with a character tokenizer that gives its end token no probability: its replies never end early."""

from pathlib import Path
from typing import Any

import torch
from common import tiny_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

END = "<|end|>"


def save_character_model(folder: Path) -> None:
    """Saves model and tokenizer; the end token is never sampled."""
    characters = [chr(code) for code in range(32, 127)]
    vocabulary = {
        token: index for index, token in enumerate(["<|pad|>", "<|user|>", "<|assistant|>", *characters, END])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token="<|pad|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template=(
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
            "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        ),
    )
    model = tiny_model(len(vocabulary))
    never_sample(model, vocabulary[END])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def never_sample(model: Qwen3ForCausalLM, token: int) -> None:
    """Makes the token's logit at least 30 less than any other's, and changes no difference between the others.

    The last coordinate of the hidden states becomes a constant: every token's embedding has 0.02 there, no layer adds
    to it, and the last norm makes it large. Only the token's own embedding has -0.02, and so its logit is as negative
    as that of the others is positive. (Embedding and head are one matrix.)
    """
    model.model.embed_tokens.weight[:, -1] = 0.02
    model.model.embed_tokens.weight[token, -1] = -0.02
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight[-1] = 0.0
        layer.mlp.down_proj.weight[-1] = 0.0
    model.model.norm.weight[-1] = 5000.0
