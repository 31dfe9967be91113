"""The order of credit: what does not train, estimators per agent, whitening and balance come when they must."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flexmarl.credit import CreditRow, CreditSettings
from flexmarl.credit.estimators.presets import Default
from flexmarl.credit.interface import Credit
from flexmarl.credit.order import Scope, equal_shares, whiten, whitened
from flexmarl.records import AgentName, SampleId
from flexmarl.testing.credit import credit_row, random_credit_rows

BATCHES = st.builds(random_credit_rows, st.integers(0, 2**32))
LAW = settings(max_examples=60, deadline=None)


def configured(**credit: object) -> CreditSettings:
    return CreditSettings.model_validate({"filter": None, **credit})


def advantages(credit: Credit, rows: list[CreditRow]) -> list[float]:
    return [credit.advantages[row.sample_id] for row in rows]


def scored(*rewards: float, task: str = "t0", agent: str = "solver", hop: int = 0) -> list[CreditRow]:
    return [credit_row(reward, task=task, episode=e, agent=agent, hop=hop) for e, reward in enumerate(rewards)]


# Rows that do not train


def test_a_turn_that_was_cut_off_is_no_row_and_no_baseline() -> None:
    rows = [*scored(1, 0), replace(credit_row(0.0, episode=2), trains=False)]
    credit = configured().credit(rows)
    assert advantages(credit, rows) == [0.5, -0.5, 0.0]
    assert list(credit.weights.values()) == [1, 1, 0]
    assert credit.report[AgentName("solver")].untrained == 1


def test_its_reward_may_still_count_in_the_baseline() -> None:
    rows = [*scored(1, 0), replace(credit_row(0.5, episode=2), trains=False)]
    credit = configured(untrained_in_baseline=True, estimator={"type": "rloo"}).credit(rows)
    assert advantages(credit, rows) == [0.75, -0.75, 0.0]
    assert list(credit.weights.values()) == [1, 1, 0]


@pytest.mark.parametrize("counts", [False, True])
def test_a_task_whose_turns_were_all_cut_off_teaches_nothing(counts: bool) -> None:
    rows = [replace(row, trains=False) for row in scored(1, 0)]
    settings = CreditSettings(untrained_in_baseline=counts)
    assert [decision.kept for decision in settings.decide(rows)] == [False]
    assert [decision.kept for decision in settings.decide([*rows, *scored(1, 0, hop=1)])] == [True]


@pytest.mark.parametrize("counts", [False, True])
def test_a_task_is_kept_for_the_difference_to_a_turn_that_was_cut_off_only_if_that_counts(counts: bool) -> None:
    rows = [*scored(1, 1), replace(credit_row(0.0, episode=2), trains=False)]
    (decision,) = CreditSettings(untrained_in_baseline=counts).decide(rows)
    assert decision.kept == counts


def test_a_greedy_play_is_compared_with_nobody_and_not_trained() -> None:
    rows = [*scored(1, 0), replace(credit_row(0.0, episode=2), greedy=True)]
    credit = configured().credit(rows)
    assert advantages(credit, rows[:2]) == [0.5, -0.5]
    assert credit.weights[rows[2].sample_id] == 0
    (decision,) = CreditSettings().decide([*scored(1, 1), rows[2]])
    assert not decision.kept


def test_a_filter_looks_at_what_is_compared() -> None:
    def turn(path: str, reward: float) -> CreditRow:
        place = {"path": tuple(map(int, path.split("."))), "branch": path[:-2], "context_hash": path[:-2]}
        return credit_row(reward, hop=int(path[-1]) + len(path), **place)

    rows = [turn("0", 0.0), turn("1", 0.0), turn("0.0", 1.0), turn("0.1", 1.0)]
    settings = CreditSettings.model_validate({"estimator": {"type": "c3"}})
    assert advantages(settings.credit(rows), rows) == [1.0, -1.0, 0.0, 0.0]
    assert [decision.kept for decision in settings.decide(rows)] == [True]
    beside = settings.model_copy(update={"per_agent": {AgentName("verifier"): Default()}})
    assert [decision.kept for decision in beside.decide([*rows, *scored(1, agent="verifier", hop=9)])] == [True]


# Estimators per agent


def test_each_agent_may_have_an_estimator_of_its_own() -> None:
    rows = [*scored(1, 0), *scored(1, 0, agent="verifier", hop=1)]
    credit = configured(per_agent={"verifier": {"type": "reinforce"}}).credit(rows)
    assert advantages(credit, rows) == [0.5, -0.5, 1.0, 0.0]
    assert set(credit.report) == {"solver", "verifier"}


def test_an_agent_with_its_own_estimator_is_in_nobody_elses_group() -> None:
    rows = [*scored(1, 0), *scored(9, 5, agent="verifier", hop=1)]
    credit = configured(estimator={"type": "dr_grpo"}, per_agent={"verifier": {"type": "dr_grpo"}}).credit(rows)
    assert advantages(credit, rows) == [0.5, -0.5, 2.0, -2.0]


def test_needs_uses_and_key_are_those_of_all_estimators_together() -> None:
    settings = configured(
        estimator={"type": "grpo"},
        per_agent={
            "verifier": {"type": "gpg", "key": ["task", "agent"]},
            "judge": {"type": "c3", "signal": "value_only"},
        },
    )
    assert settings.needs == "batch"
    assert settings.uses == {"values"}
    key = {"*": ("task",), "verifier": ("task", "agent"), "judge": ("task", "episode", "branch")}
    assert settings.key == key
    assert configured(estimator={"type": "grpo"}).key == ("task",)
    roles = configured(
        estimator={"type": "hierarchical", "episode_roles": ["solver"]}, per_agent={"x": {"type": "grpo"}}
    )
    assert roles.key == {"solver": ("episode", "agent"), "*": ("task", "agent"), "x": ("task",)}


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, "group"),
        ({"estimator": {"type": "reinforce"}}, "row"),
        ({"whiten": "agent"}, "batch"),
        ({"agent_balance": "equal"}, "batch"),
        ({"estimator": {"type": "reinforce"}, "per_agent": {"x": {"type": "default"}}}, "group"),
    ],
)
def test_what_looks_at_the_whole_step_needs_it(options: dict[str, object], needs: str) -> None:
    assert configured(**options).needs == needs


# Whitening (law E8)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=30))
@LAW
def test_whitened_numbers_have_mean_0_and_variance_1(numbers: list[float]) -> None:
    y = whitened(np.array(numbers))
    if np.var(numbers) < 1e-3:
        return
    assert y.mean() == pytest.approx(0, abs=1e-6)
    assert y.var(ddof=1) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize("numbers", [[], [0.7], [0.3, 0.3], [1 / 3] * 7])
def test_equal_numbers_and_lone_ones_are_whitened_to_0(numbers: list[float]) -> None:
    assert whitened(np.array(numbers)).tolist() == [0.0] * len(numbers)


@given(BATCHES, st.sampled_from(["batch", "policy", "agent"]))
@LAW
def test_the_tokens_of_each_scope_have_mean_0_and_variance_1(rows: list[CreditRow], scope: Scope) -> None:
    rows = [replace(row, trains=row.hop != 2) for row in rows]
    credit = configured(whiten=scope, estimator={"type": "reinforce"}).credit(rows)
    blocks: dict[object, list[tuple[float, float]]] = {}
    for row in rows:
        if credit.weights[row.sample_id]:
            name = None if scope == "batch" else row.tag(scope)
            blocks.setdefault(name, []).extend([(row.reward or 0, credit.advantages[row.sample_id])] * row.num_tokens)
    for tokens in blocks.values():
        raw, white = np.array(tokens).T
        # The two 1e-8 of the definition count where there is next to no variance.
        assert white.mean() == pytest.approx(0, abs=1e-4)
        assert white.var(ddof=1) == pytest.approx(1, rel=1e-3) if np.ptp(raw) > 0.01 else abs(white).max() < 1e-4


def test_advantages_per_token_are_whitened_token_by_token() -> None:
    rows = [credit_row(0, num_tokens=2), credit_row(0, episode=1, num_tokens=1)]
    ids = [row.sample_id for row in rows]
    credit = Credit(
        advantages=dict.fromkeys(ids, 0.0),
        weights=dict.fromkeys(ids, 1.0),
        report={},
        token_advantages={ids[0]: (1.0, 3.0)},
        returns={ids[0]: (5.0, 6.0)},
    )
    white = whiten(credit, rows, "batch")
    expected = whitened(np.array([1.0, 3.0, 0.0]))
    assert white.token_advantages == {ids[0]: tuple(expected[:2])}
    assert white.advantages == {ids[0]: expected[:2].mean(), ids[1]: expected[2]}
    assert white.returns == credit.returns


def test_a_single_token_cannot_be_whitened_and_the_report_says_so() -> None:
    rows = [credit_row(0.7, num_tokens=1), *scored(1, 0, agent="verifier", hop=1)]
    credit = configured(whiten="agent", estimator={"type": "reinforce"}).credit(rows)
    assert credit.advantages[rows[0].sample_id] == 0
    assert credit.report[AgentName("solver")].notes == ("not whitened: fewer than 2 sampled tokens have no variance",)
    assert credit.report[AgentName("verifier")].notes == ()


# Balance


@given(BATCHES)
@LAW
def test_the_token_mean_of_a_balanced_policy_is_the_mean_of_its_agents_token_means(rows: list[CreditRow]) -> None:
    loss = {row.sample_id: float(len(row.sample_id) + row.hop * row.num_tokens) for row in rows}
    weights = configured(agent_balance="equal").credit(rows).weights

    def token_mean(of: list[CreditRow], by: dict[SampleId, float]) -> float:
        num_tokens = sum(by[row.sample_id] * row.num_tokens for row in of)
        return sum(by[row.sample_id] * row.num_tokens * loss[row.sample_id] for row in of) / num_tokens

    plain = {row.sample_id: float(row.num_tokens > 0) for row in rows}
    for policy in {row.policy for row in rows if row.num_tokens}:
        of_policy = [row for row in rows if row.policy == policy and row.num_tokens]
        agents = sorted({row.agent for row in of_policy})
        means = [token_mean([row for row in of_policy if row.agent == agent], plain) for agent in agents]
        assert token_mean(of_policy, dict(weights)) == pytest.approx(np.mean(means), rel=1e-12)
        total = sum(row.num_tokens for row in of_policy)
        assert sum(weights[row.sample_id] * row.num_tokens for row in of_policy) == pytest.approx(total, rel=1e-12)
        if len(agents) == 1:
            assert {weights[row.sample_id] for row in of_policy} == {1.0}


def test_rows_that_do_not_train_have_no_part_in_the_balance() -> None:
    rows = [*scored(1, 0), *scored(1, 0, agent="verifier", hop=1)]
    rows = [replace(row, policy=rows[0].policy, trains=row is not rows[3]) for row in rows]
    weights = configured(agent_balance="equal").credit(rows).weights
    assert [weights[row.sample_id] for row in rows] == [0.75, 0.75, 1.5, 0.0]


def test_balance_keeps_weights_of_0() -> None:
    rows = scored(1, 0)
    credit = Default().estimate(rows)
    dropped = replace(credit, weights=dict.fromkeys(credit.weights, 0.0))
    assert equal_shares(dropped, rows) == dropped


# Lines, for training before the group is complete


LINEAR = [
    {"type": kind, **options}
    for kind in ("default", "grpo", "grpo_trajectory", "drmas", "dr_grpo", "rllm", "rloo", "rloo_trajectory", "opo")
    for options in ({}, {"singleton": "drop"}, {"singleton": "raw"})
]


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("estimator", LINEAR, ids=str)
def test_lines_over_scores_are_the_credit(estimator: dict[str, object], counts: bool) -> None:
    settings = configured(
        estimator=estimator,
        per_agent={"router": {"type": "max_rl", "key": ["task"]}},
        invalid_action=None,
        untrained_in_baseline=counts,
        streaming="linear",
    )
    for seed in range(20):
        rows = [replace(row, trains=row.hop != 1) for row in random_credit_rows(seed)]
        credit, lines, placed = settings.credit(rows), settings.lines(rows), 0
        for episode in {row.episode for row in rows}:
            places = settings.open_places([row for row in rows if row.episode == episode])
            for sample_id, (group, score) in places.items():
                line, placed = lines[group], placed + 1
                advantage = line.scale * score + line.offset
                assert line.weight == credit.weights[sample_id]
                assert line.weight * advantage == pytest.approx(credit.advantages[sample_id], rel=1e-12, abs=1e-9)
        assert placed == sum(row.num_tokens > 0 and row.trains for row in rows)


@pytest.mark.parametrize(
    "options",
    [
        {"estimator": {"type": "gpg"}},
        {"estimator": {"type": "gdpo"}},
        {"estimator": {"type": "reinforce++_baseline"}},
        {"estimator": {"type": "default", "singleton": "zero_unless_all"}},
        {"estimator": {"type": "c3"}},
        {"estimator": {"type": "pass@k"}},
        {"per_agent": {"verifier": {"type": "gpg"}}},
        {"whiten": "policy"},
        {"agent_balance": "equal"},
    ],
)
def test_what_is_no_line_cannot_be_streamed(options: dict[str, object]) -> None:
    assert not configured(**options).linear
    with pytest.raises(ValidationError, match="streaming: 'linear' needs advantages that are linear"):
        configured(streaming="linear", **options)


# Shaping and penalties


def invalid(row: CreditRow) -> CreditRow:
    return replace(row, valid=False)


def test_outcomes_are_shaped_then_penalised_and_the_filter_sees_them_before_the_penalty() -> None:
    rows = [*scored(0.9, 0.6), invalid(credit_row(0.8, episode=2))]
    settings = CreditSettings.model_validate({"shaping": [{"type": "binary"}]})
    shaped = settings.shape(rows)
    assert [(row.reward, row.outcome) for row in shaped] == [(1.0, 1.0), (1.0, 1.0), (0.9, 1.0)]
    assert dict(shaped[2].parts) == pytest.approx({"outcome": 0.8, "binary": 0.2, "invalid_action": -0.1})
    assert [decision.reason for decision in settings.decide(shaped)] == ["too_easy"]
    credit = settings.credit(shaped)
    assert [credit.advantages[row.sample_id] for row in rows] == pytest.approx([0.1 / 3, 0.1 / 3, -0.2 / 3])
    assert credit.report[AgentName("solver")].penalty_alone == 1


def test_a_penalty_after_the_comparison_comes_off_the_whitened_advantage() -> None:
    rows = [
        *scored(1, 0),
        invalid(credit_row(1.0, episode=2)),
        invalid(replace(credit_row(1, episode=3), trains=False)),
    ]
    plain = configured(whiten="policy", invalid_action=None)
    after = configured(whiten="policy", invalid_action={"penalty": 0.25, "order": "after"})
    before, found = plain.credit(plain.shape(rows)), after.credit(after.shape(rows))
    assert [b - f for b, f in zip(advantages(before, rows), advantages(found, rows), strict=True)] == [0, 0, 0.25, 0]


@given(BATCHES, st.sets(st.integers(0, 3)))
@LAW
def test_a_penalty_before_a_centred_comparison_changes_no_advantage_by_more_than_itself(
    rows: list[CreditRow], hops: set[int]
) -> None:
    rows = [invalid(row) if row.hop in hops else row for row in rows]
    with_it, without = configured(), configured(invalid_action=None)
    changed, plain = with_it.credit(with_it.shape(rows)), without.credit(without.shape(rows))
    assert all(abs(changed.advantages[name] - plain.advantages[name]) <= 0.1 + 1e-12 for name in plain.advantages)


def test_a_term_that_compares_episodes_makes_credit_wait_for_the_task() -> None:
    term = {"type": "completion_time"}
    assert configured(estimator={"type": "reinforce"}, shaping=[term]).needs == "group"
    assert configured(estimator={"type": "reinforce"}, shaping=[{"type": "margin"}]).needs == "row"
    assert not configured(shaping=[term]).linear
    assert configured(shaping=[{"type": "margin"}]).linear
    assert not configured(invalid_action={"order": "after"}).linear
