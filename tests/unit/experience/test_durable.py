import asyncio
from pathlib import Path

import pytest

from flexmarl.experience.backends.durable import DurableStore
from flexmarl.testing.experience import AGENTS, CHECKS, COLUMNS


def created(path: Path) -> DurableStore:
    return DurableStore.create(path, agents=AGENTS, columns=COLUMNS)


def reopened(path: Path) -> DurableStore:
    asyncio.run(created(path).close())
    return DurableStore.open(path)


def joined(path: Path) -> DurableStore:
    asyncio.run(created(path).close())
    return DurableStore.join(path)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [created, reopened, joined])
def test_it_does_what_every_store_does(make, check, tmp_path: Path):
    async def life(store: DurableStore) -> None:
        try:
            await check(store)
        finally:
            await store.close()

    asyncio.run(life(make(tmp_path / "experience.sqlite")))
