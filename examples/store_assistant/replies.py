"""What the agents of the store would say before training, for engines that compute nothing and for the seed model.

Replies are as long as in a real store: most are short, and a few are ten times as long as the mean.
"""

import random
import re

from examples.store_assistant.tasks import HELPERS, answer_of
from examples.store_assistant.workflow import BYE
from flexmarl.simulator.replies import responder

RIGHT = 0.6
"""How often the word of a reply is the right one."""
MEDIAN, SIGMA = 9.0, 1.1
"""Of the lognormal number of letters in a reply; the mean is 16."""
LONGEST = 150
LINE = re.compile(rf"(?:{'|'.join(HELPERS)}) \d+")
RESULT = re.compile(r"\)(\d)\s*$")
"""A tool's result, at the end of a prompt: special tokens are not in the text."""


@responder("store_router")
def router(prompt: str, rng: random.Random) -> str:
    """Names the helper of the line, or another letter; says bye if there is no line."""
    line = LINE.findall(prompt)
    wanted = HELPERS[line[-1].split()[0]].letter if line else BYE
    return repeated(wanted if rng.random() < RIGHT else rng.choice(LETTERS), rng)


@responder("store_helper")
def helper(prompt: str, rng: random.Random) -> str:
    """Calls the tool of the line, if it has one, and then answers; or answers, right or wrong."""
    line = LINE.findall(prompt)[-1]
    word, number = line.split()
    result = RESULT.search(prompt)
    if HELPERS[word].uses_tool and result is None:
        return f"{word}({number})"
    digit = result[1] if result else answer_of(line)
    return repeated(digit if rng.random() < RIGHT else str(rng.randrange(10)), rng)


def repeated(letter: str, rng: random.Random) -> str:
    """The letter, a long-tailed number of times."""
    return letter * max(1, min(LONGEST, round(MEDIAN * rng.lognormvariate(0.0, SIGMA))))


LETTERS = [BYE, *(one.letter for one in HELPERS.values())]
