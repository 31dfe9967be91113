"""What becomes of the cases in which other frameworks differ from one another: a test for each of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexmarl.credit import CreditSettings, Estimator, credit_rows
from flexmarl.credit.estimators.base import Singleton
from flexmarl.credit.estimators.baselines import Rae, Reinforce, ReinforcePP
from flexmarl.credit.estimators.gae import Gae
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import Default, DrMas, Grpo, PassAtK, Rllm, Rloo
from flexmarl.credit.interface import CreditRow
from flexmarl.credit.returns import discounted_returns, generalised_advantages
from flexmarl.credit.rows import samples_of
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, FinishReason, GroupRecord, PolicyName, Sample
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.credit import credit_row
from flexmarl.training.aggregation import divisor, divisors_of, token_weights
from flexmarl.training.batching import rows_of
from flexmarl.training.losses import Ppo
from tests.unit.rollout.plays import GROUP, player

MASK = (1, 1, 0, 0, 1, 1)


def advantages(estimator: Estimator, *rewards: float, **fields) -> list[float]:
    rows = [credit_row(reward, episode=episode, **fields) for episode, reward in enumerate(rewards)]
    return list(estimator.estimate(rows).advantages.values())


def played(workflow, say=lambda prompt, request: "7") -> GroupRecord:
    """A group of one episode."""
    return replace(GROUP, episodes=(run_virtual(player(workflow, say)[0].play(GROUP, 0)),))


async def solve(task, team) -> None:
    answer = await team.solver.act(task.prompt)
    answer.reward(task.score(answer.text))


@pytest.mark.parametrize(("singleton", "advantage"), [("zero", 0.0), ("raw", 0.7 / (1 + 1e-6)), ("drop", 0.0)])
def test_a_lone_row_that_would_be_divided_is_worth_what_the_option_says(singleton: Singleton, advantage: float) -> None:
    assert advantages(DrMas(singleton=singleton), 0.7) == pytest.approx([advantage], abs=1e-12)
    assert advantages(Default(), 0.7) == [0.0]
    assert advantages(DrMas(), 0.7) == pytest.approx([0.6999993], abs=5e-8)


def test_a_lone_row_is_0_unless_all_are_where_the_option_says_so() -> None:
    estimator = GroupRelative(singleton="zero_unless_all")
    assert advantages(estimator, 0.7) == [0.7]
    rows = [credit_row(0.7), credit_row(1.0, task="t1"), credit_row(0.0, task="t1", episode=1)]
    assert list(estimator.estimate(rows).advantages.values()) == [0.0, 0.5, -0.5]


@pytest.mark.parametrize(("singleton", "advantage"), [("zero", 0.0), ("raw", 0.7), ("drop", 0.0)])
def test_a_lone_row_without_others_to_leave_out_is_worth_what_the_option_says(singleton, advantage: float) -> None:
    assert advantages(Rloo(singleton=singleton), 0.7) == [advantage]
    assert advantages(GroupRelative(centre="leave_one_out"), 0.7) == [0.0]


def test_the_standard_deviation_is_the_samples_or_the_populations_as_a_parameter() -> None:
    assert advantages(Grpo(eps=0.0), 1.0, 0.0) == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-12)
    assert advantages(Grpo(eps=0.0, ddof=0), 1.0, 0.0) == advantages(Rllm(eps=0.0), 1.0, 0.0) == [1.0, -1.0]


def test_what_is_added_to_the_standard_deviation_is_a_parameter() -> None:
    for eps in (1e-9, 1e-6, 0.5):
        assert advantages(Grpo(ddof=0, eps=eps), 1.0, 0.0)[0] == pytest.approx(0.5 / (0.5 + eps), abs=1e-12)


def test_a_tiny_spread_of_rewards_is_blown_up_unless_a_least_deviation_is_set() -> None:
    spread = (1.0, 1.0 - 2e-4)
    assert advantages(Grpo(ddof=0), *spread)[0] == pytest.approx(1, abs=0.02)
    assert advantages(Grpo(ddof=0, min_std=1e-3), *spread) == [0.0, 0.0]
    assert advantages(Grpo(ddof=0, std_floor=0.1), *spread)[0] == pytest.approx(1e-3, rel=1e-4)
    assert advantages(Default(), *spread)[0] == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize("reward", [1.0, 0.1 + 0.2])
def test_a_group_of_equal_rewards_teaches_nothing_and_is_flagged(reward: float) -> None:
    rows = [credit_row(reward, episode=episode) for episode in range(3)]
    for estimator in (Default(), DrMas(), Rloo()):
        credit = estimator.estimate(rows)
        assert set(credit.advantages.values()) == {0.0}
        report = credit.report[AgentName("solver")]
        assert (report.effective, report.too_easy + report.flat) == (0, 1)


def test_groups_come_from_tags_whatever_the_order_and_what_they_claim_is_asserted() -> None:
    rows = [
        credit_row(1.0),
        credit_row(0.0, task="t1"),
        credit_row(0.0, episode=1),
        credit_row(1.0, task="t1", episode=1),
    ]
    assert list(Default().estimate(rows).advantages.values()) == [0.5, -0.5, -0.5, 0.5]
    with pytest.raises(CreditError, match="one_task"):
        GroupRelative(key=("agent",)).estimate(rows)
    contexts = [credit_row(1.0, context_hash="x"), credit_row(0.0, episode=1, context_hash="y")]
    with pytest.raises(CreditError, match="one_context"):
        GroupRelative(require=("one_task", "one_context")).estimate(contexts)


def test_no_row_is_ever_copied_before_advantages() -> None:
    row = credit_row(1.0)
    for estimator in (Default(), Reinforce(), ReinforcePP(), Rae()):
        with pytest.raises(CreditError, match=f"sample {row.sample_id} of agent solver was given twice"):
            estimator.estimate([row, row])


def test_the_best_of_one_is_an_error_or_what_the_option_says() -> None:
    with pytest.raises(CreditError, match="has one observation, and singleton is 'error'"):
        advantages(PassAtK(), 0.7)
    assert advantages(PassAtK(singleton="zero"), 0.7) == [0.0]


def sample(num_tokens: int) -> Sample:
    turn = played(solve).episodes[0].turns[0]
    cut = {name: getattr(turn, name)[:num_tokens] for name in ("response_ids", "logprobs", "raw_logprobs")}
    return Sample(turn=replace(turn, **cut), advantage=1.0)


def test_an_empty_row_is_skipped_where_rows_are_averaged() -> None:
    samples = [sample(2), sample(0)]
    assert token_weights(samples, "seq-mean-token-mean").tolist() == [0.5, 0.0]
    assert divisor(divisors_of(samples), "seq-mean-token-mean") == 1.0
    rows = rows_of([2, 0])
    assert rows.mean(torch.tensor([1.0, 3.0])).tolist() == [2.0, 0.0]
    credit = Default().estimate([credit_row(1.0), credit_row(0.0, episode=1, num_tokens=0), credit_row(0.0, episode=2)])
    assert list(credit.advantages.values()) == [0.5, 0.0, -0.5]


def test_rewards_inside_a_row_are_summed() -> None:
    row = replace(credit_row(1.0, num_tokens=3), token_rewards=(0.25, 0.25, 0.5))
    assert list(Reinforce().estimate([row]).advantages.values()) == [1.0]
    assert discounted_returns(row.token_rewards or (), gamma=1.0).tolist() == [1.0, 0.75, 0.5]
    inside = replace(row, token_rewards=(1.0, 0.0, 0.0))
    assert list(Reinforce().estimate([inside]).advantages.values()) == [1.0]


def test_what_follows_an_observation_carries_to_the_tokens_before_it() -> None:
    returns = discounted_returns([0, 0, 0, 0, 0, 1], gamma=0.9, mask=MASK)
    assert returns[np.array(MASK) == 1].tolist() == pytest.approx([0.729, 0.81, 0.9, 1], abs=1e-12)


def test_values_at_observations_are_skipped() -> None:
    values, other = [0.2, 0.3, 9.0, 9.0, 0.5, 0.6], [0.2, 0.3, -7.0, 0.0, 0.5, 0.6]
    found = [
        generalised_advantages([0, 0, 0, 0, 0, 1], of, gamma=0.9, lam=0.8, mask=MASK)[np.array(MASK) == 1]
        for of in (values, other)
    ]
    assert found[0].tolist() == found[1].tolist() == pytest.approx([0.348035, 0.386160, 0.328, 0.4], abs=5e-7)


def test_the_dual_clip_bounds_a_bad_action_that_became_much_likelier_at_3_unless_it_is_off() -> None:
    old = torch.full((2,), -1.0, dtype=torch.float64)
    now = old + torch.tensor([4.0, 2.0], dtype=torch.float64).log()
    bad = torch.full((2,), -1.0, dtype=torch.float64)
    assert Ppo().dual_clip == 3.0
    assert Ppo().per_token(now, old, bad, rows_of([1, 1]))[0].tolist() == pytest.approx([3.0, 2.0], rel=1e-12)
    off = Ppo(dual_clip=None).per_token(now, old, bad, rows_of([1, 1]))[0]
    assert off.tolist() == pytest.approx([4.0, 2.0], rel=1e-12)


def test_a_call_that_failed_or_timed_out_is_no_row_and_its_episode_has_none() -> None:
    async def two(task, team) -> None:
        (await team.solver.act(task.prompt)).reward(1.0)
        (await team.verifier.act(task.prompt)).reward(1.0)

    failed = played(two, lambda prompt, request: "!broken" if request.policy == "verifier" else "7")
    assert [turn.finish for episode in failed.episodes for turn in episode.turns] == [FinishReason.STOP]
    assert failed.finished == ()
    assert credit_rows(failed, [PolicyName("solver"), PolicyName("verifier")]) == ()


def test_a_call_whose_end_does_not_train_has_weight_0_is_counted_and_is_in_no_divisor() -> None:
    rows = [credit_row(1.0), credit_row(0.0, episode=1), replace(credit_row(0.0, episode=2), trains=False)]
    credit = CreditSettings.model_validate({"estimator": {"type": "default"}}).credit(rows)
    assert [credit.weights[row.sample_id] for row in rows] == [1.0, 1.0, 0.0]
    assert [credit.advantages[row.sample_id] for row in rows] == [0.5, -0.5, 0.0]
    assert credit.report[AgentName("solver")].untrained == 1

    group = played(solve)
    cut_off = credit_rows(group, [PolicyName("solver")], [FinishReason.STOP])
    assert [row.trains for row in cut_off] == [False]
    samples, left_out = samples_of(group, CreditSettings(filter=None).credit(cut_off))
    assert not samples
    assert sum(map(len, left_out.values())) == 1


def test_a_missing_reward_is_an_error_that_names_the_call_and_never_0() -> None:
    row: CreditRow = credit_row(None)
    estimators: Sequence[Estimator] = (Default(), Grpo(), Reinforce(), ReinforcePP(), Gae(), Rae())
    for estimator in estimators:
        with pytest.raises(CreditError, match=f"sample {row.sample_id} of agent solver has no reward"):
            estimator.estimate([replace(row, values=(0.0, 0.0, 0.0))])


def test_the_baselines_of_a_run_that_is_resumed_are_those_that_were_saved() -> None:
    """In whole runs: tests/simulated/test_estimators_in_runs.py."""
    first, second = [credit_row(1.0, task="t0")], [credit_row(1.0, task="t1")]
    saved = Rae().estimate(first).memory
    assert list(Rae().estimate(second, saved).advantages.values()) == [0.95]
    assert list(Rae().estimate(second).advantages.values()) == [1.0]
