"""Scripted tools of the store: each looks a number up, and takes as long as a search of a shop may."""

import asyncio
import random

from examples.store_assistant.tasks import answer_of
from flexmarl.tools import Refusal, tool

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
