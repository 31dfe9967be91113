"""Conformance suite of experience stores: laws that every backend must keep. A check's name is its law."""
# ruff: noqa: D103  (the name of a check is its sentence)

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flexmarl.errors import StoreError, TransitionError
from flexmarl.experience.interface import Column, ColumnKind, ExperienceStore, Extended, Outcome, PartialRow
from flexmarl.records import (
    AgentName,
    EpisodeId,
    GroupId,
    PolicyName,
    RowState,
    SampleId,
    Version,
    make_sample_id,
    make_trajectory_id,
)

MakeStore = Callable[[Sequence[AgentName], Sequence[Column]], ExperienceStore]
"""Makes a new, empty store with a table per agent and these data columns."""

SOLVER, VERIFIER = AgentName("solver"), AgentName("math verifier-2")
SHARED, OTHER = PolicyName("shared"), PolicyName("other")
AGENTS = (SOLVER, VERIFIER)
COLUMNS = (
    *(Column(kind.value, kind) for kind in ColumnKind),
    Column("reward", ColumnKind.FLOAT),
    Column("answer", ColumnKind.TENSOR),
)
READY = Outcome(state=RowState.READY)
TRAINED = Outcome(state=RowState.TRAINED, version=Version(1))


async def check_experience_store(make_store: MakeStore) -> None:
    """Runs every check on a new store; raises AssertionError or the store's error, with a note that names the check."""
    for check in CHECKS:
        store = make_store(AGENTS, COLUMNS)
        try:
            await check(store)
        except Exception as error:
            error.add_note(f"in the conformance check: {check.__name__.replace('_', ' ')}")
            raise
        finally:
            await store.close()


def sample(group: int, *, episode: int = 0, hop: int = 0, attempt: int = 0, task: str = "t_1") -> SampleId:
    """Makes a sample id with the given place in the order of claims."""
    return make_sample_id(task, hop, make_trajectory_id(group, episode, attempt))


def partial(sample_id: SampleId, *, policy: PolicyName = SHARED, version: int | None = 0, **values: Any) -> PartialRow:
    """Makes a row, by default with a version and no values."""
    return PartialRow(
        sample_id=sample_id, policy=policy, values=values, version=None if version is None else Version(version)
    )


async def ready(store: ExperienceStore, agent: AgentName, *ids: SampleId, policy: PolicyName = SHARED) -> None:
    """Puts rows and settles them READY."""
    await store.put(agent, [partial(i, policy=policy) for i in ids])
    await store.settle(ids, READY)


async def train(store: ExperienceStore, *ids: SampleId) -> None:
    """Puts rows, if they are missing, and takes them through all states to TRAINED, at version 1."""
    await store.put(SOLVER, [partial(i) for i in ids])
    await store.settle(ids, READY)
    await store.claim(SHARED, len(ids))
    await store.settle(ids, Outcome(state=RowState.ACCUMULATED, cache="c"))
    await store.settle(ids, TRAINED)


async def refuses(call: Any, kind: type[StoreError], *words: str) -> None:
    """Asserts that awaiting `call` raises `kind` with all the words in its text."""
    text = ""
    try:
        await call
    except kind as error:
        text = str(error)
    assert text, f"expected {kind.__name__}, nothing was raised"
    assert all(word in text for word in words), f"the error should name {words}: {text}"


async def state_of(store: ExperienceStore, sample_id: SampleId) -> RowState:
    """Returns the state of one row."""
    return (await store.get([sample_id]))[0].state


async def a_row_is_filled_piece_by_piece(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), version=None, text="you are cute")])
    (row,) = await store.get([sample(0)])
    assert (row.agent, row.policy, row.state, row.version) == (SOLVER, SHARED, RowState.OPEN, None)
    assert dict(row.values) == {"text": "you are cute"}
    await store.put(SOLVER, [partial(sample(0), version=3, int=7)])
    await store.put(SOLVER, [PartialRow(sample_id=sample(0), policy=SHARED, next_agent_id=1)])
    (row,) = await store.get([sample(0)])
    assert (row.version, row.next_agent_id) == (3, 1)
    assert dict(row.values) == {"text": "you are cute", "int": 7}


async def values_of_every_kind_come_back_as_they_were(store: ExperienceStore) -> None:
    tensor = np.array([[0.1, -0.0], [np.nan, np.inf]], np.float32)
    values = {"int": -(2**63), "float": 0.1, "bool": False, "text": "é\0🙂", "json": {"a": [1, 2.5, True, None, "x"]}}
    await store.put(SOLVER, [partial(sample(0), **values, tensor=tensor)])
    (row,) = await store.get([sample(0)])
    assert {name: row.values[name] for name in values} == values
    assert row.values["bool"] is False
    back = row.values["tensor"]
    assert (back.dtype, back.shape, back.tobytes()) == (tensor.dtype, tensor.shape, tensor.tobytes())


async def a_missing_value_is_a_state_and_never_zero(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0)), partial(sample(1), reward=0.0)])
    unknown, zero = await store.get([sample(0), sample(1)])
    assert "reward" not in unknown.values
    assert zero.values["reward"] == 0.0
    table = await store.query("SELECT reward, reward_status FROM solver ORDER BY sample_id")
    assert table.rows == ((None, 0), (0.0, 1))
    for nothing in (None, float("nan")):
        await refuses(store.put(SOLVER, [partial(sample(0), reward=nothing)]), StoreError, "solver", "reward")


async def a_value_that_is_there_is_not_overwritten(store: ExperienceStore) -> None:
    tensor = np.arange(3)
    await store.put(SOLVER, [partial(sample(0), text="a", float=1.0, tensor=tensor)])
    await store.put(SOLVER, [partial(sample(0), text="a", float=1.0, tensor=tensor.copy())])
    await refuses(store.put(SOLVER, [partial(sample(0), text="b")]), StoreError, "solver", sample(0), "text")
    await refuses(store.put(SOLVER, [partial(sample(0), float=2.0)]), StoreError, "float")
    await refuses(store.put(SOLVER, [partial(sample(0), tensor=tensor.astype(np.int32))]), StoreError, "tensor")
    await refuses(store.put(SOLVER, [partial(sample(0), version=1)]), StoreError, "policy_version")
    await refuses(store.put(SOLVER, [partial(sample(0), policy=OTHER)]), StoreError, "policy")
    await refuses(store.put(SOLVER, [partial(sample(1), int=1), partial(sample(1), int=2)]), StoreError, "int")
    (row,) = await store.get([sample(0)])
    assert (row.values["text"], row.values["float"], row.version, row.policy) == ("a", 1.0, 0, SHARED)


async def a_refused_put_changes_nothing(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), int=1)])
    for bad in (partial(sample(0), int=2), partial(sample(3), int="two"), partial(SampleId("no-such-form"))):
        await refuses(store.put(SOLVER, [partial(sample(1)), partial(sample(0), text="late"), bad]), StoreError)
    assert await store.counts(SHARED) == {RowState.OPEN: 1}
    assert dict((await store.get([sample(0)]))[0].values) == {"int": 1}


async def putting_equal_values_again_changes_nothing_whatever_became_of_the_row(store: ExperienceStore) -> None:
    """A client on another node puts again what it does not know to be put."""
    values = {"int": -1, "float": -0.5, "bool": True, "word": "w", "text": "é", "json": {"a": [1, None]}}
    first = partial(sample(0), **values, tensor=np.array([np.nan, 1.0]))
    second = partial(sample(0, hop=1), tensor=Extended(sample(0), ("tensor",), np.array([np.nan, 1.0, 2.0])))
    ids = [sample(0), sample(0, hop=1)]
    await store.put(SOLVER, [first])
    for outcome in (READY, Outcome(state=RowState.ACCUMULATED, cache="c"), TRAINED):
        await asyncio.gather(store.put(SOLVER, [first, second]), store.put(SOLVER, [first]))
        await store.settle(ids, outcome)
        await store.put(SOLVER, [first, second])
        await store.claim(SHARED, 2)
    await store.put(SOLVER, [first, second])
    await refuses(store.put(SOLVER, [partial(sample(0), **{**values, "int": 0})]), StoreError, sample(0), "int")
    assert await store.counts(SHARED) == {RowState.TRAINED: 2}
    await same_tensors(store, {ids[0]: np.array([np.nan, 1.0]), ids[1]: np.array([np.nan, 1.0, 2.0])})
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((4,),)


async def what_is_not_there_is_named(store: ExperienceStore) -> None:
    await refuses(store.put(AgentName("critic"), [partial(sample(0))]), StoreError, "critic", "solver")
    await refuses(store.put(SOLVER, [partial(sample(0), rewrad=1.0)]), StoreError, "rewrad", "reward")
    await refuses(store.get([sample(4)]), StoreError, sample(4))
    await refuses(store.settle([sample(4)], READY), StoreError, sample(4))


async def a_sample_id_belongs_to_one_table(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0))])
    await refuses(store.put(VERIFIER, [partial(sample(0))]), StoreError, sample(0), SOLVER)


async def claims_follow_group_episode_and_hop_over_all_tables(store: ExperienceStore) -> None:
    order = [
        sample(2, episode=9),
        sample(2, episode=10, hop=2),
        sample(2, episode=10, hop=10),
        sample(10, task="a"),
        sample(10, attempt=1),
        sample(11),
    ]
    await ready(store, VERIFIER, order[5], order[1], order[3])
    await ready(store, SOLVER, order[4], order[2], order[0])
    first = await store.claim(SHARED, 4, holder="trainer")
    second = await store.claim(SHARED, 4, holder="trainer")
    assert [*first, *second] == order
    assert {row.state for row in await store.get(first)} == {RowState.CLAIMED}


async def a_claim_takes_only_ready_rows_of_its_policy(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0))
    await ready(store, SOLVER, sample(1), policy=OTHER)
    await store.put(SOLVER, [partial(sample(2))])
    assert await store.claim(OTHER, 9) == [sample(1)]
    assert await store.claim(SHARED, 9) == [sample(0)]
    assert await store.claim(SHARED, 9) == []
    assert await store.claim(SHARED, 0) == []


async def a_claimed_row_shows_its_values(store: ExperienceStore) -> None:
    await store.put(VERIFIER, [partial(sample(0), tensor=np.arange(4), text="yes", reward=0.5)])
    await store.settle([sample(0)], READY)
    (row,) = await store.get(await store.claim(SHARED, 1))
    assert (row.agent, row.values["text"], row.values["reward"]) == (VERIFIER, "yes", 0.5)
    assert row.values["tensor"].tolist() == [0, 1, 2, 3]


async def claims_at_the_same_time_share_no_row(store: ExperienceStore) -> None:
    await ready(store, SOLVER, *(sample(group) for group in range(12)))
    claims: list[list[SampleId]] = await asyncio.gather(*(store.claim(SHARED, 3, holder=str(i)) for i in range(5)))
    claimed = [sample_id for ids in claims for sample_id in ids]
    assert len(claimed) == len(set(claimed)) == 12


async def a_failed_row_is_never_claimed(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), version=None, text="prompt"), partial(sample(1))])
    await refuses(store.settle([sample(0)], READY), TransitionError, sample(0), "version")
    await store.settle([sample(0)], Outcome(state=RowState.FAILED, reason="timeout"))
    await store.put(SOLVER, [partial(sample(0), text="prompt", int=1)])  # A late value is kept, and changes no state.
    await store.settle([sample(1)], READY)
    assert await store.claim(SHARED, 9) == [sample(1)]
    await refuses(store.settle([sample(0)], READY), TransitionError, sample(0), "failed")
    assert (await store.get([sample(0)]))[0].reason == "timeout"


async def settling_moves_all_rows_or_none(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0))
    await store.put(VERIFIER, [partial(sample(1))])
    failed = Outcome(state=RowState.FAILED, reason="the workflow raised")
    await refuses(store.settle([sample(1), sample(0)], failed), TransitionError, sample(0), "ready", "failed")
    await refuses(store.settle([sample(1), sample(9)], failed), StoreError, sample(9))
    assert await state_of(store, sample(1)) is RowState.OPEN
    await store.settle([sample(1)], failed)
    assert (await store.get([sample(1)]))[0].reason == "the workflow raised"


async def a_row_that_was_ready_too_early_may_be_filtered_before_and_after_it_is_in_a_cache(
    store: ExperienceStore,
) -> None:
    filtered = Outcome(state=RowState.FILTERED, reason="zero variance")
    for number in range(2):
        await ready(store, SOLVER, sample(number))
    await store.claim(SHARED, 1, holder="trainer")
    await refuses(store.settle([sample(0)], filtered), TransitionError, sample(0), "claimed", "filtered")
    await store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED, cache="c0"))
    await store.settle([sample(0), sample(1)], filtered)
    assert [row.cache for row in await store.get([sample(0), sample(1)])] == [None, None]
    assert await store.release(cache="c0") == []
    assert await store.claim(SHARED, 2) == []


async def a_row_lives_until_it_is_trained_into_a_version(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0))
    await store.claim(SHARED, 1, holder="trainer")
    await store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED, cache="c0"))
    (row,) = await store.get([sample(0)])
    assert (row.state, row.cache) == (RowState.ACCUMULATED, "c0")
    assert (await store.query("SELECT is_processing FROM solver")).rows == ((1,),)
    await store.settle([sample(0)], Outcome(state=RowState.TRAINED, version=Version(1)))
    (row,) = await store.get([sample(0)])
    assert (row.state, row.cache, row.settled_version, row.version) == (RowState.TRAINED, None, 1, 0)
    assert (await store.query("SELECT is_processing FROM solver")).rows == ((0,),)


async def an_outcome_names_what_its_state_needs(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0))
    await store.claim(SHARED, 1)
    await refuses(store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED)), StoreError, "cache")
    await refuses(store.settle([sample(0)], Outcome(state=RowState.TRAINED)), StoreError, "version")
    await refuses(store.settle([sample(0)], Outcome(state=RowState.CLAIMED)), TransitionError, "claim")
    await refuses(store.settle([sample(0)], Outcome(state=RowState.EXPIRED, cache="c")), StoreError, "cache")
    assert await state_of(store, sample(0)) is RowState.CLAIMED


async def losing_a_holder_returns_exactly_its_claimed_rows(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0), sample(2))
    await ready(store, VERIFIER, sample(1), sample(3))
    await store.claim(SHARED, 3, holder="lost")
    await store.claim(SHARED, 1, holder="alive")
    await store.settle([sample(0)], Outcome(state=RowState.ACCUMULATED, cache="c0"))
    assert await store.release(holder="lost") == [sample(1), sample(2)]
    assert await store.release(holder="lost") == []
    assert await store.claim(SHARED, 9) == [sample(1), sample(2)]
    assert await state_of(store, sample(3)) is RowState.CLAIMED


async def losing_a_cache_returns_exactly_its_rows(store: ExperienceStore) -> None:
    await ready(store, SOLVER, sample(0), sample(1), sample(2), sample(3))
    await store.claim(SHARED, 4, holder="trainer")
    await store.settle([sample(2), sample(0)], Outcome(state=RowState.ACCUMULATED, cache="lost"))
    await store.settle([sample(1)], Outcome(state=RowState.ACCUMULATED, cache="kept"))
    assert await store.release(cache="lost") == [sample(0), sample(2)]
    assert await store.counts(SHARED) == {RowState.READY: 2, RowState.ACCUMULATED: 1, RowState.CLAIMED: 1}
    await refuses(store.release(), StoreError, "holder", "cache")
    await refuses(store.release(holder="a", cache="b"), StoreError, "holder", "cache")


async def every_row_is_counted_in_one_state(store: ExperienceStore) -> None:
    assert await store.counts(SHARED) == {}
    await store.put(SOLVER, [partial(sample(group)) for group in range(3)])
    await ready(store, VERIFIER, sample(3))
    await ready(store, VERIFIER, sample(4), policy=OTHER)
    await store.settle([sample(0)], Outcome(state=RowState.EXPIRED, reason="deadline"))
    assert await store.counts(SHARED) == {RowState.OPEN: 2, RowState.READY: 1, RowState.EXPIRED: 1}
    assert await store.counts(OTHER) == {RowState.READY: 1}


async def rows_are_read_in_the_order_asked(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0)), partial(sample(2))])
    await store.put(VERIFIER, [partial(sample(1))])
    asked = [sample(2), sample(0), sample(1)]
    assert [row.sample_id for row in await store.get(asked)] == asked
    assert await store.get([]) == []


async def rewinding_discards_these_and_younger_groups_and_they_are_played_again(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), text="kept"), partial(sample(2), version=3, text="then")])
    await train(store, sample(0))
    await store.put(VERIFIER, [partial(sample(3)), partial(sample(4))])
    await ready(store, VERIFIER, sample(11))
    await store.claim(SHARED, 1, holder="lost")
    assert await store.rewind(GroupId(2)) == 4
    assert await store.counts(SHARED) == {RowState.TRAINED: 1}
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((1,),)
    await refuses(store.get([sample(2)]), StoreError, sample(2))
    await store.put(VERIFIER, [partial(sample(2), version=1, text="now")])
    assert (await store.get([sample(2)]))[0].values["text"] == "now"
    assert await store.release(holder="lost") == []
    assert await store.rewind(GroupId(2)) == 1
    assert await store.rewind(GroupId(50)) == 0


async def rewinding_past_a_row_that_has_not_ended_is_refused(store: ExperienceStore) -> None:
    await train(store, sample(0))
    for left in (sample(1), sample(2)):
        await ready(store, VERIFIER, left)
    await store.claim(SHARED, 1, holder="lost")
    for state, moves in (("claimed", Outcome(state=RowState.ACCUMULATED, cache="c")), ("accumulated", None)):
        await refuses(store.rewind(GroupId(2)), StoreError, VERIFIER, sample(1), state, "another run")
        if moves:
            await store.settle([sample(1)], moves)
    assert await store.counts(SHARED) == {RowState.TRAINED: 1, RowState.ACCUMULATED: 1, RowState.READY: 1}


async def rewinding_discards_older_groups_too_that_were_active_whatever_became_of_them(store: ExperienceStore) -> None:
    for group in range(4):
        await store.put(SOLVER, [partial(sample(group), text=f"group {group}")])
    await train(store, sample(0))
    await train(store, sample(1))
    await store.settle([sample(2)], Outcome(state=RowState.READY))
    await refuses(store.rewind(GroupId(3), replay=[GroupId(1)]), StoreError, SOLVER, sample(2), "ready")
    assert await store.rewind(GroupId(3), replay=[GroupId(1), GroupId(2)]) == 3
    assert await store.counts(SHARED) == {RowState.TRAINED: 1}
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((1,),)
    await store.put(VERIFIER, [partial(sample(1), version=2, text="again")])
    assert (await store.get([sample(1)]))[0].values["text"] == "again"


async def discarding_drops_the_rows_of_these_episodes_and_they_are_played_again(store: ExperienceStore) -> None:
    for agent, hop in ((SOLVER, 0), (VERIFIER, 1)):
        for index, attempt in ((0, 0), (0, 1), (1, 0)):
            row = partial(sample(3, episode=index, attempt=attempt, hop=hop), text=f"{index}/{attempt}", json=[hop])
            await store.put(agent, [row])
    await ready(store, SOLVER, sample(3, episode=1, attempt=1, hop=5), sample(30))
    assert await store.discard([EpisodeId("g3e0a0"), EpisodeId("g3e7a0"), EpisodeId("g3e1a0")]) == 4
    assert await store.counts(SHARED) == {RowState.OPEN: 2, RowState.READY: 2}
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((4,),)
    await refuses(store.get([sample(3)]), StoreError, sample(3))
    assert await store.discard([EpisodeId("g3e0a0"), EpisodeId("g3e1a0")]) == 0
    assert await store.discard([]) == 0
    await store.put(VERIFIER, [partial(sample(3), policy=OTHER, text="again")])
    assert (await store.get([sample(3)]))[0].values["text"] == "again"
    assert await store.discard([EpisodeId("g3e0a0"), EpisodeId("g3e0a0")]) == 1


async def discarding_an_episode_that_has_a_later_row_is_refused_and_changes_nothing(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0)), partial(sample(1), text="open")])
    await ready(store, VERIFIER, sample(1, hop=1))
    both = [EpisodeId("g0e0a0"), EpisodeId("g1e0a0")]
    await refuses(store.discard(both), StoreError, VERIFIER, sample(1, hop=1), "ready")
    await store.settle([sample(1, hop=1)], Outcome(state=RowState.FILTERED))
    await refuses(store.discard(both), StoreError, sample(1, hop=1), "filtered")
    assert await store.counts(SHARED) == {RowState.OPEN: 2, RowState.FILTERED: 1}
    assert (await store.get([sample(1)]))[0].values["text"] == "open"
    await refuses(store.discard([EpisodeId("episode 1")]), StoreError, "episode 1", "g12e3a0")


async def a_discarded_group_is_pruned_again(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), text="lost")])
    assert await store.prune(GroupId(1), 0) == 0
    assert await store.discard([EpisodeId("g0e0a0")]) == 1
    await store.put(SOLVER, [partial(sample(0), text="again")])
    await train(store, sample(0))
    assert await store.prune(GroupId(1), 0) == 1


async def pruning_drops_payloads_of_the_oldest_ended_rows_until_the_store_is_small_enough(
    store: ExperienceStore,
) -> None:
    values = {"tensor": np.zeros(100_000), "json": [1], "reward": 0.5}
    for group in range(4):
        await store.put(SOLVER, [partial(sample(group), text=f"group {group}", **values)])
        await train(store, sample(group))
    assert await store.prune(GroupId(4), 10**9) == 0
    assert await store.prune(GroupId(4), 3_000_000) == 1
    first, second = await store.get([sample(0), sample(1)])
    assert (dict(first.values), first.state, first.settled_version) == ({"reward": 0.5}, RowState.TRAINED, 1)
    assert second.values["text"] == "group 1"
    assert await store.prune(GroupId(3), 0) == 2
    table = await store.query("SELECT payload(text), text_status, tensor_status, reward_status FROM solver ORDER BY 1")
    assert table.rows == (*[(None, 0, 0, 1)] * 3, ("group 3", 1, 1, 1))
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((3,),)


async def pruning_leaves_rows_that_have_not_ended(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), text="open"), partial(sample(0, hop=1), text="failed")])
    await store.settle([sample(0, hop=1)], Outcome(state=RowState.FAILED))
    assert await store.prune(GroupId(9), 0) == 1
    opened, failed = await store.get([sample(0), sample(0, hop=1)])
    assert (dict(opened.values), dict(failed.values)) == ({"text": "open"}, {})


async def talk(store: ExperienceStore, hops: int) -> dict[SampleId, np.ndarray]:
    """Puts a conversation whose rows alternate between tables. Each `tensor` begins with the last row's and its answer.

    Returns the tensor of each row.
    """
    whole: dict[SampleId, np.ndarray] = {}
    ids, parent = np.zeros(0, np.int32), None
    for hop in range(hops):
        agent, row = AGENTS[hop % 2], sample(0, hop=hop)
        ids = np.concatenate((ids, np.arange(hop + 1, dtype=np.int32)))
        await store.put(agent, [partial(row, tensor=Extended(parent, ("tensor", "answer"), ids) if parent else ids)])
        whole[row], answer, parent = ids, np.full(2, -hop, np.int32), row
        await store.put(agent, [partial(row, answer=answer)])
        ids = np.concatenate((ids, answer))
    return whole


async def same_tensors(store: ExperienceStore, whole: dict[SampleId, np.ndarray]) -> None:
    """Asserts that each row's `tensor` is the given one, in dtype, shape and bits."""
    for row, held in zip(await store.get([*whole]), whole.values(), strict=True):
        tensor = row.values["tensor"]
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (held.dtype, held.shape, held.tobytes())


async def a_tensor_that_begins_with_those_of_another_row_is_read_back_whole(store: ExperienceStore) -> None:
    whole = await talk(store, 6)
    await same_tensors(store, whole)
    await same_tensors(store, dict(reversed(whole.items())))
    await same_tensors(store, {sample(0, hop=5): whole[sample(0, hop=5)]})
    table = await store.query('SELECT payload(tensor) FROM "math verifier-2" ORDER BY hop LIMIT 1')
    assert table.rows == (("[0, 0, 0, 0, 1]",),)


async def a_tensor_is_the_same_value_whether_it_is_given_whole_or_as_one_that_begins_with_others(
    store: ExperienceStore,
) -> None:
    whole = await talk(store, 3)
    last = sample(0, hop=2)
    extended = Extended(sample(0, hop=1), ("tensor", "answer"), whole[last])
    await store.put(SOLVER, [partial(last, tensor=extended)])
    await store.put(SOLVER, [partial(last, tensor=whole[last])])
    await refuses(store.put(SOLVER, [partial(last, tensor=whole[last] + 1)]), StoreError, str(last), "tensor")
    again = sample(0, hop=3)
    await store.put(SOLVER, [partial(again, tensor=whole[last])])
    await store.put(SOLVER, [partial(again, tensor=extended)])
    await same_tensors(store, {**whole, again: whole[last]})


async def a_tensor_that_does_not_begin_with_what_it_was_said_to_is_refused(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), tensor=np.array([1, 2]))])
    row = sample(0, hop=1)
    for wrong in ([1, 3, 4], [1], [[1, 2]], [1.0, 2.0, 3.0]):
        extended = Extended(sample(0), ("tensor",), np.array(wrong))
        await refuses(store.put(SOLVER, [partial(row, tensor=extended)]), StoreError, str(row), "tensor")
    for parent in (sample(1), sample(0, episode=1), sample(0, attempt=1)):
        other = Extended(parent, ("tensor",), np.array([1, 2, 3]))
        await refuses(store.put(SOLVER, [partial(row, tensor=other)]), StoreError, str(row), "episode")
    await refuses(store.get([row]), StoreError, str(row))


async def a_tensor_that_begins_with_what_is_not_there_is_kept_whole(store: ExperienceStore) -> None:
    """A row is not there if it is put in the same call, if it was never put, or if it lacks the value."""
    ids = np.array([1, 2, 3])
    first, second, third = (sample(0, hop=hop) for hop in range(3))
    extended = {row: Extended(parent, ("tensor", "answer"), ids) for row, parent in ((second, first), (third, second))}
    await store.put(SOLVER, [partial(row, tensor=value) for row, value in extended.items()])
    await store.put(SOLVER, [partial(sample(0, hop=4), tensor=Extended(second, ("tensor", "answer"), ids))])
    await same_tensors(store, dict.fromkeys([second, third, sample(0, hop=4)], ids))


async def dropping_rows_leaves_those_whole_that_begin_with_them(store: ExperienceStore) -> None:
    whole = await talk(store, 5)
    ended = [sample(0, hop=hop) for hop in (0, 2)]
    await store.settle(ended, Outcome(state=RowState.FILTERED))
    assert await store.prune(GroupId(1), 0) == 2
    await same_tensors(store, {row: tensor for row, tensor in whole.items() if row not in ended})
    assert [dict(row.values) for row in await store.get(ended)] == [{}, {}]
    await store.put(SOLVER, [partial(sample(0, hop=6), tensor=Extended(ended[0], ("tensor",), np.arange(3)))])
    await same_tensors(store, {sample(0, hop=6): np.arange(3)})
    assert await store.rewind(GroupId(0)) == 6
    await talk(store, 3)
    assert await store.discard([EpisodeId("g0e0a0")]) == 3
    assert (await store.query("SELECT count(*) FROM payloads")).rows == ((0,),)


async def a_query_shows_payloads_as_a_person_reads_them(store: ExperienceStore) -> None:
    tensor = np.array([[1, 2], [3, 4]], np.int32)
    await store.put(SOLVER, [partial(sample(0), text="é 🙂", json={"a": [1]}, tensor=tensor)])
    table = await store.query("SELECT payload(text), payload(json), payload(tensor), payload(NULL) FROM solver")
    assert table.rows == (("é 🙂", '{"a":[1]}', "[[1, 2], [3, 4]]", None),)


async def puts_at_the_same_time_all_arrive(store: ExperienceStore) -> None:
    refused = partial(sample(7), int="seven")
    rows = [partial(sample(group), int=group) for group in range(50)]
    results = await asyncio.gather(
        *(store.put(SOLVER, [refused if row.sample_id == sample(7) else row]) for row in rows), return_exceptions=True
    )
    assert [type(result) for result in results if result is not None] == [StoreError]
    assert await store.counts(SHARED) == {RowState.OPEN: 49}
    assert [row.values["int"] for row in await store.get([sample(6), sample(8)])] == [6, 8]


async def a_query_reads_and_never_writes(store: ExperienceStore) -> None:
    await store.put(SOLVER, [partial(sample(0), text="hello", json={"hop": 2})])
    table = await store.query(
        "SELECT t.value AS text, json_extract(j.value, '$.hop') AS hop, text_status, float_status FROM solver s "
        "JOIN payloads t ON t.key = s.text JOIN payloads j ON j.key = s.json"
    )
    assert table.columns == ("text", "hop", "text_status", "float_status")
    assert table.rows == (("hello", 2, 1, 0),)
    assert (await store.query(f'SELECT count(*) FROM "{VERIFIER}"')).rows == ((0,),)
    for sql in (
        "DELETE FROM solver",
        "UPDATE solver SET state = 'ready'",
        "INSERT INTO payloads VALUES (99, 'x')",
        "DROP TABLE solver",
        "CREATE TABLE mine (x)",
        "PRAGMA query_only = OFF",
        "ATTACH DATABASE ':memory:' AS aside",
        "BEGIN IMMEDIATE",
        "COMMIT",
        "SELECT 1; DELETE FROM solver",
        "SELECT nonsense FROM nowhere",
    ):
        await refuses(store.query(sql), StoreError, sql, "SELECT")
    await store.put(SOLVER, [partial(sample(1))])
    assert (await store.query("SELECT count(*) FROM solver WHERE state = 'open'")).rows == ((2,),)


async def closing_twice_is_no_error_and_ends_the_store(store: ExperienceStore) -> None:
    await store.close()
    await store.close()
    await refuses(store.counts(SHARED), StoreError, "closed")


CHECKS = (
    a_row_is_filled_piece_by_piece,
    values_of_every_kind_come_back_as_they_were,
    a_missing_value_is_a_state_and_never_zero,
    a_value_that_is_there_is_not_overwritten,
    a_refused_put_changes_nothing,
    putting_equal_values_again_changes_nothing_whatever_became_of_the_row,
    what_is_not_there_is_named,
    a_sample_id_belongs_to_one_table,
    claims_follow_group_episode_and_hop_over_all_tables,
    a_claim_takes_only_ready_rows_of_its_policy,
    a_claimed_row_shows_its_values,
    claims_at_the_same_time_share_no_row,
    a_failed_row_is_never_claimed,
    settling_moves_all_rows_or_none,
    a_row_that_was_ready_too_early_may_be_filtered_before_and_after_it_is_in_a_cache,
    a_row_lives_until_it_is_trained_into_a_version,
    an_outcome_names_what_its_state_needs,
    losing_a_holder_returns_exactly_its_claimed_rows,
    losing_a_cache_returns_exactly_its_rows,
    every_row_is_counted_in_one_state,
    rows_are_read_in_the_order_asked,
    rewinding_discards_these_and_younger_groups_and_they_are_played_again,
    rewinding_past_a_row_that_has_not_ended_is_refused,
    rewinding_discards_older_groups_too_that_were_active_whatever_became_of_them,
    discarding_drops_the_rows_of_these_episodes_and_they_are_played_again,
    discarding_an_episode_that_has_a_later_row_is_refused_and_changes_nothing,
    a_discarded_group_is_pruned_again,
    pruning_drops_payloads_of_the_oldest_ended_rows_until_the_store_is_small_enough,
    pruning_leaves_rows_that_have_not_ended,
    a_tensor_that_begins_with_those_of_another_row_is_read_back_whole,
    a_tensor_is_the_same_value_whether_it_is_given_whole_or_as_one_that_begins_with_others,
    a_tensor_that_does_not_begin_with_what_it_was_said_to_is_refused,
    a_tensor_that_begins_with_what_is_not_there_is_kept_whole,
    dropping_rows_leaves_those_whole_that_begin_with_them,
    a_query_shows_payloads_as_a_person_reads_them,
    puts_at_the_same_time_all_arrive,
    a_query_reads_and_never_writes,
    closing_twice_is_no_error_and_ends_the_store,
)
