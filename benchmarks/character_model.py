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
    """Makes the token's logit 128 less than it would be without this, and keeps it there while the model trains.

    The last coordinate of the hidden states is 1 for every token, which no layer reads or adds to, and after the last
    norm it is 64, where others are about 0.1. Every token's embedding has 1 there, the token's own has -1. (Embedding
    and head are one matrix.) AdamW moves a weight by its rate at every update, however small its gradient: some dozen
    updates at 1e-3 leave the coordinate positive, and its share of a logit moves by 0.064 at each.
    """
    model.model.embed_tokens.weight[:, -1] = 1.0
    model.model.embed_tokens.weight[token, -1] = -1.0
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight[-1] = 0.0
        layer.mlp.down_proj.weight[-1] = 0.0
        layer.input_layernorm.weight[-1] = 0.0
        layer.post_attention_layernorm.weight[-1] = 0.0
    model.model.norm.weight[-1] = 8.0
