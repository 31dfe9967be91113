import asyncio
import gc
from collections.abc import Sequence

import pytest

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Column, ColumnKind, Outcome
from flexmarl.experience.transactions import StoreConnection
from flexmarl.records import AgentName, EpisodeId, GroupId, RowState
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.experience import (
    AGENTS,
    CHECKS,
    COLUMNS,
    READY,
    SHARED,
    SOLVER,
    VERIFIER,
    check_experience_store,
    partial,
    ready,
    sample,
)


def in_memory(agents: Sequence[AgentName], columns: Sequence[Column]) -> SqliteStore:
    return SqliteStore(agents=agents, columns=columns)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_in_memory(check):
    run_virtual(check(in_memory(AGENTS, COLUMNS)))


def test_the_suite_runs_every_check_on_a_store_of_its_own():
    made: list[SqliteStore] = []

    def make(agents: Sequence[AgentName], columns: Sequence[Column]) -> SqliteStore:
        made.append(in_memory(agents, columns))
        return made[-1]

    run_virtual(check_experience_store(make))
    assert len(made) == len(CHECKS)


def test_the_suite_says_which_check_failed():
    class Forgetful(SqliteStore):
        async def release(self, **lost):
            return []

    with pytest.raises(AssertionError) as failure:
        run_virtual(check_experience_store(lambda agents, columns: Forgetful(agents=agents, columns=columns)))
    assert failure.value.__notes__ == ["in the conformance check: losing a holder returns exactly its claimed rows"]


@pytest.mark.parametrize(
    ("agents", "words"),
    [
        (["solver", "Solver"], "agent 'Solver' collides with the agent 'solver'"),
        (["payloads"], "agent 'payloads' collides with the store's own 'payloads'"),
        (["sqlite_solver"], "choose another name"),
        ([""], "is no name"),
        ([], "at least one agent"),
    ],
)
def test_agent_names_that_collide_are_refused(agents, words):
    with pytest.raises(StoreError, match=words):
        SqliteStore(agents=agents, columns=[])


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["state"], "the store's own 'state'"),
        (["text", "text"], "the column 'text'"),
        (["reward", "Reward_Status"], "the column 'reward_status'"),
    ],
)
def test_column_names_that_collide_are_refused(names, words):
    with pytest.raises(StoreError, match=words):
        SqliteStore(agents=AGENTS, columns=[Column(name, ColumnKind.INT) for name in names])


def test_a_table_may_have_any_other_name():
    names = [AgentName(name) for name in ('sol"ver', "it's; DROP TABLE payloads", "select", "裁判 1")]

    async def life():
        store = SqliteStore(agents=names, columns=[Column('va"l', ColumnKind.TEXT), Column("order", ColumnKind.INT)])
        for group, name in enumerate(names):
            row = partial(sample(group, task="tâche 'a'"), **{'va"l': name, "order": group})
            await store.put(name, [row])
            await store.settle([row.sample_id], READY)
        return await store.get(await store.claim(SHARED, 9))

    rows = run_virtual(life())
    assert [(row.agent, row.values['va"l'], row.values["order"]) for row in rows] == [
        (name, name, group) for group, name in enumerate(names)
    ]


def test_a_query_leaves_puts_as_they_were_even_with_their_own_statements():
    async def life():
        store = in_memory(AGENTS, COLUMNS)
        await store.put(SOLVER, [partial(sample(0))])
        for sql in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            with pytest.raises(StoreError, match="not authorized"):
                await store.query(sql)
        await store.put(SOLVER, [partial(sample(1))])
        return await store.counts(SHARED)

    assert run_virtual(life()) == {RowState.OPEN: 2}


def test_no_statement_on_the_way_of_a_row_scans_a_table():
    """Claims, settles, releases, discards and prunes must not slow down as rows pile up."""

    async def life():
        store = in_memory(AGENTS, COLUMNS)
        seen: list[str] = []
        store._connection().set_trace_callback(seen.append)
        await ready(store, SOLVER, sample(0), sample(1))
        await store.put(SOLVER, [partial(sample(0), reward=1.0)])
        await store.claim(SHARED, 2, holder="h")
        await store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED, cache="c"))
        await store.release(holder="h")
        await store.release(cache="c")
        await store.counts(SHARED)
        await store.put(SOLVER, [partial(sample(2), text="lost")])
        assert await store.discard([EpisodeId("g2e0a0")]) == 1
        await store.prune(GroupId(9), 0)
        store._connection().set_trace_callback(None)
        statements = {sql for sql in seen if sql.startswith(("SELECT", "UPDATE", "INSERT", "DELETE"))}
        plans = [step[3] for sql in statements for step in store._connection().execute(f"EXPLAIN QUERY PLAN {sql}")]
        return statements, plans

    statements, plans = run_virtual(life())
    assert len(statements) >= 12
    tables = (SOLVER, VERIFIER, "row", "samples", "payloads")
    assert [plan for plan in plans if plan.startswith(tuple(f"SCAN {table}" for table in tables))] == []
    assert any(plan.startswith(f"SEARCH {SOLVER} USING") for plan in plans)
    assert any(plan.startswith("SEARCH row USING") for plan in plans)


def test_virtual_time_does_not_pass_in_the_store():
    assert run_virtual(_life_and_clock()) == 0.0


async def _life_and_clock() -> float:
    store = in_memory(AGENTS, COLUMNS)
    await ready(store, SOLVER, sample(0))
    await store.claim(SHARED, 1)
    return asyncio.get_running_loop().time()


def test_a_store_that_nobody_has_any_more_is_gone_though_it_was_not_closed() -> None:
    """SQLite holds a connection's own functions where no garbage collector sees it."""

    def open_connections() -> int:
        gc.collect()
        return sum(type(one) is StoreConnection for one in gc.get_objects())

    before = open_connections()
    store = in_memory(AGENTS, COLUMNS)
    assert open_connections() == before + 1
    del store
    assert open_connections() == before
