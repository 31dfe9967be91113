"""Task generator on the library reasoning-gym: over a hundred kinds of puzzles, made and scored by rule.

    tasks:
      type: generator
      name: reasoning_gym
      params: {datasets: {chain_sum: {max_terms: 3}, leg_counting: {}}}

The kinds take turns. The words of a question decide whether it is held out, so that none is in both splits.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from typing import Any

from flexmarl.errors import ConfigError, MissingExtra
from flexmarl.records import Task
from flexmarl.tasks.interface import Split

try:
    library: Any = import_module("reasoning_gym")
except ImportError as error:
    raise MissingExtra("reasoning_gym", "the task generator 'reasoning_gym'") from error

SHARE = 10
"""One question of so many is held out."""
TRIES = 500
"""Questions that are made, one after the other, until one belongs to the split."""


@dataclass(frozen=True)
class Puzzle:
    """One puzzle: it can be made again from this alone, and so crosses processes. Scores answers to itself."""

    dataset: str
    config: str
    """Parameters of the dataset, as JSON."""
    seed: int

    def __call__(self, answer: str, reference: str) -> float:
        """The dataset's own score, 0 to 1, of what stands in the last `<answer>...</answer>`; without one, of all."""
        dataset, item = _made(self)
        found = library.utils.extract_answer(answer)
        return float(dataset.score_answer(answer.strip() if found is None else found, item))

    @property
    def question(self) -> str:
        """The words of the puzzle."""
        return str(_made(self)[1]["question"])

    @property
    def answer(self) -> str:
        """An answer that scores 1, if the dataset tells one; many puzzles have more than one."""
        told = _made(self)[1]["answer"]
        return "" if told is None else str(told)


def reasoning_gym(seed: int, index: int, split: Split, *, datasets: Mapping[str, Mapping[str, Any] | None]) -> Task:
    """A puzzle. `datasets`: parameters of each kind by its name, as `reasoning_gym.create_dataset` takes them.

    Raises ConfigError for an unknown kind, or one with too few questions to hold any out, and MissingExtra.
    """
    if not isinstance(datasets, Mapping) or not datasets:
        raise ConfigError(f"tasks.params.datasets: name at least one dataset, e.g. {{chain_sum: {{}}}}, got {datasets}")
    number, which = divmod(index, len(datasets))
    name = list(datasets)[which]
    known = library.factory.DATASETS
    if name not in known:
        raise ConfigError(f"tasks.params.datasets: reasoning-gym has no '{name}'; it has {', '.join(sorted(known))}")
    config = json.dumps(datasets[name] or {}, sort_keys=True)
    for attempt in range(TRIES):
        puzzle = Puzzle(name, config, _drawn(f"{seed} {split} {number} {attempt}", 2**32))
        if (_drawn(puzzle.question, SHARE) == 0) == (split == "held_out"):
            return Task(
                input_id=f"{name}-{split}-{number}", prompt=puzzle.question, reference=puzzle.answer, scorer=puzzle
            )
    raise ConfigError(
        f"tasks.params.datasets.{name}: none of {TRIES} questions is for the split {split}; give it parameters with "
        f"which it has more of them"
    )


def _drawn(text: str, below: int) -> int:
    """A number that the text alone decides."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") % below


@lru_cache(maxsize=4096)
def _made(puzzle: Puzzle) -> tuple[Any, Mapping[str, Any]]:
    """The puzzle as the library has it, in a dataset of its own: so its seed alone decides it."""
    dataset = library.create_dataset(puzzle.dataset, size=1, seed=puzzle.seed, **json.loads(puzzle.config))
    return dataset, dataset[0]
