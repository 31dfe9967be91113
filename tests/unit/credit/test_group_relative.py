"""Presets, options and laws of the group-relative estimators (docs/math.md sections 5 and 7)."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.credit import ESTIMATORS, CreditRow
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import Default, DrGrpo, Grpo, MaxRl, Opo
from flexmarl.credit.interface import GroupKey
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId
from flexmarl.testing.credit import check_estimator, credit_row, random_credit_rows

CLASSES = {name: estimator for name in ESTIMATORS.built_in if issubclass(estimator := ESTIMATORS[name], GroupRelative)}
PRESETS = [estimator() for estimator in CLASSES.values()]
BATCHES = st.builds(random_credit_rows, st.integers(0, 2**32))
LAW = settings(max_examples=60, deadline=None)


def advantages(estimator: GroupRelative, rows: list[CreditRow]) -> list[float]:
    credit = estimator.estimate(rows)
    return [credit.advantages[row.sample_id] for row in rows]


def scored(*rewards: float, task: str = "t0") -> list[CreditRow]:
    place = {"turn": 0, "context_hash": task}
    return [credit_row(reward, task=task, episode=episode, **place) for episode, reward in enumerate(rewards)]


@pytest.mark.parametrize("unit", ["row", "trajectory_mean", "trajectory_first"])
@pytest.mark.parametrize("singleton", ["zero", "raw", "zero_unless_all", "drop"])
def test_every_combination_of_options_passes_the_conformance_check(unit: str, singleton: str) -> None:
    check_estimator(Grpo.model_validate({"unit": unit, "singleton": singleton}), num_batches=20)


@pytest.mark.parametrize(
    "key",
    [
        ("task", "agent", "env_step"),
        ("task", "my_tag", "tags.turn"),
        {"router": ("episode", "agent", "hurry"), "*": ("task", "agent", "env_step")},
    ],
)
def test_the_conformance_check_has_rows_with_the_tags_that_a_key_names(key: GroupKey) -> None:
    check_estimator(Grpo(key=key), num_batches=20)


# Singletons (law E5)


@pytest.mark.parametrize(
    ("estimator", "advantage", "weight"),
    [
        (DrGrpo(singleton="zero"), 0.0, 1.0),
        (DrGrpo(singleton="raw"), 0.7, 1.0),
        (Grpo(singleton="raw"), 0.7 / (1 + 1e-6), 1.0),
        (DrGrpo(singleton="zero_unless_all"), 0.7, 1.0),
        (DrGrpo(singleton="drop"), 0.0, 0.0),
    ],
)
def test_a_lone_row_gets_what_its_option_says(estimator: GroupRelative, advantage: float, weight: float) -> None:
    (row,) = scored(0.7)
    credit = estimator.estimate([row])
    assert (credit.advantages[row.sample_id], credit.weights[row.sample_id]) == (advantage, weight)
    assert credit.report[row.agent].dropped_singleton == (weight == 0)


def test_zero_unless_all_looks_at_the_whole_batch() -> None:
    estimator = DrGrpo(singleton="zero_unless_all")
    assert estimator.needs == "batch"
    assert advantages(estimator, [*scored(0.7, task="c"), *scored(0.2, task="d")]) == [0.7, 0.2]
    assert advantages(estimator, [*scored(0.7, task="c"), *scored(1, 0, task="d")]) == [0.0, 0.5, -0.5]


def test_a_lone_row_is_an_error_if_asked_for() -> None:
    with pytest.raises(CreditError, match=r"group \(task=c\) has one observation"):
        Grpo(singleton="error").estimate([*scored(1, 0), *scored(0.7, task="c")])


# Units


def test_units_differ_in_what_counts_as_one_observation() -> None:
    rows = [credit_row(1, episode=0, hop=0), credit_row(0, episode=0, hop=1), credit_row(0, episode=1, hop=0)]
    assert advantages(DrGrpo(), rows) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert advantages(DrGrpo(unit="trajectory_mean"), rows) == [0.25, 0.25, -0.25]
    assert advantages(DrGrpo(unit="trajectory_first"), rows) == [0.5, -0.5, -0.5]


def test_an_episode_of_many_rows_is_one_observation() -> None:
    rows = [credit_row(0.5, hop=hop) for hop in range(3)]
    credit = Grpo(unit="trajectory_mean", singleton="drop").estimate(rows)
    assert set(credit.weights.values()) == {0.0}
    assert credit.report[AgentName("solver")].group_sizes == (1,)


def test_an_episode_weighs_as_many_tokens_as_its_observation_has() -> None:
    rows = [
        credit_row(1, episode=0, hop=0, num_tokens=1),
        credit_row(0, episode=0, hop=1, num_tokens=5),
        credit_row(0, episode=1, hop=0, num_tokens=2),
    ]
    mean, first = (Opo(unit=unit) for unit in ("trajectory_mean", "trajectory_first"))
    baseline = (6 * 0.5 + 2 * 0) / 8
    assert advantages(mean, rows) == pytest.approx([0.5 - baseline, 0.5 - baseline, -baseline])
    assert advantages(first, rows) == pytest.approx([1 - 1 / 3, -1 / 3, -1 / 3])


def test_a_lone_episode_keeps_the_mean_of_its_rows() -> None:
    rows = [credit_row(1, hop=0), credit_row(0.5, hop=1)]
    assert advantages(DrGrpo(unit="trajectory_mean"), rows) == [0.75, 0.75]
    assert advantages(DrGrpo(unit="trajectory_first"), rows) == [1, 0.5]


# Spread


def test_min_std_and_std_floor_tame_small_spreads() -> None:
    rows = scored(1, 0.9, 1, 1)
    assert advantages(Grpo(), rows) == pytest.approx([0.5, -1.5, 0.5, 0.5], abs=1e-4)
    assert advantages(Grpo(min_std=0.1), rows) == [0, 0, 0, 0]
    assert advantages(Grpo(min_std=1.0, ddof=0), scored(2, 0)) == [0, 0]
    assert advantages(Grpo(eps=0), scored(1, 1)) == [0, 0]
    assert advantages(Grpo(std_floor=1.0, eps=0.25), rows) == pytest.approx([0.02, -0.06, 0.02, 0.02], abs=1e-12)
    assert advantages(Grpo(std_floor=1.0), rows) == pytest.approx([0.025, -0.075, 0.025, 0.025], abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.1 + 0.2, 1 / 3, -7.7, 1e300])
@pytest.mark.parametrize("n", [2, 3, 7, 49, 100])
def test_equal_rewards_give_exactly_zero(value: float, n: int) -> None:
    for estimator in PRESETS:
        if estimator.scale != "mean" or value >= 0:
            assert advantages(estimator, scored(*[value] * n)) == [0.0] * n


def test_where_all_observations_are_equal_later_rows_get_nothing_either() -> None:
    # The deviation of three times 0.1 is 1e-17 as numbers go, and no spread.
    rows = [*scored(0.1, 0.1, 0.1), credit_row(1, hop=1)]
    assert advantages(Grpo(unit="trajectory_first"), rows) == [0, 0, 0, 0]


def test_rewards_that_differ_by_rounding_stay_near_zero() -> None:
    for estimator in PRESETS:
        assert max(map(abs, advantages(estimator, scored(0.1 + 0.2, 0.3, 0.3)))) < 1e-6


# Rows that cannot be credited


def test_a_missing_reward_names_the_sample_and_the_agent() -> None:
    rows = [*scored(1, 0), credit_row(None, episode=2, agent="verifier")]
    with pytest.raises(CreditError, match="sample t0_0_t0e2 of agent verifier has no reward"):
        Default().estimate(rows)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    with pytest.raises(CreditError, match="sample t0_0_t0e1 of agent solver has reward"):
        Default().estimate(scored(1, reward))


def test_a_turn_is_counted_once() -> None:
    with pytest.raises(CreditError, match="given twice"):
        Default().estimate([*scored(1, 0), *scored(1)])


def test_a_row_without_sampled_tokens_needs_no_reward_and_has_no_weight() -> None:
    empty = credit_row(None, episode=9, num_tokens=0)
    credit = Default().estimate([*scored(1, 0), empty])
    assert credit.weights[empty.sample_id] == 0
    assert [credit.advantages[SampleId(f"t0_0_t0e{episode}")] for episode in (0, 1)] == [0.5, -0.5]
    assert credit.report[AgentName("solver")].empty == 1


def test_a_mean_that_divides_is_none_of_negative_rewards_and_none_of_nothing() -> None:
    with pytest.raises(CreditError, match=r"sample t0_0_t0e1 of agent solver has reward -0\.5, and scale is 'mean'"):
        MaxRl().estimate(scored(1, -0.5))
    padding = credit_row(-1, episode=9, num_tokens=0)
    assert advantages(MaxRl(), [*scored(1, 0), padding]) == [1, -1, 0]
    later = [credit_row(0, episode=episode) for episode in (0, 1)] + [credit_row(1, hop=1)]
    assert advantages(MaxRl(unit="trajectory_first"), later) == [0, 0, 0], "the mean of what is compared is 0"


def test_nothing_in_nothing_out() -> None:
    assert Default().estimate([]).advantages == {}


# Report and settings


def test_the_report_counts_each_agents_groups() -> None:
    rows = [
        *scored(1, 1, task="easy"),
        *scored(0, 0, task="hard"),
        *scored(0.5, 0.5, 0.5, task="flat"),
        *scored(1, 0, task="good"),
        credit_row(1, task="good", episode=0, hop=1, agent="verifier"),
    ]
    report = Default(singleton="drop").estimate(rows).report
    solver = report[AgentName("solver")]
    assert (solver.groups, solver.effective, solver.too_easy, solver.too_hard, solver.flat) == (4, 1, 1, 1, 1)
    assert sorted(solver.group_sizes) == [2, 2, 2, 3]
    assert report[AgentName("verifier")].dropped_singleton == 1
    total = solver + report[AgentName("verifier")]
    assert {name: count for name, count in total.counts.items() if count} == {
        "groups": 5,
        "effective": 1,
        "too_easy": 2,
        "too_hard": 1,
        "flat": 1,
        "dropped_singleton": 1,
    }


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"key": []}, "names no tag"),
        ({"reward_range": [1, 0]}, "1.0 is not below 0.0"),
        ({"singleton": "never"}, "zero_unless_all"),
        ({"keys": ["task"]}, "Extra inputs"),
    ],
)
def test_a_wrong_setting_says_what_works(setting: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Grpo.model_validate(setting)
