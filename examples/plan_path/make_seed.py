"""Makes the seed model of plan_path, by supervised cold start, and prints what it can do.

    python -m examples.plan_path.make_seed [folder]

About six minutes on one core.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.math_team.demonstrations import Message
from examples.math_team.make_seed import encode, train
from examples.math_team.properties import sample, share
from examples.math_team.tokenizer import END, PAD, build_tokenizer
from examples.plan_path.demonstrations import demonstration, moving, planning, translated
from examples.plan_path.grid import COMPASS, Grid, understood

SEED_MODEL = Path(__file__).parent / "seed_model"
SEED = 0
BATCH = 32
"""Of `train`."""
STAGES = {"skills": (0.0, 6000, 3e-3), "habits": (0.7, 300, 5e-4)}
"""How careless the demonstrations are, how many updates, and the learning rate."""


def main(folder: Path = SEED_MODEL) -> None:
    """Trains stage by stage, saves tokenizer and model, prints the table."""
    torch.set_num_threads(1)  # The order of sums, and so the model, depends on it.
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters")
    for stage, (name, (careless, updates, rate)) in enumerate(STAGES.items()):
        rng = random.Random(SEED + stage)
        rows = [encode(tokenizer, demonstration(rng, careless)) for _ in range(updates * BATCH)]
        train(name, model, rows, rate)
        for what, is_right in properties(model.eval(), tokenizer, random.Random(SEED + 1)):
            print(f"{name}: {what:<40} {is_right:.3f}", flush=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Qwen3 with four layers: the way to the goal is found a step or two in each."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=256,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        # Small, because texts are short: more of a head's dimensions tell neighbours apart.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=tokenizer.get_vocab()[END],
        pad_token_id=tokenizer.get_vocab()[PAD],
    )
    return Qwen3ForCausalLM(config)


def properties(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, rng: random.Random, number: int = 400
) -> Iterator[tuple[str, float]]:
    """(what, share of `number` tries): what each agent says at temperature 1."""
    torch.manual_seed(SEED)
    kinds: Sequence[tuple[str, Callable[..., list[Message]], Callable[[str, str], bool]]] = (
        ("plan leads nearer, move by move", planning, leads_nearer),
        ("moves follow the plan", moving, follows),
    )
    for what, converse, right in kinds:
        begun = [converse(rng, 0.0)[:-1] for _ in range(number)]
        texts = sample(model, tokenizer, begun)
        yield what, share([right(messages[-1]["content"], text) for messages, text in zip(begun, texts, strict=True)])


def leads_nearer(text: str, plan: str) -> bool:
    """Whether every move of a plan does, up to the goal."""
    grid = Grid(text)
    place, _ = grid.follow(grid.start, plan if understood(plan, COMPASS) else "")
    gained = grid.distances[grid.start] - grid.distances[place]
    return gained == len(plan) > 0


def follows(asked: str, moves: str) -> bool:
    """Whether moves are what the plan says."""
    plan, view = asked.split("|")
    return moves == translated(plan.strip(), view[0])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
