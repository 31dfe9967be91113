"""Environment on the library TextArena: text games for one player or several.

    tasks: {type: generator, name: textarena, params: {game: TicTacToe-v0}}
    team:
      environment: {name: textarena, params: {game: TicTacToe-v0, players: 2}}

A workflow of one's own gives `observe()` to the seat of `player`, and what it says to `step`
(docs/howto/task_source.md#games-of-textarena).
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from flexmarl.errors import EpisodeError, MissingExtra, boundary
from flexmarl.records import Task
from flexmarl.tasks.environment import StepResult
from flexmarl.tasks.interface import Split

try:
    library: Any = import_module("textarena")
except ImportError as error:
    raise MissingExtra("textarena", "the environment 'textarena'") from error

GAME = -1
"""The library's number of the game itself as a sender."""
Played = tuple[int, tuple[str, ...]]
"""The state of a game: its seed, and the actions so far."""


def textarena(seed: int, index: int, split: Split, *, game: str) -> Task:
    """One game to be played; its id decides how it begins."""
    number = f"{split} {seed} {index}"
    return Task(input_id=f"{game}-{number.replace(' ', '-')}", prompt=f"{game}, number {number}")


class TextArenaGame:
    """One game. `game` is a name that `textarena.make` knows; a name with `-raw` shows each player only what is new.

    TextArena draws from the random numbers of the whole process; each game here has its own. A snapshot is the seed and
    the actions, and restoring it plays them again.
    """

    def __init__(self, task: Task, *, game: str, players: int = 1) -> None:
        """Raises MissingExtra, or EpisodeError if there is no such game, or not for so many players."""
        self._game, self._players = game, players
        self.rewards: Mapping[int, float] = {}
        """The reward of each player, by number, once the game is over."""
        self.player = 0
        """Number of the player whose turn it is, from 0."""
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Begins a game. Equal seeds and actions give equal games."""
        self._played: Played = (seed, ())
        self._draws = (random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state())
        self.rewards = {}
        with self._of_the_game(f"beginning {self._game} with {self._players} player(s)"):
            self._env = library.make(self._game)
            self._env.reset(num_players=self._players, seed=seed % 2**32)
            self._look()

    def observe(self) -> str:
        """The text that the player sees whose turn it is."""
        return self._seen

    def step(self, action: str) -> StepResult:
        """Plays for `player`. The reward is this player's own, and comes when the game ends; see `rewards` for all."""
        if self.rewards:
            raise EpisodeError(f"{self._game} is over; reset or restore the environment")
        seed, actions = self._played
        self._played = (seed, (*actions, action))
        with self._of_the_game(f"{self._game}, action {len(actions)}"):
            actor = self.player
            done, _ = self._env.step(action)
            if not done:
                self._look()
                return StepResult(0.0, done=False)
            self.rewards = {number: float(won) for number, won in self._env.close()[0].items()}
        self._seen = f"The game is over. Rewards by player: {self.rewards}."
        return StepResult(self.rewards.get(actor, 0.0), done=True)

    def snapshot(self) -> Played:
        """The seed and the actions so far."""
        return self._played

    def restore(self, snapshot: Played) -> None:
        """Plays the same actions again."""
        seed, actions = snapshot
        self.reset(seed)
        for action in actions:
            self.step(action)

    def _look(self) -> None:
        """Takes what the player sees: the library shows it once."""
        self.player, seen = self._env.get_observation()
        self._seen = seen if isinstance(seen, str) else "\n".join(_shown(sender, text) for sender, text, *_ in seen)

    @contextmanager
    def _of_the_game(self, doing: str) -> Iterator[None]:
        """The block draws from this game's random numbers; a fault of the library in it is one of the episode."""
        outside = random.getstate(), np.random.get_state()
        random.setstate(self._draws[0])
        np.random.set_state(self._draws[1])
        try:
            with boundary(EpisodeError, doing):
                yield
        finally:
            self._draws = random.getstate(), np.random.get_state()
            random.setstate(outside[0])
            np.random.set_state(outside[1])


def _shown(sender: int, text: str) -> str:
    return text if sender == GAME else f"[Player {sender}] {text}"
