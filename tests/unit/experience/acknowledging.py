"""A process that writes to a store and prints the id of every row once it is acknowledged: kill it at any moment.

python acknowledging.py create|open|join PATH GROUP   puts one row after another, four at a time, from this group on
"""

import asyncio
import itertools
import sys
from pathlib import Path

import numpy as np

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import PartialRow
from flexmarl.testing.experience import AGENTS, COLUMNS, SOLVER, partial, sample


def tokens(group: int) -> np.ndarray:
    return np.arange(group, group + 512, dtype=np.int32)


def a_row(group: int) -> PartialRow:
    return partial(sample(group), tensor=tokens(group), text=f"row {group}")


async def write(store: DurableStore, first: int) -> None:
    groups = itertools.count(first)

    async def one_after_another() -> None:
        for group in groups:
            await store.put(SOLVER, [a_row(group)])
            print(group, flush=True)

    await asyncio.gather(*(one_after_another() for _ in range(4)))


def the_store(how: str, path: Path) -> DurableStore:
    if how == "create":
        return DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
    return DurableStore.open(path) if how == "open" else DurableStore.join(path)


if __name__ == "__main__":
    asyncio.run(write(the_store(sys.argv[1], Path(sys.argv[2])), int(sys.argv[3])))
