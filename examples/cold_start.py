"""Cold starts of the examples: small models that learn the form of what they say from demonstrations, not from rewards.

consumes     conversations, as lists of messages
produces     a folder with a model and its tokenizer, as `policies.NAME.model` takes it

The same kind of machine gives the same model, bit for bit: `learn` is for one thread.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.tokenizer import END, PAD, build_tokenizer
from flexmarl.training.backends.supervised import Demonstration, num_updates, train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

SEED = 0

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""


def small_qwen3(
    tokenizer: PreTrainedTokenizerFast,
    *,
    hidden: int = 64,
    inner: int = 128,
    layers: int = 2,
    key_heads: int = 2,
    head_dim: int = 32,
    positions: int,
    theta: float = 100.0,
    spread: float = 0.05,
) -> Qwen3ForCausalLM:
    """Qwen3 with four heads and random weights.

    `theta` of the rotary embedding is small for short texts: more of a head's dimensions tell neighbours apart.
    `spread` is the standard deviation of the weights.
    """
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        tie_word_embeddings=True,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message], *, ends: bool = False) -> Demonstration:
    """Ids as the run's chat renderer makes them; trained are those that the assistant samples.

    Before the last message the assistant calls tools: generation stops at the `)` of a call, and what ends that message
    is not sampled, unless `ends`.
    """
    ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
    trained = np.zeros(len(ids), dtype=np.bool_)
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(tokenizer.apply_chat_template(messages[:index], add_generation_prompt=True, return_dict=False))
            is_sampled = ends or index + 1 == len(messages)
            trained[start : start + len(message["content"]) + is_sampled] = True
    return Demonstration(ids=ids, trained=trained)


def learn(
    model: PreTrainedModel,
    rows: Sequence[Demonstration],
    *,
    batch: int,
    rate: float,
    warmup: int,
    epochs: int = 1,
    name: str = "",
) -> None:
    """Trains, and prints the loss now and then."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    updates = num_updates(rows, SupervisedSettings(batch=batch, epochs=epochs))
    settings = SupervisedSettings(
        batch=batch,
        epochs=epochs,
        optimizer=AdamWSettings(learning_rate=rate, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=warmup, decay_steps=updates, min_ratio=0.05),
    )

    def progress(update: int, loss: float) -> None:
        if update % 50 == 0:
            print(f"{name} {update}/{updates}: loss {loss:.3f}".lstrip(), flush=True)

    print(f"{model.num_parameters():,} parameters", flush=True)
    train_supervised(model, rows, settings, seed=SEED, progress=progress)


def cold_start(
    folder: str | Path,
    build: Callable[[PreTrainedTokenizerFast], Qwen3ForCausalLM],
    demonstration: Callable[[random.Random], list[Message]],
    *,
    updates: int,
    batch: int,
    rate: float,
    warmup: int,
    epochs: int = 1,
    ends: bool = False,
    rng: random.Random | None = None,
) -> None:
    """Trains a model on demonstrations of one kind, in one stage, and saves it."""
    tokenizer, rng = build_tokenizer(), rng or random.Random(SEED)
    rows = [encode(tokenizer, demonstration(rng), ends=ends) for _ in range(updates * batch // epochs)]
    model = build(tokenizer)
    learn(model, rows, batch=batch, rate=rate, warmup=warmup, epochs=epochs)
    save(folder, model, tokenizer)


def save(folder: str | Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Saves both in one folder."""
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
