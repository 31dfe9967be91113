"""Potential shaping on a grid small enough to try every policy: law S3."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.credit.shaping import shape
from flexmarl.credit.shaping.outcomes import Potential
from flexmarl.testing.credit import credit_row

SIZE, HORIZON, GOAL, STEP_COST = 2, 6, (2, 1), 0.01
MOVES = {"right": (1, 0), "left": (-1, 0), "up": (0, 1), "stay": (0, 0)}


def phi(state):
    """Closer is higher."""
    return -float(abs(GOAL[0] - state[0]) + abs(GOAL[1] - state[1]))


def play(moves):
    """The states and raw rewards of a plan; it ends at the goal or with the last move."""
    state, states, rewards = (0, 0), [], []
    for move in moves:
        states.append(state)
        state = tuple(min(max(place + step, 0), SIZE) for place, step in zip(state, MOVES[move], strict=True))
        rewards.append(float(state == GOAL) - STEP_COST)
        if state == GOAL:
            break
    return states, rewards


def returned(rewards, discount):
    return sum(reward * discount**step for step, reward in enumerate(rewards))


PLANS = {tuple(map(str, play(moves))): play(moves) for moves in itertools.product(MOVES, repeat=HORIZON)}
"""Every plan that differs in what happens: a policy of a deterministic grid is a plan."""


def values(discount, *, gamma, level=phi):
    """(value, shaped value) of every plan, the shaped one from credit rows."""
    found = []
    for number, (states, rewards) in enumerate(PLANS.values()):
        rows = [
            credit_row(reward, episode=number, hop=hop, tags={"potential": level(state)})
            for hop, (state, reward) in enumerate(zip(states, rewards, strict=True))
        ]
        shaped = [row.reward for row in shape(rows, [Potential(gamma=gamma)])]
        found.append((returned(rewards, discount), returned(shaped, discount)))
    return found


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_s3_with_the_discount_of_the_returns_all_plans_shift_by_the_same(discount):
    shifts = [shaped - value for value, shaped in values(discount, gamma=discount)]
    assert len(shifts) > 300
    assert shifts == pytest.approx([-phi((0, 0))] * len(shifts), abs=1e-12)


def test_s3_no_plan_that_loiters_beats_the_shortest_path():
    steps = [len(rewards) for _, rewards in PLANS.values()]
    shaped = [value for _, value in values(1.0, gamma=1.0)]
    best = max(range(len(steps)), key=shaped.__getitem__)
    assert steps[best] == 3
    assert all(shaped[plan] < shaped[best] for plan in range(len(steps)) if steps[plan] > 3)


def test_with_another_discount_standing_still_pays():
    found = values(1.0, gamma=0.9, level=lambda state: 10 * phi(state))
    plans = list(PLANS.values())
    best = max(range(len(plans)), key=lambda plan: found[plan][1])
    assert len(plans[best][1]) == HORIZON, "a plan that takes all the time there is"
    assert found[best][0] < max(value for value, _ in found), "though it is worth less"


@given(levels=st.lists(st.floats(-5, 5), min_size=1, max_size=6), gamma=st.floats(0.1, 1))
def test_each_chain_telescopes(levels, gamma):
    rows = [
        credit_row(0.0, hop=hop, agent="ab"[hop % 2], tags={"potential": level}) for hop, level in enumerate(levels)
    ]
    team = [row.reward for row in shape(rows, [Potential(gamma=gamma, scope="team")])]
    assert returned(team, gamma) == pytest.approx(-levels[0], abs=1e-9)
    own = [row.reward for row in shape(rows, [Potential(gamma=gamma)]) if row.agent == "a"]
    assert returned(own, gamma) == pytest.approx(-levels[0], abs=1e-9)


def test_it_is_earned_by_the_call_and_is_no_outcome():
    row = replace(credit_row(1.0, tags={"potential": 3.0}), call_reward=0.5)
    (shaped,) = shape([row], [Potential()])
    assert (shaped.reward, shaped.outcome, shaped.call_reward) == (-2.0, 1.0, -2.5)
