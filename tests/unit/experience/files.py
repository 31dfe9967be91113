"""Stores on files: made, filled with rows that can be told apart, and looked at as a resumed run does."""

import asyncio
import shutil
from pathlib import Path

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.testing.experience import AGENTS, COLUMNS, SOLVER, sample
from tests.unit.experience.acknowledging import a_row, tokens


def new_store(path: Path) -> DurableStore:
    path.parent.mkdir(exist_ok=True)
    return DurableStore.create(path, agents=AGENTS, columns=COLUMNS)


async def filled(path: Path, num_rows: int) -> None:
    store = new_store(path)
    await store.put(SOLVER, [a_row(group) for group in range(num_rows)])
    await store.close()


def assert_holds(path: Path, groups: set[int], *, exactly: bool = False) -> None:
    """Opens it as a resumed run does, and reads back what was acknowledged."""

    async def life() -> None:
        store = DurableStore.open(path)
        rows = await store.get([sample(group) for group in sorted(groups)])
        for group, row in zip(sorted(groups), rows, strict=True):
            assert (row.values["text"], row.values["tensor"].tolist()) == (f"row {group}", tokens(group).tolist())
        ((count,),) = (await store.query("SELECT count(*) FROM solver")).rows
        assert count == len(groups) if exactly else count >= len(groups)
        await store.close()

    asyncio.run(life())


def wal_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def copy_as_it_is(path: Path, to: Path) -> None:
    """What a machine that stops now would leave on its disk."""
    to.parent.mkdir()
    shutil.copy(path, to)
    shutil.copy(wal_of(path), wal_of(to))
