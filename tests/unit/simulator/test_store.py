import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import ExperienceStore, Outcome
from flexmarl.records import EpisodeId, GroupId, RowState, Version
from flexmarl.simulator.modelled_store import SimulatedStore
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.experience import (
    AGENTS,
    CHECKS,
    COLUMNS,
    READY,
    SHARED,
    SOLVER,
    VERIFIER,
    partial,
    ready,
    sample,
)


def in_dictionaries() -> SimulatedStore:
    return SimulatedStore(agents=AGENTS, columns=COLUMNS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_dictionaries_keep_experience(check):
    run_virtual(check(in_dictionaries()))


MOVES = st.one_of(
    st.tuples(st.just("put"), st.integers(0, 5), st.booleans()),
    st.tuples(st.just("settle"), st.integers(0, 5), st.sampled_from(list(RowState))),
    st.tuples(st.just("claim"), st.integers(0, 3), st.sampled_from(["a", "b"])),
    st.tuples(st.just("release"), st.sampled_from([None, "a", "b"]), st.sampled_from([None, "c"])),
    st.tuples(st.just("rewind"), st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("discard"), st.integers(0, 6), st.integers(0, 6)),
)


@given(st.lists(MOVES, max_size=30))
@settings(max_examples=150, deadline=None)
def test_it_does_what_sqlite_does_error_for_error(moves):
    async def told(store: ExperienceStore) -> list[object]:
        heard: list[object] = []
        for move in moves:
            try:
                heard.append(await _make(store, *move))
            except StoreError as error:
                # Of several rows that a rewind is refused for, each store names the one that it found first.
                heard.append(str(error).rpartition("but groups")[-1])
            heard.append(await store.counts(SHARED))
        tables = [f'SELECT * FROM "{agent}" ORDER BY sample_id' for agent in AGENTS]
        return [*heard, *[await store.query(sql) for sql in ("SELECT * FROM samples ORDER BY 1", *tables)]]

    assert run_virtual(told(in_dictionaries())) == run_virtual(told(SqliteStore(agents=AGENTS, columns=COLUMNS)))


async def _make(store: ExperienceStore, kind: str, first, second) -> object:
    if kind == "put":
        agent = VERIFIER if first % 2 else SOLVER
        return await store.put(agent, [partial(sample(first), version=0 if second else None, float=0.5)])
    if kind == "settle":
        cache = "c" if second is RowState.ACCUMULATED else None
        version = Version(1) if second is RowState.TRAINED else None
        return await store.settle([sample(first)], Outcome(state=second, cache=cache, version=version))
    if kind == "claim":
        return await store.claim(SHARED, first, holder=second)
    if kind == "release":
        return await store.release(holder=first, cache=second)
    if kind == "discard":
        return await store.discard([EpisodeId(f"g{group}e0a0") for group in (first, second)])
    return await store.rewind(GroupId(first), replay=[GroupId(second)])


def test_a_row_that_was_ready_twice_is_claimed_once():
    async def life():
        store = in_dictionaries()
        await ready(store, SOLVER, sample(0), sample(1))
        await store.claim(SHARED, 2, holder="lost")
        await store.release(holder="lost")
        await store.rewind(GroupId(0))
        await ready(store, SOLVER, sample(0))
        return await store.claim(SHARED, 9)

    assert run_virtual(life()) == [sample(0)]


def test_a_query_shows_rows_wherever_they_are_in_their_life():
    async def life():
        store = in_dictionaries()
        await ready(store, SOLVER, *(sample(group) for group in range(3)))
        await store.claim(SHARED, 2, holder="trainer")
        await store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED, cache="c"))
        return await store.query("SELECT state, holder, cache, is_processing FROM solver ORDER BY sample_id")

    rows = [("accumulated", None, "c", 1), ("claimed", "trainer", None, 0), ("ready", None, None, 0)]
    assert run_virtual(life()).rows == tuple(rows)


def test_virtual_time_does_not_pass_and_nobody_else_runs_meanwhile():
    async def life():
        others: list[str] = []
        asyncio.get_running_loop().call_soon(others.append, "ran")
        store = in_dictionaries()
        await store.put(SOLVER, [partial(sample(0))])
        await store.settle([sample(0)], READY)
        await store.claim(SHARED, 1)
        await store.query("SELECT * FROM solver")
        return list(others), asyncio.get_running_loop().time()

    assert run_virtual(life()) == ([], 0.0)
