"""Prints exactly how well saved models play: of Nim every position, of poker the best opponent's gain.

    python -m examples.games.exact nim examples/games/seed_model runs/nim-1/models/player

No game is played: a model's probability of each answer is computed.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.games.kuhn import BET, PASS, VIEWS, exploitability
from examples.games.nim import WON, moves, winning


def main(game: str, folders: Sequence[Path]) -> None:
    """A row per model."""
    print(f"| model | {' | '.join(FIGURES[game][0])} |\n|---|{'---|' * len(FIGURES[game][0])}")
    for folder in folders:
        print(f"| {folder} | {' | '.join(f'{figure:.3f}' for figure in FIGURES[game][1](folder))} |")


def nim_figures(folder: Path) -> Sequence[float]:
    """Of positions that can be won: mean probability of a winning move, share in which it is the likeliest one.

    The last figure is the mean probability of any move that there is.
    """
    answers = {str(position): list(moves(position)) for position in WON}
    odds = probabilities(folder, "nim", answers)
    good = [sum(odds[str(position)][move] for move in winning(position)) for position in WON]
    best = [max(odds[str(position)], key=odds[str(position)].__getitem__) in winning(position) for position in WON]
    legal = [sum(odds[str(position)].values()) for position in WON]
    return [sum(values) / len(WON) for values in (good, best, legal)]


def kuhn_figures(folder: Path) -> Sequence[float]:
    """Exploitability, in chips per game, the least probability of a legal word, the share of bets for each view."""
    odds = probabilities(folder, "kuhn", {view: [BET, PASS] for view in VIEWS})
    bets = {view: odds[view][BET] / sum(odds[view].values()) for view in VIEWS}
    return [exploitability(bets), min(sum(said.values()) for said in odds.values()), *bets.values()]


FIGURES = {
    "nim": (("winning move", "likeliest move wins", "legal"), nim_figures),
    "kuhn": (("exploitability", "legal", *VIEWS), kuhn_figures),
}


def probabilities(folder: Path, system: str, answers: Mapping[str, Sequence[str]]) -> dict[str, dict[str, float]]:
    """A model's probability of each answer to each prompt, at temperature 1, its end included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found: dict[str, dict[str, float]] = {}
    for heard, texts in answers.items():
        asked = [{"role": "system", "content": system}, {"role": "user", "content": heard}]
        begun = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        whole = [
            tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": text}], return_dict=False)
            for text in texts
        ]
        found[heard] = dict(zip(texts, likelihoods(model, whole, len(begun)), strict=True))
    return found


@torch.inference_mode()
def likelihoods(model: torch.nn.Module, rows: Sequence[Sequence[int]], begin: int) -> list[float]:
    """The probability of each row's ids from `begin` on. The rows are equally long."""
    ids = torch.tensor(rows)
    logits = model(input_ids=ids[:, :-1]).logits.float().log_softmax(-1)
    chosen = logits.gather(-1, ids[:, 1:, None])[..., 0]
    return chosen[:, begin - 1 :].sum(-1).exp().tolist()


if __name__ == "__main__":
    main(sys.argv[1], list(map(Path, sys.argv[2:])))
