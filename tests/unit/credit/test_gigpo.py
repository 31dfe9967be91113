"""GiGPO: episodes against their group, calls against others in the same state."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.gigpo import GiGpo
from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.shape import InvalidAction
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row


def call(
    reward: float, *, episode: int = 0, step: int = 0, anchor: str = "start", call_reward: float = 0.0, **fields: Any
) -> CreditRow:
    tags = {"env_step": step, "anchor": anchor, **fields.pop("tags", {})}
    hop = fields.pop("hop", step)
    return replace(credit_row(reward, episode=episode, hop=hop, tags=tags, **fields), call_reward=call_reward)


def advantages(estimator: GiGpo, rows: list[CreditRow]) -> list[float]:
    found = estimator.estimate(rows).advantages
    return [found[row.sample_id] for row in rows]


def test_a_call_is_compared_with_its_group_and_with_calls_in_the_same_state() -> None:
    rows = [call(1.0), call(0.0, episode=1), call(0.0, episode=2, anchor="elsewhere")]
    # E: 1, 0, 0 less 1/3; S: 1, 0 less 1/2, and nothing for the lone state.
    assert advantages(GiGpo(), rows) == pytest.approx([2 / 3 + 0.5, -1 / 3 - 0.5, -1 / 3], abs=1e-12)
    assert advantages(GiGpo(step_weight=0.0), rows) == pytest.approx([2 / 3, -1 / 3, -1 / 3], abs=1e-12)


def test_both_parts_are_standardised_in_the_other_mode() -> None:
    rows = [call(1.0), call(0.0, episode=1)]
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert advantages(GiGpo(mode="mean_std_norm"), rows) == pytest.approx([2 * half, -2 * half], abs=1e-12)


def test_episodes_are_compared_by_all_their_rows_or_by_their_first() -> None:
    rows = [call(1.0), call(0.8, step=1), call(0.0, episode=1)]
    estimator = GiGpo(key=("task",), step_weight=0.0)
    assert advantages(estimator, rows) == pytest.approx([0.4, 0.2, -0.6], abs=1e-12)
    first = GiGpo(key=("task",), unit="trajectory_first", step_weight=0.0)
    assert advantages(first, rows) == pytest.approx([0.5, 0.3, -0.5], abs=1e-12)


def test_a_lone_row_keeps_its_reward_and_has_no_step_part() -> None:
    assert advantages(GiGpo(), [call(0.7)]) == [0.7]


def test_a_step_is_worth_what_it_earned_and_discounted_what_came_later() -> None:
    scores = GiGpo(gamma=0.5)._step_scores(
        [call(1.0, call_reward=0.25), call(0.75, step=1), call(1.75, step=2, call_reward=1.0)]
    )
    # .75 is the agent's and comes after the last step: .25 + .5 x .5 x (1 + .75); ...
    assert list(scores.values()) == [0.6875, 0.875, 1.75]


def test_calls_of_one_step_share_its_value() -> None:
    rows = [
        call(1.25, call_reward=0.25, hop=0),
        call(1.0, hop=1, agent="verifier"),
        call(1.5, hop=2, step=1, call_reward=0.5),
    ]
    assert list(GiGpo(gamma=0.5)._step_scores(rows).values()) == [1.0, 1.0, 1.5]


def test_agents_with_rewards_of_their_own_each_have_their_own_after_the_last_step() -> None:
    rows = [call(1.0, hop=0), call(-1.0, hop=1, agent="verifier"), call(1.0, step=1, hop=2)]
    assert list(GiGpo(gamma=0.5)._step_scores(rows).values()) == [0.5, -0.5, 1.0]


def test_the_environment_says_itself_what_a_step_earned() -> None:
    rows = [call(9.0, tags={"step_reward": 0.5}), call(9.0, step=1, tags={"step_reward": 1.0})]
    assert list(GiGpo(gamma=0.5)._step_scores(rows).values()) == [1.0, 1.0]


def test_an_invalid_call_lowers_what_its_step_earned_whoever_says_it() -> None:
    said = [call(2.0, tags={"step_reward": 0.5}), call(2.0, step=1, tags={"step_reward": 1.0})]
    given = [call(0.5, call_reward=0.5), call(1.0, step=1, call_reward=1.0)]
    for played in (said, given):
        rows = InvalidAction(penalty=0.25).penalise([played[0], replace(played[1], valid=False)])
        assert list(GiGpo(gamma=0.5)._step_scores(rows).values()) == [0.5 + 0.5 * 0.75, 0.75]


def test_calls_of_one_step_that_do_not_agree_on_its_reward_are_refused() -> None:
    rows = [call(1.0, hop=0, tags={"step_reward": 0.5}), call(1.0, hop=1, tags={"step_reward": 0.25})]
    with pytest.raises(CreditError, match=r"environment step 0 of episode t0e0 do not agree on it: 0.25, 0.5"):
        GiGpo().estimate(rows)
    with pytest.raises(CreditError, match="give all of them what the step earned"):
        GiGpo().estimate([rows[0], call(1.0, hop=1)])


@pytest.mark.parametrize("missing", ["anchor", "env_step"])
def test_a_turn_without_the_environments_tags_is_refused(missing: str) -> None:
    row = call(1.0)
    bare = replace(row, tags={name: value for name, value in row.tags.items() if name != missing})
    with pytest.raises(CreditError, match=f"unknown tag '{missing}': sample {row.sample_id}"):
        GiGpo().estimate([bare])


def test_similar_states_count_as_the_same_from_the_first_one_on() -> None:
    anchors = ["abcdefghij", "abcdefghix", "abcdefghxx", "zzzzzzzzzz"]
    rows = [call(reward, episode=e, anchor=anchors[e]) for e, reward in enumerate((1.0, 0.0, 0.0, 0.0))]
    # The second is .9 like the first; the third .8, and .9 like the second, which represents nothing.
    exact, similar = advantages(GiGpo(), rows), advantages(GiGpo(similarity=0.85), rows)
    assert exact == pytest.approx([0.75, -0.25, -0.25, -0.25], abs=1e-12)
    assert similar == pytest.approx([1.25, -0.75, -0.25, -0.25], abs=1e-12)
    assert advantages(GiGpo(similarity=0.9), rows) == similar


def test_similar_states_of_two_tasks_or_agents_stay_apart() -> None:
    rows = [call(1.0), call(0.0, episode=1), call(1.0, task="t1"), call(0.0, task="t1", episode=1)]
    assert advantages(GiGpo(similarity=0.5), rows) == [1.0, -1.0, 1.0, -1.0]
    assert advantages(GiGpo(key={"solver": ("task",), "*": ("task", "agent")}), rows) == [1.0, -1.0, 1.0, -1.0]


def test_a_key_without_the_task_is_refused() -> None:
    with pytest.raises(CreditError, match="one_task"):
        GiGpo(key=("agent",)).estimate([call(1.0), call(0.0, task="t1")])


def test_it_is_chosen_by_its_type() -> None:
    chosen = TypeAdapter(AnyEstimator).validate_python({"type": "gigpo", "similarity": 0.9})
    assert chosen == GiGpo(similarity=0.9)
    assert chosen.needs == "group"
    with pytest.raises(ValidationError, match="less than 1"):
        GiGpo(similarity=1.0)
