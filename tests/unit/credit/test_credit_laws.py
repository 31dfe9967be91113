"""Laws of comparisons in groups, for every preset that keeps them; and a witness for each that does not.

Order of arrival, empty rows and whole tasks alone are in `check_estimator`, which every preset passes.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.credit import ESTIMATORS, CreditRow
from flexmarl.credit.estimators.base import Grouped
from flexmarl.credit.estimators.c3 import C3
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import Rloo
from flexmarl.credit.rows import Group, group_rows
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, EpisodeId, PolicyName, SampleId
from flexmarl.testing.credit import credit_row, random_credit_rows

CLASSES: dict[str, type[Grouped]] = {
    name: estimator for name in ESTIMATORS.built_in if issubclass(estimator := ESTIMATORS[name], Grouped)
}
# Lone rows compared with nothing, and differences in the last bit that a division blows up, have tests of their own.
ZERO = {name: preset(singleton="zero") for name, preset in CLASSES.items()}
BATCHES = st.builds(random_credit_rows, st.integers(0, 2**32))
LAW = settings(max_examples=60, deadline=None)

WHITENED = {"reinforce++_baseline", "gdpo"}
"""Their scale is that of the step."""
OVER_EPISODES = {"grpo_trajectory", "rloo_trajectory"}
"""Their observations are episodes."""
STEP_WIDE = {*WHITENED, "gpg"}
"""Every row of the step has a part in every advantage."""


def advantages(estimator: Grouped, rows: list[CreditRow]) -> list[float]:
    credit = estimator.estimate(rows)
    return [credit.advantages[row.sample_id] for row in rows]


def groups_of(estimator: Grouped, rows: list[CreditRow]) -> dict[Group, list[CreditRow]]:
    return group_rows([row for row in rows if row.num_tokens], estimator.key)


def with_rewards(rows: list[CreditRow], change: Callable[[float], float]) -> list[CreditRow]:
    return [replace(row, reward=change(row.reward or 0.0)) for row in rows]


def scored(*rewards: float, task: str = "t0") -> list[CreditRow]:
    place = {"turn": 0, "context_hash": task, "path": (0,)}
    return [credit_row(reward, task=task, episode=episode, **place) for episode, reward in enumerate(rewards)]


def of(*without: str) -> pytest.MarkDecorator:
    """Every preset but these."""
    assert set(without) <= set(CLASSES)
    return pytest.mark.parametrize("name", [name for name in CLASSES if name not in without])


# Grouping


@of()
@given(rows=BATCHES)
@LAW
def test_g2_renaming_tasks_episodes_and_agents_changes_nothing(name: str, rows: list[CreditRow]) -> None:
    renamed = [
        replace(row, task=row.task[::-1] + "x", episode=EpisodeId(row.episode[::-1]), agent=AgentName(row.agent[::-1]))
        for row in rows
    ]
    expected = advantages(ZERO[name], rows)
    # Whitening adds up all rows of the step, in another order then.
    tolerance = 1e-9 if name in WHITENED else 1e-12
    assert advantages(ZERO[name], renamed) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@of()
def test_g3_a_group_that_breaks_what_it_requires_raises(name: str) -> None:
    key = ("turn",)
    for field, requirement in (("task", "one_task"), ("policy", "one_policy")):
        rows = scored(1, 0)
        estimator = CLASSES[name].model_validate({"key": key, "require": [requirement], "singleton": "zero"})
        estimator.estimate(rows)
        with pytest.raises(CreditError, match=rf"group \(turn=0\) breaks {requirement}: its rows have 2 values"):
            estimator.estimate([rows[0], replace(rows[1], **{field: "other"})])


@pytest.mark.parametrize("name", ["atgrpo", "c3"])
def test_g3_presets_for_trees_compare_in_one_context(name: str) -> None:
    rows = [replace(row, episode=EpisodeId("t0e0")) for row in scored(1, 0)]
    CLASSES[name]().estimate(rows)
    other = replace(rows[1], context_hash="other")
    with pytest.raises(CreditError, match="breaks one_context: its rows have 2 values of 'context_hash'"):
        CLASSES[name]().estimate([rows[0], other])


@of(*STEP_WIDE, "atgrpo")
@given(rows=BATCHES, seed=st.integers(0, 9))
@LAW
def test_g4_any_whole_groups_alone_have_the_same_advantages(name: str, rows: list[CreditRow], seed: int) -> None:
    estimator = CLASSES[name](singleton="zero")
    assert estimator.needs == "group"
    # What is below a turn of a tree is part of its group.
    key = ("task", "episode") if name == "c3" else estimator.key
    groups = list(group_rows([row for row in rows if row.num_tokens], key).values())
    kept = [row for group in groups if random.Random(f"{seed}{group[0].sample_id}").random() < 0.5 for row in group]
    together = estimator.estimate(rows).advantages
    assert estimator.estimate(kept).advantages == {row.sample_id: together[row.sample_id] for row in kept}


@pytest.mark.parametrize("name", sorted(STEP_WIDE))
def test_g4_does_not_hold_for_what_sees_the_whole_step(name: str) -> None:
    good, bad = scored(1, 0, task="a"), scored(0, 0, 0.2, task="b")
    assert CLASSES[name]().needs == "batch"
    assert advantages(ZERO[name], good) != pytest.approx(advantages(ZERO[name], [*good, *bad])[:2])


@of()
@given(rows=BATCHES, places=st.lists(st.integers(0, 40), min_size=1, max_size=5))
@LAW
def test_g5_and_e10_rows_of_nothing_but_padding_change_nothing_wherever_they_stand(
    name: str, rows: list[CreditRow], places: list[int]
) -> None:
    padded = list(rows)
    for number, place in enumerate(places):
        like = rows[place % len(rows)]
        nothing = replace(like, sample_id=SampleId(f"pad{number}"), num_tokens=0, values=(), reward=math.nan)
        padded.insert(place, replace(nothing, outcome=math.nan))
    assert advantages(ZERO[name], padded) == pytest.approx(_with_gaps(ZERO[name], padded, rows), abs=0)
    assert {ZERO[name].estimate(padded).weights[SampleId(f"pad{number}")] for number in range(len(places))} == {0.0}


def _with_gaps(estimator: Grouped, padded: list[CreditRow], rows: list[CreditRow]) -> list[float]:
    found = estimator.estimate(rows).advantages
    return [found.get(row.sample_id, 0.0) for row in padded]


@of(*STEP_WIDE)
@given(rows=BATCHES, factor=st.floats(0, 5))
@LAW
def test_g6_with_the_agent_in_the_key_its_rewards_are_its_own(name: str, rows: list[CreditRow], factor: float) -> None:
    estimator = CLASSES[name].model_validate({"key": ["task", "agent"], "singleton": "zero"})
    if isinstance(estimator, C3):
        # What follows a turn is what others do after it: on trees of one agent's turns alone.
        rows = [replace(row, path=(place,)) for place, row in enumerate(rows)]
    changed = [replace(row, reward=(row.reward or 0) * factor) if row.agent == "verifier" else row for row in rows]
    before, after = advantages(estimator, rows), advantages(estimator, changed)
    assert [a for a, row in zip(before, rows, strict=True) if row.agent != "verifier"] == [
        a for a, row in zip(after, rows, strict=True) if row.agent != "verifier"
    ]


# Estimators


@of(*WHITENED, *OVER_EPISODES, "opo", "pass@k", "c3")
@given(rows=BATCHES)
@LAW
def test_e1_advantages_of_a_group_sum_to_zero(name: str, rows: list[CreditRow]) -> None:
    found = _without_noise(name).estimate(rows).advantages
    for members in groups_of(ZERO[name], rows).values():
        assert math.isclose(sum(found[row.sample_id] for row in members), 0, abs_tol=1e-12)


@given(rows=BATCHES)
@LAW
def test_e1_for_opo_they_do_so_token_by_token(rows: list[CreditRow]) -> None:
    found = ZERO["opo"].estimate(rows).advantages
    for members in groups_of(ZERO["opo"], rows).values():
        assert math.isclose(sum(row.num_tokens * found[row.sample_id] for row in members), 0, abs_tol=1e-12)


@given(rows=BATCHES)
@LAW
def test_e1_for_means_of_episodes_they_do_so_over_episodes(rows: list[CreditRow]) -> None:
    found = _without_noise("grpo_trajectory").estimate(rows).advantages
    for members in groups_of(ZERO["grpo_trajectory"], rows).values():
        of_episode = {row.episode: found[row.sample_id] for row in members}
        assert math.isclose(sum(of_episode.values()), 0, abs_tol=1e-12)


@given(rows=BATCHES)
@LAW
def test_e1_for_siblings_on_a_tree_they_do_so_without_a_critic(rows: list[CreditRow]) -> None:
    for signal in ("reward_only", "value_only"):
        estimator = C3(signal=signal)
        found = estimator.estimate(rows).advantages
        for members in groups_of(estimator, rows).values():
            assert math.isclose(sum(found[row.sample_id] for row in members), 0, abs_tol=1e-12)


@pytest.mark.parametrize("name", ["opo", "pass@k", "rloo_trajectory"])
def test_e1_does_not_hold_where_rows_are_not_what_is_averaged(name: str) -> None:
    rows = [replace(row, num_tokens=1 + row.hop) for row in [*scored(1, 0), credit_row(0.75, episode=1, hop=1)]]
    assert abs(sum(advantages(ZERO[name], rows))) > 0.1


@of("gpg", "max_rl", "gdpo")
@given(rows=BATCHES, constant=st.sampled_from([-3.0, 0.5, 10.0]))
@LAW
def test_e2_a_constant_added_to_all_rewards_changes_nothing(name: str, rows: list[CreditRow], constant: float) -> None:
    estimator = _without_noise(name)
    shifted = advantages(estimator, with_rewards(rows, lambda reward: reward + constant))
    tolerance = 1e-6 if name in WHITENED else 1e-9
    assert shifted == pytest.approx(advantages(estimator, rows), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ["gpg", "max_rl"])
def test_e2_does_not_hold_for_what_looks_at_the_level(name: str) -> None:
    rows = scored(1, 0)
    shifted = with_rewards(rows, lambda reward: reward + 1)
    assert advantages(ZERO[name], shifted) != pytest.approx(advantages(ZERO[name], rows))


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"max_rl", "pass@k", "c3", "reinforce++_baseline", "gdpo"}))
def test_e2_does_not_hold_for_a_lone_row_that_keeps_its_reward(name: str) -> None:
    estimator = CLASSES[name](singleton="raw")
    (low,), (high,) = advantages(estimator, scored(0.5)), advantages(estimator, scored(0.75))
    assert high > low


@of(*WHITENED)
@given(rows=BATCHES, factor=st.sampled_from([0.25, 3.0]))
@LAW
def test_e3_scaling_rewards_scales_centred_advantages_and_no_others(
    name: str, rows: list[CreditRow], factor: float
) -> None:
    estimator = _without_noise(name)
    scaled = advantages(estimator, with_rewards(rows, lambda reward: reward * factor))
    unchanged = getattr(estimator, "scale", "none") != "none"
    expected = [advantage * (1 if unchanged else factor) for advantage in advantages(estimator, rows)]
    assert scaled == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(WHITENED))
def test_e3_whitened_advantages_have_no_scale_but_for_the_epsilons(name: str) -> None:
    rows = [*scored(1, 0, 0.3, task="a"), *scored(0.5, 0.1, task="b")]
    scaled = advantages(ZERO[name], with_rewards(rows, lambda reward: reward * 3))
    assert scaled == pytest.approx(advantages(ZERO[name], rows), rel=1e-4)


def _without_noise(name: str) -> Grouped:
    """Differences in the last bit, which shifting and scaling make and unmake, are not divided by next to nothing."""
    options: dict[str, object] = {"singleton": "zero"}
    if name == "pass@k":
        return CLASSES[name].model_validate({**options, "scale": "none"})
    if issubclass(CLASSES[name], GroupRelative):
        options |= {"min_std": 1e-9, "eps": 0.0}
    return CLASSES[name].model_validate(options)


@of()
@pytest.mark.parametrize("value", [0.0, 0.1 + 0.2, 1 / 3, 7.7])
def test_e4_equal_rewards_give_exactly_zero(name: str, value: float) -> None:
    for n in (2, 3, 7, 49):
        rows = [replace(row, episode=EpisodeId("t0e0")) if name == "c3" else row for row in scored(*[value] * n)]
        assert advantages(CLASSES[name](), rows) == [0.0] * n


@of("max_rl")
@pytest.mark.parametrize("singleton", ["zero", "raw", "zero_unless_all", "drop", "error"])
def test_e5_a_lone_row_gets_what_its_option_says(name: str, singleton: str) -> None:
    estimator = CLASSES[name].model_validate({"singleton": singleton})
    (row,), others = scored(0.75), scored(1, 0, task="b")
    if singleton == "error":
        with pytest.raises(CreditError, match="has one observation, and singleton is 'error'"):
            estimator.estimate([row])
        return
    raw = 0.75 / (1 + 1e-6) if getattr(estimator, "scale", "") == "std" and name != "pass@k" else 0.75
    alone = {"zero": 0.0, "raw": raw, "zero_unless_all": raw, "drop": 0.0}[singleton]
    credit = estimator.estimate([row])
    assert credit.weights[row.sample_id] == (singleton != "drop")
    assert credit.report[row.agent].dropped_singleton == (singleton == "drop")
    assert credit.advantages[row.sample_id] == (0.0 if name in WHITENED else alone)
    if name not in STEP_WIDE and singleton in ("zero_unless_all", "raw") and name != "c3":
        among_others = estimator.estimate([row, *others]).advantages[row.sample_id]
        assert among_others == (0.0 if singleton == "zero_unless_all" else raw)


@given(rewards=st.lists(st.floats(-1, 1), min_size=2, max_size=8), at=st.integers(0, 7), step=st.floats(0.1, 1))
@LAW
def test_e6_rloo_rises_with_its_own_reward_and_falls_with_the_others(
    rewards: list[float], at: int, step: float
) -> None:
    n, at = len(rewards), at % len(rewards)
    raised = [reward + step * (place == at) for place, reward in enumerate(rewards)]
    before, after = advantages(Rloo(), scored(*rewards)), advantages(Rloo(), scored(*raised))
    slopes = [(b - a) / step for a, b in zip(before, after, strict=True)]
    assert slopes == pytest.approx([1.0 if place == at else -1 / (n - 1) for place in range(n)], abs=1e-9)


@of()
@given(rows=BATCHES)
@LAW
def test_e12_advantages_are_plain_finite_numbers(name: str, rows: list[CreditRow]) -> None:
    credit = ZERO[name].estimate(rows)
    assert all(type(value) is float and math.isfinite(value) for value in credit.advantages.values())


def test_e13_maxrl_refuses_negative_rewards_even_of_a_lone_row() -> None:
    for rewards in ([-0.1], [1.0, -0.1]):
        with pytest.raises(CreditError, match=r"has reward -0.1, and scale is 'mean'; rewards must not be negative"):
            ZERO["max_rl"].estimate(scored(*rewards))


@given(rewards=st.lists(st.sampled_from([0.0, 0.1 + 0.2, 0.3, 1.0]), min_size=2, max_size=8))
@LAW
def test_e13_at_most_one_row_is_the_best_of_k_and_none_if_there_are_two(rewards: list[float]) -> None:
    found = advantages(ZERO["pass@k"], scored(*rewards))
    best = max(rewards)
    assert sum(value != 0 for value in found) == (rewards.count(best) == 1)
    assert all(value >= 0 for value in found)


def test_one_policy_can_be_asked_for() -> None:
    rows = [credit_row(1), replace(credit_row(0, episode=1), policy=PolicyName("other"))]
    with pytest.raises(CreditError, match="add 'policy' to the key"):
        CLASSES["default"].model_validate({"require": ["one_task", "one_policy"]}).estimate(rows)


def test_the_critic_of_a_tree_learns_what_followed() -> None:
    siblings = [
        replace(row, path=(place,), context_hash="c", values=(0.5,) * row.num_tokens)
        for place, row in enumerate([credit_row(1, hop=0), credit_row(0, hop=1)])
    ]
    assert C3(signal="value_assisted").estimate(siblings).returns == {
        siblings[0].sample_id: (1.0, 1.0, 1.0),
        siblings[1].sample_id: (0.0, 0.0, 0.0),
    }
    assert not C3().estimate(siblings).returns
