"""Whole runs of a lead that notes, forgets and hands work on: each turn is paid, and a resumed run is the same."""

import json

from flexmarl.records import RowState, split_sample_id
from flexmarl.testing.scripted_run import ScriptedRun


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def two_questions(task, team):
    """Asks the lead twice; what it was handed back is its answer."""
    await team.lead.act("first")
    reply = await team.lead.act("second")
    team.lead.reward(task.score(reply.text[:1]))
    team.report(success=task.score(reply.text[:1]))


def say(prompt, request):
    if request.agent == "solver":
        return "ab"[request.seed % 2]
    if "second" not in prompt and "noted" not in prompt:
        return call("note", text="n") + call("delegate", agent="solver", task="x")
    if "second" in prompt and "forgotten" not in prompt:
        return call("forget", keep=1) + call("delegate", agent="solver", task="y")
    return "ab"[request.seed % 2]


def run(folder, *, steps):
    policy = {"policy": "solver", "syntax": {"type": "tag"}, "tell_tools": "none", "sampling": {"max_tokens": 400}}
    lead = {**policy, "context": {"tools": ["note", "forget"]}, "delegates": {"agents": ["solver"]}}
    return ScriptedRun(
        two_questions,
        say,
        folder=folder,
        steps=steps,
        batch={"groups": 3, "episodes": 4},
        checkpoint={"every": 1},
        team={"agents": {"lead": lead, "solver": policy}, "workflow": {"type": "custom", "name": "scripted"}},
    ).play()


def fates(played):
    """By id: all that is known of the row."""
    return {row.sample_id: (row.state, row.reason, row.version, repr(row.values)) for row in played.rows()}


def test_each_turn_of_delegated_work_is_trained_and_paid_as_the_call_that_handed_it_over(tmp_path):
    rows = run(tmp_path, steps=2).rows()
    assert len(rows) == 2 * 12 * 6
    assert {row.state for row in rows} == {RowState.TRAINED}
    handed = [row for row in rows if "lane" in row.values["tags"]]
    assert len(handed) == 2 * 12 * 2
    reward = {split_sample_id(row.sample_id)[1:]: row.values["reward"] for row in rows}
    assert {row.values["reward"] for row in handed} == {0.0, 1.0}
    for row in handed:
        assert row.values["reward"] == reward[row.values["tags"]["delegated_by"], split_sample_id(row.sample_id)[2]]


def test_a_run_that_is_resumed_ends_with_the_rows_and_weights_of_one_that_was_not(tmp_path):
    whole = run(tmp_path / "whole", steps=4)
    run(tmp_path / "parts", steps=2)
    parts = run(tmp_path / "parts", steps=4)
    assert parts.trainers["solver"].weight == whole.trainers["solver"].weight
    later = fates(parts)
    assert later == {one: fate for one, fate in fates(whole).items() if one in later}
    assert len(later) == 2 * 12 * 6
