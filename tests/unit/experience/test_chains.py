import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.experience.backends.sqlite import DurableStore, SqliteStore
from flexmarl.experience.interface import Column, ColumnKind, ExperienceStore, Extended, Outcome, PartialRow
from flexmarl.experience.store_file import read_store
from flexmarl.experience.turn_rows import TURN_COLUMNS, prompt_row
from flexmarl.records import AgentName, GroupId, PolicyName, RowState, make_sample_id, make_trajectory_id
from flexmarl.simulator.virtual_time import run_virtual

AGENTS = (AgentName("solver"), AgentName("verifier"))
POLICY = PolicyName("p")
COLUMNS = (Column("prompt", ColumnKind.TENSOR), Column("reply", ColumnKind.TENSOR))


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[int, int | None, list[int], list[int]]]:
    """Rows as (agent, row that it goes on from, tokens that it adds, tokens of its reply)."""
    tokens = st.lists(st.integers(0, 2**31 - 1), max_size=3)
    count = draw(st.integers(1, 12))
    return [
        (
            draw(st.integers(0, 1)),
            draw(st.none() | st.integers(0, row - 1)) if row else None,
            draw(tokens),
            draw(tokens),
        )
        for row in range(count)
    ]


@settings(max_examples=100, deadline=None)
@given(forests(), st.sets(st.integers(0, 11)), st.booleans())
def test_every_prompt_of_a_forest_of_turns_is_read_back_to_the_last_bit_whatever_has_been_dropped(forest, ended, late):
    async def life():
        store = SqliteStore(agents=AGENTS, columns=COLUMNS)
        ids = [make_sample_id("t", row, make_trajectory_id(0, 0, 0)) for row in range(len(forest))]
        prompts: list[np.ndarray] = []
        replies = [np.array(reply, np.int32) for *_, reply in forest]
        for row, (agent, parent, added, _) in enumerate(forest):
            before = [] if parent is None else [prompts[parent], replies[parent]]
            prompts.append(np.concatenate([*before, np.array(added, np.int32)]))
            value = prompts[row] if parent is None else Extended(ids[parent], ("prompt", "reply"), prompts[row])
            values = {"reply": replies[row]} if late else {"prompt": value, "reply": replies[row]}
            await store.put(AGENTS[agent], [PartialRow(sample_id=ids[row], policy=POLICY, values=values)])
            if late:  # Then the value comes into a row that is there.
                await store.put(
                    AGENTS[agent], [PartialRow(sample_id=ids[row], policy=POLICY, values={"prompt": value})]
                )
        dropped = {row for row in ended if row < len(ids)}
        await store.settle([ids[row] for row in dropped], Outcome(state=RowState.FAILED))
        await store.prune(GroupId(1), 0)
        kept = [row for row in range(len(ids)) if row not in dropped]
        read = await store.get([ids[row] for row in kept])
        return [(row.values["prompt"], prompts[at]) for row, at in zip(read, kept, strict=True)]

    for read, written in run_virtual(life()):
        assert (read.dtype, read.tobytes()) == (written.dtype, written.tobytes())


async def a_conversation(store: ExperienceStore, turns: int, added: int) -> list[np.ndarray]:
    """Puts as many turns, each with so many tokens more; the prompts."""
    prompts: list[np.ndarray] = []
    ids, parent = np.zeros(0, np.int32), None
    for hop in range(turns):
        sample_id = make_sample_id("t", hop, make_trajectory_id(0, 0, 0))
        ids = np.concatenate((ids, np.full(added, hop, np.int32)))
        await store.put(AGENTS[0], [prompt_row(sample_id, POLICY, ids, parent=parent)])
        response = np.full(added, -hop, np.int32)
        await store.put(AGENTS[0], [PartialRow(sample_id=sample_id, policy=POLICY, values={"response_ids": response})])
        prompts.append(ids)
        ids, parent = np.concatenate((ids, response)), sample_id
    return prompts


def test_a_conversation_takes_the_room_of_its_tokens_and_a_reader_of_the_file_sees_whole_prompts(tmp_path):
    async def life():
        store = DurableStore.create(tmp_path / "experience.sqlite", agents=AGENTS, columns=TURN_COLUMNS)
        try:
            prompts = await a_conversation(store, turns=60, added=50)
            return prompts, (await store.query("SELECT sum(length(value)) FROM payloads")).rows[0][0]
        finally:
            await store.close()

    prompts, kept_bytes = asyncio.run(life())
    assert kept_bytes < 1.3 * 60 * 2 * 50 * 4 < 0.05 * sum(prompt.nbytes for prompt in prompts)
    with read_store(tmp_path / "experience.sqlite") as reader:
        rows = list(reader.rows(AGENTS[0]))
        shown = reader.query("SELECT payload(prompt_ids) FROM solver WHERE hop = 1").rows
    assert [row.values["prompt_ids"].tolist() for row in rows] == [prompt.tolist() for prompt in prompts]
    assert shown == ((str(prompts[1].tolist()),),)
