import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import SqliteStore
from flexmarl.experience.interface import Outcome, Row
from flexmarl.experience.turn_rows import (
    LISTS,
    PER_TOKEN,
    TURN_COLUMNS,
    closing_row,
    credit_row,
    open_row,
    prompt_row,
    response_row,
    sample_from_row,
    turn_from_row,
)
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    PolicyName,
    Purpose,
    RowState,
    Sample,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
    make_trajectory_id,
)
from flexmarl.simulator.virtual_time import run_virtual

SOLVER, POLICY = AgentName("solver"), PolicyName("p")
OPEN = ("score", "open_group")
NUMBER = st.integers(0, 999)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
TOKENS = st.integers(0, 2**31 - 1)
BITS = st.floats(width=32)
"""Any float32: infinities, NaN and subnormals too."""

NUMBERS = st.lists(NUMBER, max_size=3).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    length = draw(st.integers(0, 12))
    trajectory = make_trajectory_id(draw(NUMBER), draw(NUMBER), draw(NUMBER))
    starts = sorted({0, *draw(st.lists(st.integers(1, 11), max_size=2))})
    return Turn(
        sample_id=make_sample_id(draw(TEXT.filter(lambda text: "\0" not in text)), draw(NUMBER), trajectory),
        episode=EpisodeId(trajectory),
        agent=SOLVER,
        policy=POLICY,
        prompt_ids=draw(hnp.arrays(np.int32, st.integers(0, 12), elements=TOKENS)),
        response_ids=draw(hnp.arrays(np.int32, length, elements=TOKENS)),
        logprobs=draw(hnp.arrays(np.float32, length, elements=BITS)),
        raw_logprobs=draw(hnp.arrays(np.float32, length, elements=BITS)),
        versions=tuple(VersionRun(start, Version(draw(NUMBER))) for start in starts),
        finish=draw(st.sampled_from(FinishReason)),
        text=draw(TEXT),
        parent=draw(st.none() | st.just(make_sample_id("t", 0, trajectory))),
        valid=draw(st.booleans()),
        call=draw(NUMBER),
        act_hop=draw(st.none() | NUMBER),
        turn=draw(NUMBER),
        branch=draw(TEXT),
        path=draw(NUMBERS),
        context_hash=draw(TEXT),
        after=draw(NUMBERS),
        tool_s=draw(st.floats(min_value=0, allow_infinity=False)),
        purpose=draw(st.sampled_from(Purpose)),
        tags=draw(
            st.dictionaries(
                TEXT,
                TEXT | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
                max_size=4,
            )
        ),
    )


def bits(turn: Turn) -> dict:
    """A turn as something `==` compares to the last bit."""
    fields = {field.name: getattr(turn, field.name) for field in dataclasses.fields(turn)}
    return {
        name: (value.dtype, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


def new_store() -> SqliteStore:
    return SqliteStore(agents=[SOLVER], columns=TURN_COLUMNS)


@settings(max_examples=100, deadline=None)
@given(turns(), st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_what_training_reads_is_what_rollout_wrote_to_the_last_bit(turn, reward, advantage):
    async def life():
        store = new_store()
        await store.put(SOLVER, [prompt_row(turn.sample_id, POLICY, turn.prompt_ids)])
        await store.put(SOLVER, [response_row(turn)])
        await store.put(SOLVER, [closing_row(turn.sample_id, POLICY, reward=reward, next_agent_id=2)])
        await store.put(SOLVER, [credit_row(Sample(turn=turn, advantage=advantage, weight=0.5, episode_tokens=3.0))])
        await store.settle([turn.sample_id], Outcome(state=RowState.READY))
        return await store.get(await store.claim(POLICY, 1))

    (row,) = run_virtual(life())
    sample = sample_from_row(row)
    assert bits(sample.turn) == bits(turn)
    assert (sample.reward, sample.advantage, sample.weight) == (reward, advantage, 0.5)
    assert (row.version, row.next_agent_id) == (turn.version, 2)


A_TURN = Turn(
    sample_id=make_sample_id("mul-7", 2, "g12e3a0"),
    episode=EpisodeId("g12e3a0"),
    agent=SOLVER,
    policy=POLICY,
    prompt_ids=np.array([1, 2, 3], np.int32),
    response_ids=np.array([4, 5], np.int32),
    logprobs=np.array([-0.1, -0.2], np.float32),
    raw_logprobs=np.array([-0.3, -0.4], np.float32),
    versions=(VersionRun(0, Version(3)),),
    finish=FinishReason.STOP,
    tags={"hop": "the workflow's own"},
)


def test_a_turn_with_another_prompt_than_its_row_was_opened_with_is_refused():
    async def life():
        store = new_store()
        await store.put(SOLVER, [prompt_row(A_TURN.sample_id, POLICY, np.array([1, 2, 4], np.int32))])
        await store.put(SOLVER, [response_row(A_TURN)])

    with pytest.raises(StoreError, match=r"mul-7_2_g12e3a0.*prompt_ids"):
        run_virtual(life())


def test_a_turn_of_another_episode_than_its_id_is_refused():
    with pytest.raises(StoreError, match="g12e4a0"):
        response_row(dataclasses.replace(A_TURN, episode=EpisodeId("g12e4a0")))


def row_with(*, without: str = "") -> Row:
    values = {**response_row(A_TURN).values, "reward": 1.0, "advantage": 0.5, "weight": 1.0, "episode_tokens": 2.0}
    values.pop(without, None)
    return Row(
        sample_id=A_TURN.sample_id,
        agent=SOLVER,
        policy=POLICY,
        version=A_TURN.version,
        state=RowState.CLAIMED,
        next_agent_id=None,
        cache=None,
        settled_version=None,
        reason="",
        values=values,
    )


MAY_LACK = ("act_hop", *LISTS, "parts", "signals", "shaped")
"""Columns that a row lacks where a Turn has None or an empty tuple, and columns for people, which no sample has."""


@pytest.mark.parametrize("missing", [c.name for c in TURN_COLUMNS if c.name not in (*PER_TOKEN, *OPEN, *MAY_LACK)])
def test_a_row_without_a_value_is_no_sample_and_the_column_is_named(missing):
    assert bits(sample_from_row(row_with()).turn) == bits(A_TURN)
    with pytest.raises(StoreError, match=rf"'mul-7_2_g12e3a0' \(claimed\) has no {missing};"):
        sample_from_row(row_with(without=missing))


def test_a_row_of_an_open_credit_group_has_a_score_until_it_has_an_advantage():
    turn = turn_from_row(row_with())
    opened = Sample(turn=turn, advantage=0.25, open_group="12: task=mul-7", weight=1.0)
    values = {**row_with(without="advantage").values, **open_row(opened).values}
    read = sample_from_row(dataclasses.replace(row_with(), values=values))
    assert (read.advantage, read.open_group, read.weight) == (0.25, "12: task=mul-7", 1.0)
    closed = sample_from_row(dataclasses.replace(row_with(), values={**values, "advantage": -0.5}))
    assert (closed.advantage, closed.open_group) == (-0.5, "")


def test_a_turn_needs_no_reward_and_no_credit():
    for column in ("reward", "advantage", "weight"):
        assert bits(turn_from_row(row_with(without=column))) == bits(A_TURN)
