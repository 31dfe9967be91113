"""Prices keep the size that a setting gives them, factors stay in [0, 1], and rewards are bounded."""

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.credit import ESTIMATORS, CreditRow, CreditSettings
from flexmarl.credit.estimators.gigpo import GiGpo
from flexmarl.credit.interface import GraphCall
from flexmarl.credit.order import whitened
from flexmarl.credit.shaping import SHAPING
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD
from flexmarl.testing.credit import credit_row, random_credit_rows

FEW = settings(max_examples=40, deadline=None)
EPS = 1e-8
"""Of `whitened`."""
LARGEST_MEAN = 4.0
"""More than the mean of advantages before they are whitened, with rewards of 0 to 1 and the values of these rows."""
seeds = st.integers(0, 10_000)


def configured(**options: Any) -> CreditSettings:
    return CreditSettings.model_validate({"invalid_action": None, "filter": None, **options})


def scored(*rewards: float, **fields: Any) -> list[CreditRow]:
    tags, place = {"anchor": "a", "env_step": 0}, {"turn": 0, "path": (0,), "context_hash": "c"}
    rows = [credit_row(reward, episode=n, tags=tags, **place, **fields) for n, reward in enumerate(rewards)]
    return [replace(row, act_reward=row.reward, act_outcome=row.reward, values=(0.1, 0.2, 0.3)) for row in rows]


def advantages(credit: CreditSettings, rows: list[CreditRow]) -> np.ndarray:
    found = credit.credit(credit.shape(rows)).advantages
    return np.array([found[row.sample_id] for row in rows])


# Prices

PRICED: dict[str, Any] = {
    "process": lambda size: {"shaping": [{"type": "process", "costs": {"tool_error": size}}]},
    "overlong": lambda size: {"shaping": [{"type": "overlong", "max_tokens": 3, "buffer": 3, "penalty": size}]},
    "completion_time": lambda size: {"shaping": [{"type": "completion_time", "bonus": size}]},
    "invalid_action": lambda size: {"invalid_action": {"penalty": size}},
}


def some_pay() -> list[CreditRow]:
    """Outcomes differ; half of either kind pays, by length, tool errors, time or validity."""
    rows = scored(1, 1, 0, 0)
    return [
        replace(
            row,
            num_tokens=3 - n % 2,
            values=(0.1,) * (3 - n % 2),
            signals={"tool_error": 1.0 - n % 2},
            valid=bool(n % 2),
        )
        for n, row in enumerate(rows)
    ]


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS.built_in if kind not in ("max_rl", "hierarchical")])
@pytest.mark.parametrize("term", PRICED)
def test_a_thousandth_of_a_price_has_a_thousandth_of_its_effect_whatever_estimates(kind, term):
    if term == "completion_time":
        rows = [replace(row, calls=_calls(n)) for n, row in enumerate(some_pay())]
    else:
        rows = some_pay()
    if kind == "remax":
        rows.append(replace(rows[0], sample_id="greedy", episode="greedy", greedy=True))  # type: ignore[arg-type]
    if kind == "c3":
        rows = [replace(row, hop=n, episode=rows[0].episode, path=(n,)) for n, row in enumerate(rows)]
    free = advantages(configured(estimator={"type": kind}), rows)
    effects = [
        advantages(configured(estimator={"type": kind}, **PRICED[term](size)), rows) - free for size in (1e-3, 1e-6)
    ]
    assert abs(effects[1]).max() <= 1.1e-3 * abs(effects[0]).max() + 1e-12
    assert abs(effects[0]).max() < 0.01, "a price of a thousandth is no outcome"


def _calls(episode: int) -> tuple[GraphCall, ...]:
    """Odd episodes take longer."""
    return (GraphCall(hop=0, num_tokens=10 + 5 * (episode % 2)),)


def test_gdpo_subtracts_a_price_as_it_is_after_it_has_standardised_what_was_asked_for():
    # One of two successes pays; without the price all that counts is the outcome, whitened over four rows of 3 tokens.
    rows = [replace(row, valid=n != 1) for n, row in enumerate(scored(1, 1, 0, 0))]
    for price in (1e-6, 1e-3, 0.1):
        free = advantages(configured(estimator={"type": "gdpo"}), rows)
        paid = advantages(configured(estimator={"type": "gdpo"}, invalid_action={"penalty": price}), rows)
        np.testing.assert_allclose(paid - free, np.array([0.25, -0.75, 0.25, 0.25]) * price, rtol=1e-9, atol=1e-15)


def test_gdpo_lets_a_divergence_in_the_reward_cost_what_its_coefficient_says():
    rows = scored(1, 1, 0, 0)
    free = advantages(configured(estimator={"type": "gdpo"}), rows)
    for beta in (1e-6, 1.0):
        paid = [row.pays("kl", beta * n) for n, row in enumerate(rows)]
        found = advantages(configured(estimator={"type": "gdpo"}), paid)
        np.testing.assert_allclose(found - free, (1.5 - np.arange(4)) * beta, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "term",
    [
        {"type": "turn_weighted", "max_turns": 4},
        {"type": "hop_weighted", "max_hops": 4},
        {"type": "shaped", "max_turns": 4},
    ],
)
def test_gdpo_standardises_the_outcome_as_a_term_reshaped_it_and_not_what_it_changed(term):
    rows = scored(1, 1, 0, 0)
    found = advantages(configured(estimator={"type": "gdpo"}, shaping=[term]), rows)
    plain = advantages(configured(estimator={"type": "gdpo"}), rows)
    np.testing.assert_allclose(found, plain, rtol=1e-4)  # The same factor for all, but for the epsilons.


def test_gdpo_keeps_the_workflows_own_parts_apart_from_a_reshaped_outcome():
    mixes = [(1.0, 0.0), (1.0, 0.1), (0.0, 0.0), (0.0, 0.1)]
    rows = [
        replace(
            row,
            reward=a + b,
            outcome=a,
            act_outcome=a,
            act_reward=a + b,
            objectives=(parts := {"outcome": a, "short": b}),
            parts=parts,
        )
        for row, (a, b) in zip(scored(0, 0, 0, 0), mixes, strict=True)
    ]
    found = advantages(
        configured(estimator={"type": "gdpo"}, shaping=[{"type": "turn_weighted", "max_turns": 2}]), rows
    )
    np.testing.assert_allclose(found / found[1], [0.0, 1.0, -1.0, 0.0], atol=1e-4)
    nameless = [replace(row, objectives={"a": 0.25, "b": row.reward - 0.25}, outcome=None) for row in rows]
    (shaped, *_) = configured(shaping=[{"type": "turn_weighted", "max_turns": 2}]).shape(nameless)
    assert dict(shaped.objectives) == {"outcome": 0.5}, "without an outcome all of the reward is judged"


@given(seed=seeds)
@FEW
def test_objectives_and_prices_add_up_to_the_reward(seed):
    rows = [
        replace(row, valid=seed % 2 == 0, signals={"tool_error": 0.5}) for row in random_credit_rows(seed, acts=True)
    ]
    chosen = configured(
        shaping=[{"type": "turn_weighted"}, {"type": "process"}, {"type": "reward_to_go"}], invalid_action={}
    )
    for task in {row.task for row in rows}:
        for row in chosen.shape([row for row in rows if row.task == task]):
            total = sum(row.objectives.values()) + sum(row.prices.values())
            assert total == pytest.approx(row.reward, abs=1e-12)
            assert sum(row.parts.values()) == pytest.approx(row.reward, abs=1e-12)


# Factors

FACTORS = {
    "hop_weighted": ("max_hops",),
    "hop_discount": ("max_hops", "gamma"),
    "turn_weighted": ("max_turns",),
    "turn_discount": ("max_turns", "gamma", "last_undiscounted"),
    "shaped": ("max_turns",),
    "reward_to_go": ("gamma",),
}
DRAWN = {"max_hops": st.integers(1, 20), "max_turns": st.integers(1, 20), "gamma": st.floats(0.01, 1)}
DRAWN["last_undiscounted"] = st.booleans()  # type: ignore[assignment]


def test_every_term_that_has_a_factor_of_its_own_is_tried():
    has_factor = [
        kind for kind in SHAPING.built_in if kind.startswith(("hop_", "turn_")) or kind in ("shaped", "reward_to_go")
    ]
    assert set(FACTORS) == set(has_factor)


@pytest.mark.parametrize("kind", FACTORS)
@given(data=st.data(), at=st.integers(0, 2_000), reward=st.floats(-1, 1))
@FEW
def test_a_row_counts_with_a_factor_from_0_to_1_however_many_turns_there_are(kind, data, at, reward):
    term = {"type": kind, **{name: data.draw(DRAWN[name]) for name in FACTORS[kind]}}
    row = credit_row(1.0, hop=at, turn=at)
    (shaped,) = configured(shaping=[term]).shape([row])
    assert shaped.reward is not None
    assert 0 <= shaped.reward <= 1
    (scaled,) = configured(shaping=[term]).shape([replace(row, reward=reward)])
    assert scaled.reward == pytest.approx(reward * shaped.reward, abs=1e-12)


def test_a_factor_ends_where_the_turns_do():
    rows = [credit_row(1.0, hop=turn, turn=turn) for turn in (6, 7, 8, 500)]
    for last, factors in ((True, [0.99, 1, 1, 1]), (False, [0.99**2, 0.99, 1, 1])):
        shaped = configured(shaping=[{"type": "turn_discount", "last_undiscounted": last}]).shape(rows)
        assert [row.reward for row in shaped] == pytest.approx(factors, rel=1e-12)


# Bounds


def given_to(kind: str, seed: int, size: float) -> list[CreditRow]:
    rows = random_credit_rows(seed, empty_rows=False, acts=True)
    sign = abs if kind == "max_rl" else lambda x: x
    rows = [replace(row, reward=sign((row.reward or 0.0) - 0.5) * size, act_reward=0.0) for row in rows]
    if kind == "remax":
        rows += [replace(row, sample_id=f"{row.sample_id}g", greedy=True) for row in rows[:4]]  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize("kind", ESTIMATORS.built_in)
@given(seed=seeds, share=st.sampled_from([3.0, 1.0, 1e-3]))
@settings(max_examples=10, deadline=None)
def test_near_the_bound_every_advantage_is_finite_and_numpy_says_nothing(kind, seed, share):
    credit = configured(estimator={"type": kind, **({"singleton": "zero"} if kind == "pass@k" else {})})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = credit._estimators.estimate(given_to(kind, seed, LARGEST_REWARD * share))
    assert all(map(math.isfinite, found.advantages.values()))
    assert all(math.isfinite(value) for tokens in found.token_advantages.values() for value in tokens)


@pytest.mark.parametrize("kind", ["default", "grpo", "reinforce++", "gae", "gdpo", "opo"])
def test_beyond_what_can_be_calculated_a_sample_is_named(kind):
    rows = scored(1.0, 0.0, 1e300)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CreditError, match=r"sample t0_0_t0e2 of agent solver has reward 1e\+300 after all terms"):
            configured(estimator={"type": kind}).credit(rows)


def test_settings_that_make_an_advantage_overflow_are_an_error_that_names_a_sample():
    rows = [replace(row, parts={"style": float(n)}) for n, row in enumerate(scored(0.0, 1.0))]
    weights = {"type": "gdpo", "weights": {"style": 1e308}}
    with (
        pytest.raises(CreditError, match=r"sample t0_0_t0e0 .* an advantage that is not finite"),
        np.errstate(all="ignore"),
    ):
        configured(estimator=weights).credit(rows)


def test_a_step_of_an_environment_earns_no_more_than_a_reward_may_be():
    rows = [replace(row, tags={**row.tags, "step_reward": 1e300}) for row in scored(1.0, 0.0)]
    with pytest.raises(CreditError, match=r"step_reward: environment step 0 of episode t0e0 has 1e\+300"):
        GiGpo().estimate(rows)


# Who counts


@pytest.mark.parametrize(
    "estimator",
    [
        *({"type": "reinforce++", "whiten": scope} for scope in ("batch", "policy", "agent")),
        *({"type": kind, "whiten": "policy"} for kind in ("reinforce++_baseline", "gae", "gdpo")),
    ],
    ids=lambda estimator: f"{estimator['type']}-{estimator['whiten']}",
)
@given(seed=seeds)
@FEW
def test_e8_whitened_advantages_of_the_rows_that_train_have_mean_0_and_variance_1(estimator, seed):
    draw = np.random.default_rng(seed)
    rows = [
        replace(row, trains=bool(draw.random() < 0.7), reward=float(draw.random())) for row in random_credit_rows(seed)
    ]
    settings = configured(estimator=estimator, untrained_in_baseline=True)
    credit = settings.credit(rows)
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.trains and row.num_tokens:
            tokens = credit.token_advantages.get(row.sample_id, (credit.advantages[row.sample_id],) * row.num_tokens)
            scope = "" if estimator["whiten"] == "batch" else str(row.tag(estimator["whiten"]))
            found.setdefault(scope, []).extend(tokens)
    for values in found.values():
        variance = np.var(values, ddof=1) if len(values) > 1 else 0.0
        assert variance <= 1 + EPS / len(values) + 1e-12
        # Nearly equal advantages keep less than 1, and some of their mean: the test below says exactly how much.
        spread = (max(0, 1 - variance) / EPS + 1) ** 0.5  # 1 / sqrt(var + EPS), by the variance that is left of var.
        assert abs(np.mean(values)) <= LARGEST_MEAN * EPS / len(values) * spread
    assert all(credit.weights[row.sample_id] == 0 for row in rows if not row.trains)


@given(
    numbers=st.lists(st.floats(-1, 1), min_size=2, max_size=9),
    offset=st.floats(-1, 1),
    scale=st.sampled_from([1.0, 1e-3, 1e-5]),
)
@FEW
def test_whitening_is_its_formula_for_nearly_equal_numbers_too(numbers, offset, scale):
    x = offset + scale * np.array(numbers)
    n, variance, found = len(x), np.var(x, ddof=1), whitened(x)
    if np.ptp(x) == 0:
        assert not found.any()
    else:
        assert np.mean(found) == pytest.approx(np.mean(x) * 1e-8 / n / np.sqrt(variance + 1e-8), abs=1e-9)
        assert np.var(found, ddof=1) == pytest.approx(variance / (variance + 1e-8), rel=1e-6, abs=1e-9)


LEARNING = {"reinforce", "reinforce++", "gae", "step_gae", "remax", "rae"}


def equal_episodes(kind: str) -> list[CreditRow]:
    """Two tasks; in each all episodes have one reward."""
    rows = [replace(row, task=task) for task, reward in (("t0", 1.0), ("t1", 0.0)) for row in scored(*[reward] * 3)]
    rows = [replace(row, sample_id=f"{row.task}{row.sample_id}", values=(0.5, 0.5, 0.5)) for row in rows]  # type: ignore[arg-type]
    if kind == "remax":
        rows += [replace(row, sample_id=f"{row.sample_id}g", greedy=True, reward=0.25) for row in rows[::3]]  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize("kind", ESTIMATORS.built_in)
def test_the_filter_drops_tasks_of_equal_rewards_unless_the_estimator_learns_from_them(kind):
    credit = CreditSettings.model_validate({"estimator": {"type": kind}, "invalid_action": None})
    rows = equal_episodes(kind)
    learned = any(credit.credit(rows).advantages.values())
    kept = {decision.kept for task in ("t0", "t1") for decision in credit.decide([r for r in rows if r.task == task])}
    assert credit.estimator.learns_from_equal_rewards == (kind in LEARNING)
    assert kept == {kind in LEARNING} == {learned}


def test_gigpo_learns_from_equal_rewards_where_it_discounts_what_follows():
    assert not GiGpo().learns_from_equal_rewards
    assert GiGpo(gamma=0.9).learns_from_equal_rewards
    assert not GiGpo(gamma=0.9, step_weight=0.0).learns_from_equal_rewards
    tags = {"anchor": "start", "env_step": 0}
    quick = [credit_row(1.0, tags=tags)]
    slow = [
        credit_row(1.0, episode=1, hop=hop, tags={"anchor": ("start", "late")[hop], "env_step": hop}) for hop in (0, 1)
    ]
    found = GiGpo(gamma=0.9).estimate([*quick, *slow]).advantages
    assert found[quick[0].sample_id] > 0 > found[slow[0].sample_id]


def test_a_kept_task_of_equal_rewards_says_who_learns_from_it():
    credit = CreditSettings.model_validate({"per_agent": {"solver": {"type": "reinforce"}}, "invalid_action": None})
    (decision,) = credit.decide(
        [*scored(1, 1), *(replace(row, sample_id=f"v{row.hop}", agent="v") for row in scored(0))]
    )  # type: ignore[arg-type]
    assert decision.because == "rewards are equal, from which solver may learn too"
    (dropped,) = credit.decide([replace(row, trains=False) for row in scored(1, 1)])
    assert not dropped.kept, "nothing of it trains"
