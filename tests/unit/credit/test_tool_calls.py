"""OTC against the closed form of the paper, and its law: no failure above a success, no success below fewer calls."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.credit.shaping import shape
from flexmarl.credit.shaping.bonuses import Otc
from flexmarl.testing.credit import check_term, credit_row

EPISODES = st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 6)), min_size=1, max_size=8)
"""Outcome and number of tool calls."""


def plays(*episodes, agent="solver", greedy=()):
    """One turn for each tool call and a last one without, as (outcome, calls) says for each episode."""
    return [
        replace(
            credit_row(outcome, episode=number, hop=hop, agent=agent),
            signals={"tool_calls": 1.0} if hop < calls else {},
            greedy=number in greedy,
        )
        for number, (outcome, calls) in enumerate(episodes)
        for hop in range(calls + 1)
    ]


def rewards(rows, term):
    """Reward of each episode, which is that of all its turns."""
    found = {}
    for row in shape(rows, [term]):
        found.setdefault(row.episode, set()).add(row.reward)
    return [reward for (reward,) in found.values()]


def of_the_paper(outcome, m, n, *, form, alpha, c):
    """Equations of arXiv 2504.14870, written as they stand there."""
    if form == "ppo":
        r_tool = math.cos(m * math.pi / (2 * m + c))
    else:
        f = 0 if m == n == 0 else m if n == 0 else 2 * m * n / (m + n)
        if f == n == 0:
            r_tool = 1
        else:
            r_tool = math.cos(m * math.pi / (2 * m + c)) if n == 0 else math.sin(f * math.pi / (2 * n))
    return alpha * r_tool * outcome


@given(EPISODES, st.sampled_from(["ppo", "grpo"]), st.floats(0.1, 3), st.floats(0.5, 8))
def test_rewards_are_those_of_the_paper(episodes, form, alpha, c):
    n = min((m for outcome, m in episodes if outcome), default=0)
    found = rewards(plays(*episodes), Otc(form=form, alpha=alpha, c=c))
    assert found == pytest.approx(
        [of_the_paper(outcome, m, n, form=form, alpha=alpha, c=c) for outcome, m in episodes], abs=1e-12
    )


@given(EPISODES, st.sampled_from(["ppo", "grpo"]), st.sampled_from([0.0, -1.0]))
def test_no_failure_is_paid_above_a_success_and_no_success_above_one_with_fewer_calls(episodes, form, failure):
    episodes = [(outcome or failure, m) for outcome, m in episodes]
    found = rewards(plays(*episodes), Otc(form=form))
    solved = {m: reward for (outcome, m), reward in zip(episodes, found, strict=True) if outcome == 1.0}
    missed = [reward for (outcome, _), reward in zip(episodes, found, strict=True) if outcome != 1.0]
    assert missed == [failure] * len(missed)
    assert all(reward > 0 for reward in solved.values())
    in_order = [solved[m] for m in sorted(solved)]
    assert in_order == sorted(in_order, reverse=True)


def test_the_fewest_calls_that_were_enough_pay_in_full_and_more_than_twice_as_many_less():
    assert rewards(plays((1, 2), (1, 4), (0, 0)), Otc()) == pytest.approx([1.0, math.sin(2 / 3 * math.pi), 0.0])


def test_each_agent_is_compared_with_itself_and_a_play_at_temperature_0_with_no_other():
    solver, checker = plays((1, 3), (1, 3)), plays((1, 1), (1, 1), agent="checker")
    assert rewards([*solver, *checker], Otc()) == [1.0, 1.0]
    assert rewards(plays((1, 1), (1, 2), greedy=[0]), Otc())[1] == 1.0


def test_without_a_success_nothing_shrinks():
    assert rewards(plays((0.4, 1), (0.2, 5)), Otc()) == [0.4, 0.2]


def test_the_term_keeps_what_it_says_of_itself():
    check_term(Otc())
    check_term(Otc(form="ppo", alpha=0.5, c=3))
