"""The store assistant: its tasks, tools and workflow, and what its agents would say before training.

    customer's lines ──► router ──► helper of the first line (──► its tool) ──► answer
                         router ──► helper of the second line ...
                         router ──► bye

A task is a customer's lines, such as `find 417;greet 3`, each for one of the helpers. Calls are as uneven as those of a
real store: of 100, the router makes 44 and the search 32, a line of search being two calls, one before its tool and one
behind it.

Each reply is a word of one letter or digit, repeated: who writes much takes long. The router is paid for naming the
helper, and asked for `b` (bye) at the end; a helper is paid for the digit. A wrong name is not obeyed: every line comes
to its helper, so that the calls are the same, whatever is learned. Replies are as long as in a real store: most are
short, and a few are ten times as long as the mean.
"""

import asyncio
import random
import re
import zlib
from collections.abc import Mapping
from typing import NamedTuple

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task
from flexmarl.simulator.replies import responder
from flexmarl.tasks import Split, task_generator
from flexmarl.tools import Refusal, tool


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


MEAN_S = 0.02
"""Mean time of a call; the times have an exponential distribution, and equal calls take equal times."""


async def looked_up(word: str, number: str) -> str:
    """The digit on a shelf. Raises Refusal if the argument is no number from 0 to 999."""
    if not (number.isascii() and number.isdigit() and len(number) <= 3):
        raise Refusal("0 to 999")
    line = f"{word} {int(number)}"
    await asyncio.sleep(random.Random(line).expovariate(1 / MEAN_S))
    return answer_of(line)


@tool("find")
async def find(number: str) -> str:
    """Finds a product."""
    return await looked_up("find", number)


@tool("order")
async def order(number: str) -> str:
    """Looks an order up."""
    return await looked_up("order", number)


@tool("stock")
async def stock(number: str) -> str:
    """Counts a product on the shelves."""
    return await looked_up("stock", number)


@tool("price")
async def price(number: str) -> str:
    """Looks a price up."""
    return await looked_up("price", number)


BYE = "b"


@workflow("store_assistant")
async def serve(task: Task, team: Team) -> None:
    """Serves one customer."""
    named: list[float] = []
    answered: list[float] = []
    for line in task.prompt.split(";"):
        helper = HELPERS[line.split()[0]]
        name = await team.router.act(line)
        named.append(share(name.text, helper.letter))
        name.reward(named[-1])
        answer = await team[helper.agent].act(line)
        answered.append(share(answer.text, answer_of(line)))
        answer.reward(answered[-1])
    end = await team.router.act("")
    named.append(share(end.text, BYE))
    end.reward(named[-1])
    team.report(success=sum(answered) / len(answered), routed=sum(named) / len(named))


def share(text: str, wanted: str) -> float:
    """The share of a reply's letters that are the wanted one; 0 for an empty reply."""
    return text.count(wanted) / len(text) if text else 0.0


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
