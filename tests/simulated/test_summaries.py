"""Whole runs of an agent that sums its conversation up: every token has its fate, and a resumed run ends as another."""

import pytest

from flexmarl.agents.remembering import LEFT_OUT
from flexmarl.records import RowState
from flexmarl.testing.scripted_run import ScriptedRun


async def three_questions(task, team):
    """Asks one agent three times; its prompts pass the limit twice."""
    for number in range(3):
        reply = await team.solver.act(f"question {number}, please")
    team.solver.reward(task.score(reply.text[:1]))
    team.report(success=task.score(reply.text[:1]))


def say(prompt, request):
    return "ab"[request.seed % 2]


def run(folder, *, steps, train_actions=True, limit_tokens=30):
    compact = {"limit_tokens": limit_tokens, "ask": "sum", "carry": "{summary}|", "train_actions": train_actions}
    agent = {"policy": "solver", "sampling": {"max_tokens": 4}, "context": {"compact": compact}}
    workflow = {"type": "custom", "name": "scripted"}
    return ScriptedRun(
        three_questions,
        say,
        folder=folder,
        steps=steps,
        batch={"groups": 3, "episodes": 4},
        checkpoint={"every": 1},
        team={"agents": {"solver": agent}, "workflow": workflow},
    ).play()


def fates(played):
    """By id: all that is known of the row."""
    return {row.sample_id: (row.state, row.reason, row.version, repr(row.values)) for row in played.rows()}


@pytest.mark.parametrize("train_actions", [True, False])
def test_the_tokens_of_summaries_are_trained_or_filtered_with_the_reason(tmp_path, train_actions):
    played = run(tmp_path, steps=2, train_actions=train_actions)
    rows = played.rows()
    summaries = [row for row in rows if row.values.get("tags") == {"action": "compact"}]
    assert len(rows) == 2 * 12 * 5
    assert len(summaries) == 2 * 12 * 2
    assert all(len(row.values["response_ids"]) == 2 for row in rows), "what the engine sampled: a letter and the end"
    for row in summaries:
        expected = (RowState.TRAINED, "") if train_actions else (RowState.FILTERED, LEFT_OUT)
        assert (row.state, row.reason) == expected
    assert {row.state for row in rows if row not in summaries} == {RowState.TRAINED}


@pytest.mark.parametrize("train_actions", [True, False])
def test_a_run_that_is_resumed_ends_with_the_rows_and_weights_of_one_that_was_not(tmp_path, train_actions):
    whole = run(tmp_path / "whole", steps=4, train_actions=train_actions)
    run(tmp_path / "parts", steps=2, train_actions=train_actions)
    parts = run(tmp_path / "parts", steps=4, train_actions=train_actions)
    assert parts.trainers["solver"].weight == whole.trainers["solver"].weight
    later = fates(parts)
    assert len(later) == 2 * 12 * 5
    assert later == {one: fate for one, fate in fates(whole).items() if one in later}


def test_where_characters_stand_for_tokens_a_text_that_does_not_fit_is_played_all_the_same(tmp_path):
    played = run(tmp_path, steps=1, limit_tokens=10)
    assert {row.state for row in played.rows()} == {RowState.TRAINED}
    assert len(played.rows()) == 12 * 5, "as much is summed up as can be"
