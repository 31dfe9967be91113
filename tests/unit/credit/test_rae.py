"""RAE: each agent against what it is used to."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flexmarl.credit.estimators import AnyEstimator
from flexmarl.credit.estimators.baselines import Rae
from flexmarl.records import AgentName
from flexmarl.testing.credit import credit_row, random_credit_rows

rewards = st.lists(st.floats(-1, 1), min_size=1, max_size=9)


def test_the_baseline_follows_the_rewards_slowly() -> None:
    rows = [credit_row(reward, episode=episode) for episode, reward in enumerate((1.0, 0.0, 0.0, 1.0))]
    credit = Rae().estimate(rows)
    assert [credit.advantages[row.sample_id] for row in rows] == pytest.approx([1, -0.05, -0.0475, 0.954875], abs=1e-12)
    assert credit.memory == {"solver": pytest.approx(0.95 * 0.045125 + 0.05, abs=1e-12)}


@given(rewards, st.floats(0, 0.99), st.floats(-1, 1))
def test_the_baseline_is_a_sum_of_rewards_each_weighing_less_the_older_it_is(rewards, decay: float, start: float):
    rows = [credit_row(reward, episode=episode) for episode, reward in enumerate(rewards)]
    n = len(rewards)
    expected = decay**n * start + (1 - decay) * sum(decay ** (n - 1 - k) * reward for k, reward in enumerate(rewards))
    assert Rae(decay=decay).estimate(rows, {"solver": start}).memory["solver"] == pytest.approx(expected, abs=1e-12)


def test_agents_have_baselines_of_their_own() -> None:
    rows = [credit_row(1.0), credit_row(-1.0, hop=1, agent="verifier")]
    credit = Rae(decay=0.5).estimate(rows, {"solver": 0.5, "router": 0.25})
    assert [credit.advantages[row.sample_id] for row in rows] == [0.5, -1.0]
    assert credit.memory == {"solver": 0.75, "verifier": -0.5, "router": 0.25}


def test_an_episode_counts_once_with_the_mean_of_the_agents_turns() -> None:
    rows = [credit_row(1.0), credit_row(0.0, hop=1)]
    credit = Rae(decay=0.5).estimate(rows)
    assert list(credit.advantages.values()) == [0.5, 0.5]
    assert credit.memory == {"solver": 0.25}


def test_the_order_is_that_of_tasks_and_episodes_not_of_arrival() -> None:
    rows = [credit_row(1.0, task="t1"), credit_row(0.0, task="t0", episode=1), credit_row(0.5, task="t0")]
    credit = Rae(decay=0.5).estimate(rows)
    # Baselines 0, .25, .125 in the order of t0e0, t0e1, t1e0.
    assert [credit.advantages[row.sample_id] for row in rows] == [0.875, -0.25, 0.5]


@given(st.integers(0, 200), st.integers(0, 200))
def test_what_it_remembers_is_saved_and_goes_on_to_the_last_bit(first: int, second: int) -> None:
    estimator = Rae()
    memory = estimator.estimate(random_credit_rows(first)).memory
    restored = json.loads(json.dumps(memory))
    later = random_credit_rows(second)
    assert estimator.estimate(later, restored) == estimator.estimate(later, memory)


@given(st.integers(0, 200), st.integers(1, 8))
def test_steps_one_after_another_equal_one_long_step(seed: int, cut: int) -> None:
    rows = random_credit_rows(seed)
    episodes = sorted({(row.task, row.episode) for row in rows})
    early = set(episodes[:cut])
    before = Rae().estimate([row for row in rows if (row.task, row.episode) in early])
    after = Rae().estimate([row for row in rows if (row.task, row.episode) not in early], before.memory)
    whole = Rae().estimate(rows)
    assert {**before.advantages, **after.advantages} == whole.advantages
    assert after.memory == whole.memory


def test_a_row_without_sampled_tokens_moves_nothing() -> None:
    credit = Rae().estimate([credit_row(1.0, num_tokens=0)], {"solver": 0.5})
    assert credit.memory == {"solver": 0.5}
    assert credit.report[AgentName("solver")].empty == 1


def test_it_is_chosen_by_its_type_and_needs_its_memory() -> None:
    chosen = TypeAdapter(AnyEstimator).validate_python({"type": "rae"})
    assert chosen == Rae()
    assert chosen.needs == "state"
