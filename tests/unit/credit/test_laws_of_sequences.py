"""What holds for the estimators that look at tokens, calls, memory, greedy plays and states, on any batch."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.credit.estimators.baselines import Rae, Reinforce, ReinforcePP, ReMax
from flexmarl.credit.estimators.gae import Gae, StepGae
from flexmarl.credit.estimators.gigpo import GiGpo
from flexmarl.credit.interface import Credit, CreditRow, Estimator
from flexmarl.credit.returns import token_rewards
from flexmarl.records import AgentName, EpisodeId, PolicyName, SampleId
from flexmarl.testing.credit import check_estimator, random_credit_rows

PER_AGENT: list[Estimator] = [
    Reinforce(),
    ReinforcePP(gamma=0.9, whiten="agent"),
    Gae(gamma=0.9, whiten="agent"),
    StepGae(gamma=0.9, scope="agent"),
    ReMax(),
    Rae(),
    GiGpo(gamma=0.9),
    GiGpo(mode="mean_std_norm", similarity=0.5),
]
OF_ALL: list[Estimator] = [
    ReinforcePP(gamma=0.9, whiten="batch"),
    Gae(whiten="policy"),
    StepGae(scope="team"),
    ReMax(key=("task",)),
    GiGpo(key=("task",), unit="trajectory_first", step_weight=0.5),
]
seeds = st.integers(0, 10_000)
few = settings(max_examples=20, deadline=None)


def rows_of(seed: int) -> list[CreditRow]:
    """Any batch, with all that these estimators look at: rewards of calls and tokens, greedy plays, states."""
    draw, rows = random.Random(seed), []
    for row in random_credit_rows(seed):
        assert row.reward is not None
        own, first = draw.choice((0.0, 0.25)), draw.choice((0.0, 0.5))
        tokens = (first, *[0.0] * (row.num_tokens - 2), row.reward - first) if row.num_tokens > 1 else None
        state = {"anchor": f"{row.task} state {row.hop % 2}", "env_step": row.hop // 2}
        rows.append(replace(row, call_reward=own, token_rewards=tokens, tags={**row.tags, **state}))
    for task in sorted({row.task for row in rows}):
        first_episode = [row for row in rows if row.task == task and row.episode == f"{task}e0"]
        rows += [
            replace(row, sample_id=SampleId(f"{row.sample_id}-greedy"), episode=EpisodeId(f"{task}e9"), greedy=True)
            for row in first_episode
        ]
    return rows


def seen_by(estimator: Estimator, rows: Sequence[CreditRow]) -> list[CreditRow]:
    """Only who uses a greedy play is given it."""
    return [row for row in rows if not row.greedy or "greedy" in estimator.uses]


def numbers(credit: Credit, rows: Sequence[CreditRow]) -> list[float]:
    """All that training gets of these rows."""
    found: list[float] = []
    for row in sorted(rows, key=lambda row: row.sample_id):
        name = row.sample_id
        found += [credit.advantages[name], credit.weights[name]]
        found += [*credit.token_advantages.get(name, ()), *credit.returns.get(name, ())]
    return found


@pytest.mark.parametrize("estimator", [*PER_AGENT, *OF_ALL], ids=str)
class TestLaws:
    @few
    @given(seeds)
    def test_the_order_in_which_rows_come_changes_no_bit(self, estimator: Estimator, seed: int) -> None:
        rows = seen_by(estimator, rows_of(seed))
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert estimator.estimate(shuffled) == estimator.estimate(rows)

    @few
    @given(seeds)
    def test_rows_without_sampled_tokens_change_nothing_wherever_they_stand(self, estimator, seed: int) -> None:
        rows = seen_by(estimator, rows_of(seed))
        padding = [
            replace(row, sample_id=SampleId(f"pad-{row.sample_id}"), num_tokens=0, values=(), token_rewards=None)
            for row in rows[::2]
        ]
        padded, credit = estimator.estimate([*padding, *rows]), estimator.estimate(rows)
        assert numbers(padded, rows) == numbers(credit, rows)
        assert not any(numbers(padded, padding))
        assert padded.memory == credit.memory

    @few
    @given(seeds)
    def test_tasks_do_not_see_one_another_unless_the_step_is_needed(self, estimator, seed: int) -> None:
        rows = seen_by(estimator, rows_of(seed))
        together = estimator.estimate(rows)
        if estimator.needs in ("row", "group"):
            for task in {row.task for row in rows}:
                alone = [row for row in rows if row.task == task]
                assert numbers(estimator.estimate(alone), alone) == numbers(together, alone)

    @few
    @given(seeds)
    def test_names_do_not_matter_where_their_order_does_not(self, estimator: Estimator, seed: int) -> None:
        if isinstance(estimator, Rae) or (isinstance(estimator, GiGpo) and estimator.similarity):
            pytest.skip("goes through tasks and episodes in the order of their names")
        rows = seen_by(estimator, rows_of(seed))
        renamed = [
            replace(
                row,
                task=f"z{9 - int(row.task[1:])}",
                episode=EpisodeId(f"z{9 - int(row.task[1:])}e{9 - int(row.episode[-1])}"),
                agent=AgentName(row.agent[::-1]),
                policy=PolicyName(row.policy[::-1]),
            )
            for row in rows
        ]
        assert numbers(estimator.estimate(renamed), renamed) == pytest.approx(
            numbers(estimator.estimate(rows), rows), rel=1e-9, abs=1e-12
        )

    def test_it_passes_the_conformance_check(self, estimator: Estimator) -> None:
        if isinstance(estimator, GiGpo):
            pytest.skip("its rows carry the environment's tags; the laws above try it on such")
        check_estimator(estimator)


@pytest.mark.parametrize("estimator", PER_AGENT, ids=str)
@few
@given(seeds)
def test_what_one_agent_is_given_changes_nothing_for_the_others(estimator: Estimator, seed: int) -> None:
    rows = seen_by(estimator, rows_of(seed))
    changed = [
        replace(row, reward=(row.reward or 0.0) + 0.5, token_rewards=None) if row.agent == "verifier" else row
        for row in rows
    ]
    others = [row for row in rows if row.agent != "verifier"]
    assert numbers(estimator.estimate(changed), others) == numbers(estimator.estimate(rows), others)


@few
@given(seeds)
def test_whitened_advantages_have_mean_0_and_variance_1_and_returns_are_not_whitened(seed: int) -> None:
    rows = [row for row in rows_of(seed) if not row.greedy]
    credit = Gae(gamma=0.9, lam=1.0, whiten="batch").estimate(rows)
    tokens = [x for row in rows for x in credit.token_advantages.get(row.sample_id, ())]
    if len(tokens) > 1:
        mean = sum(tokens) / len(tokens)
        assert mean == pytest.approx(0, abs=1e-6)
        assert sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1) == pytest.approx(1, abs=1e-4)
    for row in rows:
        if row.num_tokens:
            # With lam 1 the return is what followed, whatever was expected.
            rewards = token_rewards(row)
            followed = [
                sum(0.9 ** (j - t) * rewards[j] for j in range(t, row.num_tokens)) for t in range(row.num_tokens)
            ]
            assert credit.returns[row.sample_id] == pytest.approx(tuple(followed), abs=1e-9)
