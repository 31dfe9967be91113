"""Tasks of the store assistant: a customer's lines, such as `find 417;greet 3`, each for one of the helpers.

Calls are as uneven as those of a real store: of 100, the router makes 44 and the search 32, a line of search being two
calls, one before its tool and one behind it.
"""

import random
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator


class Helper(NamedTuple):
    """An agent that answers lines of one kind."""

    agent: str
    letter: str
    """By which the router names it."""
    weight: int
    """Its share of the lines; weights are relative to their sum."""
    uses_tool: bool


HELPERS: Mapping[str, Helper] = {
    "find": Helper("search", "s", 320, uses_tool=True),
    "order": Helper("orders", "o", 60, uses_tool=True),
    "stock": Helper("stock", "t", 50, uses_tool=True),
    "price": Helper("prices", "p", 40, uses_tool=True),
    "return": Helper("returns", "r", 80, uses_tool=False),
    "advise": Helper("advice", "a", 60, uses_tool=False),
    "greet": Helper("greeting", "g", 40, uses_tool=False),
}
"""The helpers by the word that their lines begin with."""
NUM_LINES = (1, 2, 2, 3, 3, 4, 5)
"""Lines of a customer, each number as likely as the next."""
HELD_OUT = 4
"""Every fourth conversation is held out, by its text."""


@task_generator("store_assistant")
def customer(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split."""
    rng = random.Random(f"{seed}/{split}/{index}")
    text = lines(rng)
    while split_of(text) != split:
        text = lines(rng)
    return Task(input_id=f"{split}-{seed}-{index}", prompt=text)


def lines(rng: random.Random) -> str:
    """The lines of a customer, with `;` between them."""
    words = rng.choices(list(HELPERS), [helper.weight for helper in HELPERS.values()], k=rng.choice(NUM_LINES))
    return ";".join(f"{word} {rng.randrange(1000)}" for word in words)


def split_of(text: str) -> Split:
    """The one split that a conversation belongs to."""
    return "held_out" if zlib.crc32(text.encode()) % HELD_OUT == 0 else "train"


def answer_of(line: str) -> str:
    """The digit that the helper shall answer: on the shelf behind a tool, else the last one of the line."""
    word, number = line.split()
    return str(zlib.crc32(line.encode()) % 10) if HELPERS[word].uses_tool else number[-1]
