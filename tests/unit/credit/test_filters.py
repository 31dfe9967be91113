"""The filter keeps exactly the tasks that can teach some agent something."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.credit import CreditRow, OutcomeFilter
from flexmarl.testing.credit import credit_row, random_credit_rows


def scored(*rewards: float, task: str = "t0") -> list[CreditRow]:
    return [credit_row(reward, task=task, episode=episode) for episode, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("rewards", "kept", "reason"),
    [
        ([1, 0, 1], True, "effective"),
        ([1, 1, 1], False, "too_easy"),
        ([0, 0], False, "too_hard"),
        ([0.5, 0.5], False, "flat"),
        ([0.5, 0.5 + 1e-7], False, "flat"),
        ([1.0], False, "too_easy"),
    ],
)
def test_a_task_is_kept_when_its_rewards_differ(rewards: list[float], kept: bool, reason: str) -> None:
    (decision,) = OutcomeFilter().decide(scored(*rewards))
    assert (decision.kept, decision.reason) == (kept, reason)


def test_one_agent_with_something_to_learn_keeps_the_task() -> None:
    verdicts = [credit_row(reward, episode=e, hop=1, agent="verifier") for e, reward in enumerate([1.0, 0.0])]
    (decision,) = OutcomeFilter().decide([*scored(1, 1), *verdicts])
    assert decision.kept
    assert decision.because == "rewards differ for verifier"


def test_groups_that_disagree_about_why_are_flat() -> None:
    verdicts = [credit_row(0.0, episode=episode, hop=1, agent="verifier") for episode in range(2)]
    (decision,) = OutcomeFilter().decide([*scored(1, 1), *verdicts])
    assert (decision.reason, decision.because) == ("flat", "no group's rewards differ: 1 too_easy, 1 too_hard")


def test_agents_on_different_scales_in_one_group_are_looked_at_one_by_one() -> None:
    verdicts = [credit_row(0.0, episode=episode, hop=1, agent="verifier") for episode in range(2)]
    (decision,) = OutcomeFilter().decide([*scored(1, 1), *verdicts], key=("task",))
    assert not decision.kept


def test_a_penalty_alone_keeps_a_solved_task_only_when_filtering_on_final_rewards() -> None:
    rows = [replace(row, outcome=1.0) for row in scored(1, 0.9, 1)]
    assert [decision.reason for decision in OutcomeFilter().decide(rows)] == ["too_easy"]
    assert [decision.reason for decision in OutcomeFilter(filter_on="final").decide(rows)] == ["effective"]


def test_a_dropped_task_whose_own_parts_differ_names_the_setting_that_compares_them() -> None:
    rows = [replace(row, outcome=0.0) for row in scored(0.1, 0.4)]
    (decision,) = OutcomeFilter().decide(rows)
    assert (decision.reason, decision.because) == (
        "too_hard",
        "no group's outcomes differ: 1 too_hard; rewards with their other parts do, for solver: "
        "credit.filter.filter_on=final",
    )
    penalised = [replace(row, prices={"invalid_action": row.reward}) for row in rows]
    (decision,) = OutcomeFilter().decide(penalised)
    assert decision.because == "no group's rewards differ: 1 too_hard"


def test_a_task_without_sampled_tokens_is_dropped() -> None:
    (decision,) = OutcomeFilter().decide([credit_row(None, num_tokens=0)])
    assert (decision.kept, decision.reason) == (False, "flat")


@given(st.builds(random_credit_rows, st.integers(0, 2**32)))
@settings(max_examples=100, deadline=None)
def test_kept_tasks_are_exactly_those_with_an_effective_group(rows: list[CreditRow]) -> None:
    expected = {}
    for row in rows:
        rewards = [r.reward for r in rows if (r.task, r.agent) == (row.task, row.agent) and r.num_tokens]
        spread = max(rewards, default=0.0) - min(rewards, default=0.0)
        expected[row.task] = expected.get(row.task, False) or spread > 1e-6
    assert {decision.task: decision.kept for decision in OutcomeFilter().decide(rows)} == expected


def test_a_reward_range_must_be_ordered() -> None:
    with pytest.raises(ValidationError, match=r"reward_range: 1.0 is not below 0.0"):
        OutcomeFilter(reward_range=(1.0, 0.0))
