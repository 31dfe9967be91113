import asyncio
from pathlib import Path

import numpy as np

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.store_file import ROWS_AT_ONCE, read_store
from flexmarl.records import GroupId
from flexmarl.testing.experience import AGENTS, COLUMNS, SHARED, SOLVER, VERIFIER, partial, sample
from tests.unit.experience.acknowledging import a_row, tokens


def test_a_store_is_read_while_a_run_writes_to_it(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        with read_store(path) as reader:
            for group in range(5):
                await store.put(SOLVER, [a_row(group)])
                assert reader.query("SELECT count(*) FROM solver").rows == ((group + 1,),)
        await store.close()

    asyncio.run(life())


def test_it_shows_the_layout_and_rows_in_the_order_of_claims(tmp_path: Path):
    path, groups = tmp_path / "experience.sqlite", range(2 * ROWS_AT_ONCE + 3)

    async def life() -> None:
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        await store.put(SOLVER, [a_row(group) for group in reversed(groups)])
        await store.put(VERIFIER, [partial(sample(3, hop=1), reward=0.5)])
        await store.close()

    asyncio.run(life())
    with read_store(path) as reader:
        assert (reader.agents, reader.columns) == (AGENTS, COLUMNS)
        rows = list(reader.rows(SOLVER))
        assert [row.sample_id for row in rows] == [sample(group) for group in groups]
        np.testing.assert_array_equal(rows[7].values["tensor"], tokens(7), strict=True)
        (row,) = reader.rows(VERIFIER)
        assert (row.policy, dict(row.values)) == (SHARED, {"reward": 0.5})


def test_an_export_sees_one_moment_while_the_run_goes_on(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        await store.put(SOLVER, [a_row(0), a_row(1)])
        with read_store(path) as reader:
            rows = reader.rows(SOLVER)
            assert next(rows).values["text"] == "row 0"
            await store.rewind(GroupId(0))
            assert next(rows).values["text"] == "row 1"
            assert list(rows) == []
            assert list(reader.rows(SOLVER)) == []
        await store.close()

    asyncio.run(life())
