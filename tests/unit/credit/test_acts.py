"""An act of several calls: what returns count once, and what is compared as one."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.credit import ESTIMATORS
from flexmarl.credit.estimators.base import Grouped
from flexmarl.credit.estimators.c3 import C3
from flexmarl.credit.estimators.gae import StepGae
from flexmarl.credit.estimators.gigpo import GiGpo
from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.estimators.presets import AtGrpo, Default, PassAtK
from flexmarl.credit.interface import CreditRow, Estimator, GraphCall
from flexmarl.credit.rows import places_of_acts
from flexmarl.credit.shaping import shape
from flexmarl.credit.shaping.outcomes import RewardToGo
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row, random_credit_rows

FEW = settings(max_examples=40, deadline=None)
seeds = st.integers(0, 10_000)


def chain(*acts: tuple[float, int], episode: int = 0, shared: float = 0.0, price: float = 0.0) -> list[CreditRow]:
    """An episode of acts, each (its reward, how many calls it took); every call pays the price."""
    rows: list[CreditRow] = []
    for number, (reward, calls) in enumerate(acts):
        act = len(rows)
        for _ in range(calls):
            hop = len(rows)
            tags = {"anchor": f"state {number}", "env_step": number}
            place = {"turn": number, "act_hop": act}
            row = credit_row(reward + shared - price, episode=episode, hop=hop, num_tokens=1, tags=tags, **place)
            rows.append(replace(row, act_reward=reward, act_outcome=reward, call_reward=-price, values=(0.0,)))
    calls = tuple(GraphCall(hop=hop, after=(hop - 1,) if hop else ()) for hop in range(len(rows)))
    return [replace(row, calls=calls) for row in rows]


def acts_of(rows: Sequence[CreditRow]) -> list[list[CreditRow]]:
    """The calls of each act, in hop order."""
    ordered = sorted(rows, key=lambda row: (row.task, row.episode, row.hop))
    return [[ordered[place] for place in places] for places in places_of_acts(ordered)]


def first_calls(rows: Sequence[CreditRow]) -> list[CreditRow]:
    return [row for row in rows if row.act == row.hop]


def advantages(estimator: Estimator, rows: Sequence[CreditRow]) -> list[float]:
    found = estimator.estimate(rows).advantages
    return [found[row.sample_id] for row in rows]


ACTS = st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 3)), min_size=1, max_size=4)


@given(acts=ACTS, shared=st.floats(-1, 1))
@FEW
def test_what_follows_a_call_counts_each_act_once_however_many_calls_it_took(acts, shared):
    several, alone = chain(*acts, shared=shared), chain(*((reward, 1) for reward, _ in acts), shared=shared)
    to_come = [sum(reward for reward, _ in acts[n:]) + shared for n in range(len(acts))]
    assert advantages(StepGae(lam=1), alone) == pytest.approx(to_come, abs=1e-12)
    expected = [to_come[int(row.tag("turn"))] for row in several]
    assert advantages(StepGae(lam=1), several) == pytest.approx(expected, abs=1e-12)


@given(acts=ACTS, gamma=st.floats(0.1, 1))
@FEW
def test_states_of_an_environment_are_compared_by_returns_that_count_each_act_once(acts, gamma):
    """Both plays are in the same states; the second one's acts took several calls."""
    estimator = GiGpo(gamma=gamma, step_weight=1.0)
    plain = [*chain(*((0.0, 1) for _ in acts)), *chain(*((reward, 1) for reward, _ in acts), episode=1)]
    found = dict(zip((row.sample_id for row in plain), estimator._step_scores(plain).values(), strict=True))
    split = [*chain(*((0.0, 1) for _ in acts)), *chain(*acts, episode=1)]
    scores = estimator._step_scores(split)
    expected = [found[row.sample_id] for row in plain if row.episode == "t0e1"]
    assert [scores[row.sample_id] for row in first_calls(split) if row.episode == "t0e1"] == pytest.approx(expected)


@given(acts=ACTS, shared=st.floats(-1, 1), price=st.floats(0, 0.2), gamma=st.floats(0.1, 1))
@FEW
def test_reward_to_go_is_ones_own_and_what_follows_discounted(acts, shared, price, gamma):
    rows = chain(*acts, shared=shared, price=price)
    ends = [sum(calls for _, calls in acts[: n + 1]) - 1 for n in range(len(acts))]
    expected = []
    for row in rows:
        own = int(row.tag("turn"))
        prices = sum(gamma ** (hop - row.hop) * price for hop in range(row.hop, len(rows)))
        later = sum(gamma ** (ends[n] - row.hop) * acts[n][0] for n in range(own + 1, len(acts)))
        expected.append(acts[own][0] - prices + later + gamma ** (len(rows) - 1 - row.hop) * shared)
    found = [row.reward for row in shape(rows, [RewardToGo(gamma=gamma)])]
    assert found == pytest.approx(expected, abs=1e-9)


def test_reward_to_go_adds_the_rewards_of_those_in_its_scope_alone():
    rows = [replace(row, agent=agent) for row, agent in zip(chain((1, 1), (2, 1), (4, 1)), "aba", strict=True)]
    assert [row.reward for row in shape(rows, [RewardToGo(scope="agent")])] == [5.0, 2.0, 4.0]
    assert [row.reward for row in shape(rows, [RewardToGo(scope="team")])] == [7.0, 6.0, 4.0]


# In trees of turns


def candidates(*acts: tuple[float, int], branch: str = "", episode: int = 0, hop: int = 0) -> list[CreditRow]:
    """The candidates of one turn, each (reward, calls): the calls after a tool have seen what nobody else has."""
    rows: list[CreditRow] = []
    for number, (reward, calls) in enumerate(acts):
        path, act = f"{branch}.{number}".strip("."), hop + len(rows)
        for call in range(calls):
            own = {"branch": branch, "context_hash": f"at {branch}"}
            if call:
                own = {"branch": f"{path}:{call}", "context_hash": f"{episode} {path}:{call}"}
            place = {"turn": path.count("."), "path": tuple(map(int, path.split("."))), "act_hop": act, **own}
            rows.append(credit_row(reward, episode=episode, hop=hop + len(rows), **place))
    return rows


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (AtGrpo(scale="none"), (2 / 3, -1 / 3, -1 / 3)),
        (C3(), (1.0, -0.5, -0.5)),
        (PassAtK(scale="none"), (1.0, 0.0, 0.0)),
        (Default(key=("task", "episode", "agent", "branch"), unit="act"), (2 / 3, -1 / 3, -1 / 3)),
    ],
    ids=["atgrpo", "c3", "pass@k", "default"],
)
def test_calls_after_a_tool_have_the_advantage_of_their_act(estimator, expected):
    rows = candidates((1, 3), (0, 1), (0, 2))
    assert advantages(estimator, rows) == pytest.approx([expected[0]] * 3 + [expected[1]] + [expected[2]] * 2)
    assert estimator.estimate(rows).report[rows[0].agent].group_sizes == (3,)


def test_several_branches_and_episodes_are_each_compared_with_their_like_by_the_default_key():
    first = [*candidates((1, 2), (0, 1)), *candidates((1, 1), (1, 1), episode=1)]
    second = [
        *candidates((1, 1), (0, 2), branch="0", hop=3),
        *candidates((1, 1), (1, 1), branch="1", hop=6),
    ]
    found = advantages(AtGrpo(scale="none"), [*first, *second])
    # One context at the root, whatever the episode: (1, 0, 1, 1); two at the second turn.
    assert found == pytest.approx([0.25, 0.25, -0.75, 0.25, 0.25, 0.5, -0.5, -0.5, 0.0, 0.0])


def test_candidates_of_one_branch_that_saw_different_things_are_still_an_error():
    rows = candidates((1, 1), (0, 1))
    with pytest.raises(CreditError, match=r"group \(task=t0, episode=t0e0, branch=\) breaks one_context"):
        AtGrpo().estimate([rows[0], replace(rows[1], context_hash="other")])


def test_an_act_whose_first_call_does_not_train_is_no_error():
    rows = candidates((1, 2), (0, 1))
    assert advantages(AtGrpo(scale="none", singleton="zero"), rows[1:]) == [0.0, 0.0]


def test_the_leaf_of_a_tree_is_worth_the_mean_over_acts_and_not_over_calls():
    deeper = [*candidates((1, 3), (0, 1), branch="0", hop=2), *candidates((0, 1), (0, 1), branch="1", hop=6)]
    rows = [*candidates((0, 1), (0, 1)), *deeper]
    assert advantages(C3(), rows)[:2] == [0.5, -0.5]


def of_one_act(kind: str) -> list[Estimator]:
    """The preset, where it gives a row one number."""
    cls = ESTIMATORS[kind]
    made = cls(singleton="zero") if issubclass(cls, Grouped) else cls()
    return [] if made.uses or made.later_calls else [made]


@pytest.mark.parametrize("kind", [kind for kind in ESTIMATORS.built_in if of_one_act(kind)])
@given(seed=seeds)
@FEW
def test_calls_of_one_act_have_one_advantage_whatever_estimates_it(kind, seed):
    (estimator,) = of_one_act(kind)
    rows = [replace(row, num_tokens=2, values=(0.0, 0.0)) for row in random_credit_rows(seed, acts=True)]
    found = estimator.estimate(rows).advantages
    several = [calls for calls in acts_of(rows) if len(calls) > 1]
    for calls in several:
        assert {round(found[row.sample_id], 12) for row in calls} == {round(found[calls[0].sample_id], 12)}


def test_the_random_batches_have_acts_of_several_calls():
    sizes = [len(calls) for seed in range(20) for calls in acts_of(random_credit_rows(seed, acts=True))]
    assert sizes.count(1) > 20
    assert sum(size > 1 for size in sizes) > 20


@given(seed=seeds)
@FEW
def test_advantages_sum_to_zero_over_acts_where_acts_are_compared(seed):
    rows = [replace(row, num_tokens=1) for row in random_credit_rows(seed, acts=True)]
    estimator = GroupRelative(unit="act")
    found = estimator.estimate(rows).advantages
    groups: dict[tuple[str, str], list[float]] = {}
    for calls in acts_of(rows):
        groups.setdefault((calls[0].task, calls[0].agent), []).append(found[calls[0].sample_id])
    assert all(abs(sum(values)) < 1e-9 for values in groups.values())


def test_streams_are_lines_over_acts_too():
    rows = [row for n in range(3) for row in chain((float(n), n + 1), episode=n)]
    estimator = GroupRelative(unit="act", key=("task", "agent"))
    credit, lines, places = estimator.estimate(rows), estimator.lines(rows), estimator.open_places(rows)
    for row in random.Random(0).sample(rows, len(rows)):
        group, score = places[row.sample_id]
        assert lines[group].scale * score + lines[group].offset == pytest.approx(credit.advantages[row.sample_id])
