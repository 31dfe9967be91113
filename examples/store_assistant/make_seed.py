"""Makes the seed model of the store assistant, by supervised cold start on what `replies.py` says.

    python -m examples.store_assistant.make_seed [folder]

A minute on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.make_seed import encode
from examples.math_team.tokenizer import END, PAD, build_tokenizer
from examples.store_assistant.store import HELPERS, answer_of, helper, lines, router
from flexmarl.training.backends.supervised import train_supervised
from flexmarl.training.settings import AdamWSettings, ScheduleSettings, SupervisedSettings

SEED_MODEL = Path(__file__).parent / "seed_model"
SEED, BATCH, UPDATES = 0, 64, 400

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains, saves tokenizer and model, prints the loss."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer, rng = build_tokenizer(), random.Random(SEED)
    model = build_model(tokenizer)
    rows = [encode(tokenizer, demonstration(rng)) for _ in range(UPDATES * BATCH)]
    settings = SupervisedSettings(
        batch=BATCH,
        optimizer=AdamWSettings(learning_rate=3e-3, beta2=0.98),
        schedule=ScheduleSettings(type="cosine", warmup_steps=20, decay_steps=UPDATES, min_ratio=0.05),
    )

    def progress(update: int, loss: float) -> None:
        if update % 50 == 0:
            print(f"{update}/{UPDATES}: loss {loss:.3f}", flush=True)

    print(f"{model.num_parameters():,} parameters")
    train_supervised(model, rows, settings, seed=SEED, progress=progress)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def demonstration(rng: random.Random) -> list[Message]:
    """One call of one agent, or a call of its tool and what follows."""
    line = rng.choice(lines(rng).split(";"))
    word, number = line.split()
    if rng.random() < 0.5:
        line = "" if rng.random() < 0.25 else line
        return [*asked("route", line), said(router(line, rng))]
    messages = asked(HELPERS[word].agent, line)
    if not HELPERS[word].uses_tool:
        return [*messages, said(helper(line, rng))]
    result = answer_of(line)
    call, after = f"{word}({number})", f"{line}{word}({number}){result}"
    return [*messages, said(call), {"role": "tool", "content": result}, said(helper(after, rng))]


def asked(system: str, line: str) -> list[Message]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": system}, {"role": "user", "content": line}]


def said(text: str) -> Message:
    """A reply."""
    return {"role": "assistant", "content": text}


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with two layers."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        # Small, because texts are short: more of a head's dimensions tell neighbours apart.
        rope_parameters={"rope_type": "default", "rope_theta": 200.0},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


if __name__ == "__main__":
    main(*sys.argv[1:2])
