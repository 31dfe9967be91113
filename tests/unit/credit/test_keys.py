"""Groups are equal values of tags, and what is required of them is checked."""

import pytest

from flexmarl.credit.rows import group_name, group_rows
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row


def test_a_key_may_differ_by_agent() -> None:
    rows = [
        credit_row(0.0, task="a", episode=0, agent="proposer"),
        credit_row(0.0, task="a", episode=0, hop=1),
        credit_row(0.0, task="a", episode=1, agent="proposer"),
        credit_row(0.0, task="a", episode=1, hop=1),
    ]
    groups = group_rows(rows, {"proposer": ("episode", "agent"), "*": ("task", "agent")})
    assert {group_name(group): len(members) for group, members in groups.items()} == {
        "episode=ae0, agent=proposer": 1,
        "task=a, agent=solver": 2,
        "episode=ae1, agent=proposer": 1,
    }


def test_an_agent_without_a_key_is_an_error() -> None:
    with pytest.raises(CreditError, match="no key for agent solver: there are keys for verifier; add it"):
        group_rows([credit_row(0.0)], {"verifier": ("task",)})


def test_an_unknown_tag_is_named_with_those_there_are() -> None:
    with pytest.raises(CreditError) as error:
        group_rows([credit_row(0.0, tags={"round": 1, "agent": "x"})], ("task", "stage"))
    assert str(error.value) == (
        "unknown tag 'stage': sample t0_0_t0e0 of agent solver carries act, agent, branch, call, context_hash, "
        "episode, greedy, group, hop, path, policy, policy_version, round, task, turn, valid; a workflow gives its own "
        "with `seat.act(text, stage=...)`"
    )


def test_a_tag_with_the_name_of_a_column_is_named_with_its_prefix() -> None:
    rows = [credit_row(0.0, turn=3, tags={"turn": "late"}), credit_row(1.0, turn=4, tags={"turn": "late"})]
    assert list(group_rows(rows, ("turn",))) == [(("turn", 3),), (("turn", 4),)]
    assert list(group_rows(rows, ("tags.turn",))) == [(("tags.turn", "late"),)]


def test_a_group_of_two_tasks_is_an_error_unless_allowed() -> None:
    rows = [credit_row(0.0, task="a"), credit_row(0.0, task="b")]
    with pytest.raises(CreditError, match=r"group \(agent=solver\) breaks one_task: .* 2 values of 'task' \(a, b\)"):
        group_rows(rows, ("agent",))
    assert len(group_rows(rows, ("agent",), require=())) == 1


def test_a_group_of_two_policies_or_contexts_is_an_error_if_required() -> None:
    rows = [
        credit_row(0.0, context_hash="x"),
        credit_row(0.0, hop=1, agent="verifier", context_hash="y"),
    ]
    with pytest.raises(CreditError, match="breaks one_policy"):
        group_rows(rows, ("task",), ("one_policy",))
    with pytest.raises(CreditError, match="breaks one_context"):
        group_rows(rows, ("task",), ("one_context",))
    assert len(group_rows(rows, ("task", "agent"), ("one_task", "one_policy", "one_context"))) == 2
