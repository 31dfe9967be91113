"""Makes the seed model of plan_path, by supervised cold start, and prints what it can do.

    python -m examples.plan_path.make_seed [folder]

About six minutes on one core.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.cold_start import SEED, Message, encode, learn, save, small_qwen3
from examples.math_team.properties import sample, share
from examples.math_team.tokenizer import build_tokenizer
from examples.plan_path.demonstrations import demonstration, moving, planning, translated
from examples.plan_path.grid import COMPASS, Grid, understood

SEED_MODEL = Path(__file__).parent / "seed_model"
BATCH = 32
STAGES = {"skills": (0.0, 6000, 3e-3), "habits": (0.7, 300, 5e-4)}
"""How careless the demonstrations are, how many updates, and the learning rate."""


def main(folder: Path = SEED_MODEL) -> None:
    """Trains stage by stage, saves tokenizer and model, prints the table."""
    tokenizer = build_tokenizer()
    # Four layers: the way to the goal is found a step or two in each.
    model = small_qwen3(tokenizer, hidden=128, inner=256, layers=4, positions=256, spread=0.04)
    for stage, (name, (careless, updates, rate)) in enumerate(STAGES.items()):
        rng = random.Random(SEED + stage)
        rows = [encode(tokenizer, demonstration(rng, careless)) for _ in range(updates * BATCH)]
        learn(model, rows, batch=BATCH, rate=rate, warmup=50, name=name)
        for what, is_right in properties(model.eval(), tokenizer, random.Random(SEED + 1)):
            print(f"{name}: {what:<40} {is_right:.3f}", flush=True)
    save(folder, model, tokenizer)


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
