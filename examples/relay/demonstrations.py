"""Demonstrations for the cold start of the relay: the form of words and names, and habits that agree on nothing.

A speaker has words that it likes for a thing, and a listener has things that it likes for a word. Both are drawn at
random, each for itself: what a speaker with these habits says does not help a listener with these habits to name the
thing more often than chance. Without habits neither would begin: where all words are said of everything alike, no
guess is better than another, and where no guess depends on the word, no word is.
"""

import math
import random

from examples.relay.tasks import SURROUNDINGS, THINGS

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""

LETTERS = "aeiou"
WORDS = tuple(first + second for first in LETTERS for second in LETTERS)


class Habits:
    """How likely each word is of a thing, and each thing at a word."""

    def __init__(self, rng: random.Random, strength: float) -> None:
        """Log-odds are drawn from a normal distribution with this deviation; 0: all are as likely as any other."""
        self.spoken = {thing: [math.exp(rng.gauss(0, strength)) for _ in WORDS] for thing in THINGS}
        self.named = {word: [math.exp(rng.gauss(0, strength)) for _ in THINGS] for word in WORDS}

    @property
    def success(self) -> float:
        """How often a speaker and a listener with these habits succeed."""
        said = {thing: dict(zip(WORDS, shares(odds), strict=True)) for thing, odds in self.spoken.items()}
        heard = {word: dict(zip(THINGS, shares(odds), strict=True)) for word, odds in self.named.items()}
        return sum(said[thing][word] * heard[word][thing] for thing in THINGS for word in WORDS) / len(THINGS)

    def demonstration(self, rng: random.Random) -> list[Message]:
        """One conversation, of either agent."""
        if rng.random() < 0.5:
            thing = rng.choice(THINGS)
            sighting = f"{thing}{rng.randrange(SURROUNDINGS):02}"
            return conversation("speak", sighting, rng.choices(WORDS, self.spoken[thing])[0])
        word = rng.choice(WORDS)
        return conversation("listen", word, rng.choices(THINGS, self.named[word])[0])


def shares(odds: list[float]) -> list[float]:
    """The same, with sum 1."""
    return [one / sum(odds) for one in odds]


def conversation(role: str, heard: str, said: str) -> list[Message]:
    """What an agent is told, and what it says."""
    return [
        {"role": "system", "content": role},
        {"role": "user", "content": heard},
        {"role": "assistant", "content": said},
    ]
