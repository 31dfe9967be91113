"""Every preset that compares rows in groups: its options, the worked example, and what is its own (docs/math.md 5)."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from flexmarl.credit import ESTIMATORS, AnyEstimator, CreditRow, CreditSettings
from flexmarl.credit.estimators.base import Grouped
from flexmarl.credit.estimators.c3 import C3
from flexmarl.credit.estimators.gdpo import Gdpo
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import (
    AtGrpo,
    Default,
    DrGrpo,
    DrMas,
    Gpg,
    Grpo,
    GrpoTrajectory,
    Hierarchical,
    MaxRl,
    Opo,
    PassAtK,
    ReinforcePPBaseline,
    Rllm,
    Rloo,
    RlooTrajectory,
)
from flexmarl.errors import CreditError
from flexmarl.testing.credit import check_estimator, credit_row

CLASSES = {name: estimator for name in ESTIMATORS.built_in if issubclass(estimator := ESTIMATORS[name], Grouped)}
A, B, C = [1.0, 0.0, 0.0, 1.0], [0.5, 0.0], [0.7]


def advantages(estimator: Grouped, rows: list[CreditRow]) -> list[float]:
    credit = estimator.estimate(rows)
    return [credit.advantages[row.sample_id] for row in rows]


def scored(*rewards: float, task: str = "t0", lengths: tuple[int, ...] = ()) -> list[CreditRow]:
    place: dict[str, Any] = {"turn": 0, "context_hash": task, "path": (0,)}
    return [
        credit_row(reward, task=task, episode=e, num_tokens=lengths[e] if lengths else 3, **place)
        for e, reward in enumerate(rewards)
    ]


W1 = [
    *scored(*A, task="a", lengths=(2, 4, 3, 1)),
    *scored(*B, task="b", lengths=(2, 2)),
    *scored(*C, task="c", lengths=(2,)),
]


@pytest.mark.parametrize("name", CLASSES)
def test_an_estimator_is_chosen_by_its_type(name: str) -> None:
    assert TypeAdapter(AnyEstimator).validate_python({"type": name}) == CLASSES[name]()
    chosen = {"estimator": {"type": name}, "filter": None, "invalid_action": {"order": "after"}}
    assert CreditSettings.model_validate(chosen).filter is None


@pytest.mark.parametrize("name", CLASSES)
def test_every_preset_passes_the_conformance_check(name: str) -> None:
    check_estimator(CLASSES[name](singleton="zero") if name == "pass@k" else CLASSES[name]())


def test_presets_are_what_their_table_says() -> None:
    task, agent, turn = ("task",), ("task", "agent"), ("task", "agent", "turn")
    presets = {name: estimator() for name, estimator in CLASSES.items() if issubclass(estimator, GroupRelative)}
    options = {n: (e.key, e.unit, e.centre, e.scale, e.ddof, e.eps, e.singleton, e.needs) for n, e in presets.items()}
    assert options == {
        "default": (agent, "row", "mean", "none", 1, 1e-6, "zero", "group"),
        "grpo": (task, "row", "mean", "std", 1, 1e-6, "raw", "group"),
        "grpo_trajectory": (task, "trajectory_mean", "mean", "std", 1, 1e-6, "raw", "group"),
        "drmas": (agent, "row", "mean", "std", 1, 1e-6, "raw", "group"),
        "atgrpo": (turn, "act", "mean", "std", 1, 1e-6, "zero_unless_all", "batch"),
        "dr_grpo": (task, "row", "mean", "none", 1, 1e-6, "raw", "group"),
        "rllm": (agent, "row", "mean", "std", 0, 1e-6, "raw", "group"),
        "rloo": (task, "row", "leave_one_out", "none", 1, 1e-6, "raw", "group"),
        "rloo_trajectory": (task, "trajectory_first", "leave_one_out", "none", 1, 1e-6, "raw", "group"),
        "reinforce++_baseline": (task, "row", "mean", "none", 1, 1e-6, "raw", "batch"),
        "max_rl": (task, "row", "mean", "mean", 1, 1e-6, "zero", "group"),
        "opo": (task, "row", "length_weighted", "none", 1, 1e-6, "raw", "group"),
        "gpg": (task, "row", "mean", "none", 1, 1e-6, "raw", "batch"),
        "gdpo": (task, "row", "mean", "std", 1, 1e-6, "raw", "batch"),
        "hierarchical": ({"*": agent}, "row", "mean", "none", 1, 1e-6, "zero", "group"),
    }
    assert AtGrpo().require == ("one_task", "one_context")
    assert C3().require == ("one_task", "one_context")
    others = {name: (e().singleton, e().needs) for name, e in CLASSES.items() if not issubclass(e, GroupRelative)}
    assert {"pass@k": ("error", "group"), "c3": ("zero", "group")}.items() <= others.items()


STANDARDISED = [0.866024, -0.866024, -0.866024, 0.866024, 0.707105, -0.707105]
CENTRED = [0.5, -0.5, -0.5, 0.5, 0.25, -0.25]
LEFT_OUT = [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.5, -0.5]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (Default(), [*CENTRED, 0.0]),
        (Grpo(), [*STANDARDISED, 0.6999993]),
        (GrpoTrajectory(), [*STANDARDISED, 0.6999993]),
        (DrMas(), [*STANDARDISED, 0.6999993]),
        (AtGrpo(), [*STANDARDISED, 0.0]),
        (AtGrpo(singleton="raw"), [*STANDARDISED, 0.6999993]),
        (DrGrpo(), [*CENTRED, 0.7]),
        (Rllm(), [0.999998, -0.999998, -0.999998, 0.999998, 0.999996, -0.999996, 0.6999993]),
        (Rloo(), [*LEFT_OUT, 0.7]),
        (Rloo(singleton="zero"), [*LEFT_OUT, 0.0]),
        (RlooTrajectory(), [*LEFT_OUT, 0.7]),
        (MaxRl(), [1.0, -1.0, -1.0, 1.0, 1.0, -1.0, 0.0]),
        (Opo(), [0.7, -0.3, -0.3, 0.7, 0.25, -0.25, 0.7]),
        (Gpg(), [0.875, -0.875, -0.875, 0.875, 0.4375, -0.4375, 1.225]),
        (PassAtK(singleton="zero"), [0.0, 0.0, 0.0, 0.0, 1.414209, 0.0, 0.0]),
        (PassAtK(singleton="zero", scale="none"), [0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]),
        (Hierarchical(), [*CENTRED, 0.0]),
        (C3(key=("task",)), [*LEFT_OUT, 0.0]),
    ],
    ids=lambda value: value.type if isinstance(value, Grouped) else "",
)
def test_the_worked_example_comes_out_to_its_printed_digits(estimator: Grouped, expected: list[float]) -> None:
    assert advantages(estimator, W1) == pytest.approx(expected, abs=6e-7)


# What is a preset's own


def test_reinforce_pp_baseline_whitens_what_was_centred_in_the_group() -> None:
    credit = ReinforcePPBaseline(whiten="batch").estimate(W1)
    centred = np.repeat([*CENTRED, 0.7], [row.num_tokens for row in W1])
    expected = (centred - centred.mean()) / centred.std(ddof=1)
    found = np.repeat([credit.advantages[row.sample_id] for row in W1], [row.num_tokens for row in W1])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_gdpo_standardises_each_part_by_itself() -> None:
    # Added up, (1, 0) and (0, 1) are the same; apart, the second part counts as much as the first, though it is small.
    mixes = [(1.0, 0.0), (1.0, 0.1), (0.0, 0.0), (0.0, 0.1)]
    rows = [
        replace(row, parts=dict(zip(("right", "short"), m, strict=True)))
        for row, m in zip(scored(*A), mixes, strict=True)
    ]
    expected = np.array([0.0, 1.0, -1.0, 0.0])
    found = np.array(advantages(Gdpo(), rows))
    np.testing.assert_allclose(found, expected * found[1], rtol=0, atol=1e-4)
    heavier = np.array(advantages(Gdpo(weights={"short": 3.0}), rows))
    np.testing.assert_allclose(heavier, np.array([-0.5, 1.0, -1.0, 0.5]) * heavier[1], rtol=0, atol=1e-4)


def test_gdpo_without_parts_is_grpo_and_whitens() -> None:
    rows = scored(*A)
    assert advantages(Gdpo(), rows) == pytest.approx(advantages(Gdpo(weights={"outcome": 2.0}), rows), abs=1e-5)
    assert np.sign(advantages(Gdpo(), rows)).tolist() == [1, -1, -1, 1]


def test_a_part_that_a_row_lacks_is_0() -> None:
    rows = [
        replace(scored(1, 1)[0], parts={"outcome": 0.5, "bonus": 0.5}),
        replace(scored(1, 1)[1], parts={"outcome": 0.5}),
    ]
    high, low = advantages(Gdpo(), rows)
    assert high == -low > 0


def test_the_best_of_a_group_earns_its_lead_over_the_second_and_the_sign_of_rewards_does_not_matter() -> None:
    rows = scored(1.0, 0.75, 0.0)
    lower = [replace(row, reward=(row.reward or 0.0) - 2) for row in rows]
    spread = float(np.std([1.0, 0.75, 0.0], ddof=1))
    for members in (rows, lower):
        assert advantages(PassAtK(scale="none"), members) == pytest.approx([0.25, 0, 0])
        assert advantages(PassAtK(eps=0.5), members) == pytest.approx([0.25 / (spread + 0.5), 0, 0])
    tied = [replace(rows[1], reward=1.0), rows[0], rows[2]]
    assert advantages(PassAtK(), tied) == [0, 0, 0]


def test_rewards_of_either_sign_count_for_gpgs_alpha() -> None:
    rows = scored(1.0, -1.0, 0.0)
    assert advantages(Gpg(), rows) == pytest.approx([1.5, -1.5, 0])


def test_hierarchical_roles_are_compared_inside_their_episode_and_others_across_the_task() -> None:
    proposals = [credit_row(reward, episode=e, agent="proposer") for e, reward in enumerate([1.0, 0.0])]
    solutions = [
        credit_row(reward, episode=e, hop=1 + hop, agent="solver")
        for e, rewards in enumerate([[1.0, 0.0], [0.75, 0.25]])
        for hop, reward in enumerate(rewards)
    ]
    estimator = Hierarchical(episode_roles=("solver",))
    assert advantages(estimator, [*proposals, *solutions]) == [0.5, -0.5, 0.5, -0.5, 0.25, -0.25]
    assert Hierarchical.model_validate(estimator.model_dump(mode="json")) == estimator


def tree(rewards: dict[str, float], *, episode: int = 0) -> list[CreditRow]:
    """Rows of a tree, by path."""
    return [
        credit_row(
            reward,
            episode=episode,
            hop=hop,
            path=tuple(map(int, path.split("."))),
            branch=path.rpartition(".")[0],
            context_hash=path.rpartition(".")[0],
        )
        for hop, (path, reward) in enumerate(rewards.items())
    ]


def test_on_a_tree_a_turn_is_worth_the_mean_of_the_leaves_below_it() -> None:
    # What the inner turns 0, 1 and 1.1 were given themselves is not terminal.
    rows = tree({"0": 9, "1": 9, "0.0": 1, "0.1": 0, "1.0": 1, "1.1": 9, "1.1.0": 0.5, "1.1.1": 0, "2": 0})
    found = dict(zip([row.tag("path") for row in rows], advantages(C3(), rows), strict=True))
    # q: 0 is 1/2, 1 is (1 + 1/2 + 0) / 3, 1.1 is 1/4, 2 is 0.
    assert found == pytest.approx(
        {"0": 0.25, "1": 0.25, "2": -0.5, "0.0": 1, "0.1": -1, "1.0": 0.75, "1.1": -0.75, "1.1.0": 0.5, "1.1.1": -0.5}
    )


def test_siblings_are_compared_with_the_mean_of_the_others() -> None:
    assert advantages(C3(), tree({"0": 1, "1": 0, "2": 1})) == [0.5, -1.0, 0.5]


def test_one_sibling_alone_teaches_nothing_and_trees_of_other_episodes_are_not_looked_at() -> None:
    assert advantages(C3(), [*tree({"0": 1, "0.0": 0.5}), *tree({"0": 0}, episode=1)]) == [0.0, 0.0, 0.0]


def test_a_path_of_two_digits_is_below_no_path_of_one() -> None:
    rows = tree({"1": 0, "10": 1, "1.0": 0.5})
    assert advantages(C3(), rows) == [-0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("signal", "alpha", "expected"),
    [
        ("value_only", 1.0, [0.5, -1.0, 0.5]),
        ("value_assisted", 1.0, [0.0, 0.0, 1.0]),
        ("value_assisted", 0.0, [-0.5, -0.5, 1.0]),
        ("value_assisted", 0.5, [-0.25, -0.25, 1.0]),
    ],
)
def test_a_critic_stands_in_for_the_siblings_or_for_all(signal: str, alpha: float, expected: list[float]) -> None:
    values = [(0.5, 1.5, 1.0), (0.0,) * 3, (1.0, 0.5, 1.5)] if signal == "value_only" else [(0.0,) * 3] * 3
    rows = [replace(row, values=v) for row, v in zip(tree({"0": 0, "1": 0, "2": 1}), values, strict=True)]
    estimator = C3.model_validate({"signal": signal, "alpha": alpha})
    assert estimator.uses == {"values"}
    assert advantages(estimator, rows) == pytest.approx(expected)


def test_c3_says_what_it_lacks() -> None:
    rows = tree({"0": 0, "1": 1})
    assert C3().uses == frozenset()
    with pytest.raises(CreditError, match="has no values, and C3's signal needs a critic's"):
        C3(signal="value_only").estimate(rows)
    with pytest.raises(CreditError, match="has no path"):
        C3().estimate([credit_row(1)])


def test_a_turn_that_only_a_penalty_tells_from_the_others_is_reported() -> None:
    rows = [replace(row, outcome=1.0) for row in scored(1, 0.9, 1)]
    for estimator in (Default(), PassAtK(), Gpg()):
        report = estimator.estimate(rows).report[rows[0].agent]
        assert (report.effective, report.penalty_alone) == (1, 1)
    report = C3().estimate([replace(row, outcome=1.0) for row in tree({"0": 1, "1": 0.9})]).report[rows[0].agent]
    assert (report.effective, report.penalty_alone) == (1, 1)
    assert Default().estimate(scored(1, 0)).report[rows[0].agent].penalty_alone == 0
