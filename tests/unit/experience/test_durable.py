import asyncio
from pathlib import Path

import numpy as np
import pytest

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.store_file import MERGE_BYTES, connect_file
from flexmarl.records import GroupId, RowState
from flexmarl.testing.experience import AGENTS, CHECKS, COLUMNS, READY, SHARED, SOLVER, partial, sample, train


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


def test_a_commit_is_synced_to_the_disk_before_it_returns(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    asyncio.run(created(path).close())
    db = connect_file(path)
    pragmas = {name: db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
    db.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2}


def test_what_one_process_acknowledged_another_reads(tmp_path: Path):
    """As a trainer does: it joins, and reads what the controller put."""
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        owner, trainer = created(path), DurableStore.join(path)
        for group in range(20):
            await owner.put(SOLVER, [partial(sample(group), int=group)])
            (row,) = await trainer.get([sample(group)])
            assert row.values["int"] == group
        await trainer.settle([sample(0)], READY)
        assert await owner.claim(SHARED, 2) == [sample(0)]
        await trainer.close()
        await owner.put(SOLVER, [partial(sample(99))])
        await owner.close()

    asyncio.run(life())


def test_a_store_that_was_pruned_grows_no_further(tmp_path: Path):
    """Room that payloads leave is used again: the file stays within a few steps' rows of the budget."""
    path, budget = tmp_path / "experience.sqlite", 2_000_000

    async def life() -> int:
        store = created(path)
        for group in range(60):
            await store.put(SOLVER, [partial(sample(group), tensor=np.zeros(20_000))])
            await train(store, sample(group))
            if group % 5 == 4:
                await store.prune(GroupId(group + 1), budget)
        await store.close()
        return path.stat().st_size

    assert 4 * budget < 60 * 160_000
    assert asyncio.run(life()) < 2 * budget


def test_the_write_ahead_log_is_merged_beside_the_writer_and_nothing_is_lost(tmp_path: Path):
    """The writer's own merge comes at 32 MB: of less, what is in the file was merged by another thread."""
    path, tensor = tmp_path / "experience.sqlite", np.arange(200_000)

    async def life() -> None:
        store = created(path)
        empty = path.stat().st_size
        for group in range(12):
            await store.put(SOLVER, [partial(sample(group), tensor=tensor + group)])
        while path.stat().st_size < empty + MERGE_BYTES // 2:  # noqa: ASYNC110  (written by another thread)
            await asyncio.sleep(0.01)
        rows = await store.get([sample(group) for group in range(12)])
        assert [int(row.values["tensor"][0]) for row in rows] == [*range(12)]
        await store.close()

    asyncio.run(asyncio.wait_for(life(), 30))


def test_puts_of_one_moment_are_written_as_one_and_each_fails_alone(tmp_path: Path):
    """A row that is filled, one that contradicts itself, and one that another table has."""
    rows = [
        (SOLVER, partial(sample(0), int=1)),
        (AGENTS[1], partial(sample(1), int=2)),
        (SOLVER, partial(sample(2), int=3)),
        (SOLVER, partial(sample(0), text="later")),
        (SOLVER, partial(sample(2), int=4)),
        (SOLVER, partial(sample(1), int=2)),
        (SOLVER, partial(sample(3), tensor=np.arange(3))),
    ]

    async def life() -> None:
        store = created(tmp_path / "experience.sqlite")
        ends = await asyncio.gather(*(store.put(agent, [row]) for agent, row in rows), return_exceptions=True)
        assert [end for end in ends if end is None] == [None] * 5
        assert "int is 3 and cannot become 4" in str(ends[4])
        assert f"is in table '{AGENTS[1]}' already" in str(ends[5])
        read = await store.get([sample(number) for number in range(4)])
        assert [(row.agent, row.values.get("int"), row.values.get("text")) for row in read] == [
            (SOLVER, 1, "later"),
            (AGENTS[1], 2, None),
            (SOLVER, 3, None),
            (SOLVER, None, None),
        ]
        assert read[3].values["tensor"].tolist() == [0, 1, 2]
        assert await store.counts(SHARED) == {RowState.OPEN: 4}
        await store.close()

    asyncio.run(life())


def test_puts_of_one_moment_leave_what_they_would_leave_one_after_the_other(tmp_path: Path):
    """Two tables, rows that are opened and rows that are filled."""
    rng = np.random.default_rng(0)
    first = [(AGENTS[n % 2], partial(sample(n), tensor=rng.integers(0, 9, 5), int=n)) for n in range(8)]
    then = [(AGENTS[n % 2], partial(sample(n), text=f"row {n}", json=[n])) for n in range(12)]

    async def life(path: Path, *, together: bool) -> list[tuple[object, ...]]:
        store = created(path)
        for puts in (first, then):
            if together:
                await asyncio.gather(*(store.put(agent, [row]) for agent, row in puts))
            else:
                for agent, row in puts:
                    await store.put(agent, [row])
        read = await store.get([sample(n) for n in range(12)])
        counted = await store.counts(SHARED)
        await store.close()
        return [(row.agent, row.state, {k: str(v) for k, v in row.values.items()}, counted) for row in read]

    whole = asyncio.run(life(tmp_path / "whole.sqlite", together=False))
    assert asyncio.run(life(tmp_path / "joined.sqlite", together=True)) == whole
