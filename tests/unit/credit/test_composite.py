"""Process, completion time and reward-to-go: laws S4, S5 and S6 on graphs of calls small enough to be enumerated."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flexmarl.credit.interface import GraphCall
from flexmarl.credit.shaping import shape
from flexmarl.credit.shaping.bonuses import CompletionTime, Process, descendants, longest_path
from flexmarl.credit.shaping.outcomes import RewardToGo
from flexmarl.errors import CreditError
from flexmarl.testing.credit import credit_row

PER_TOKEN = CompletionTime(prompt_token_s=0.0, output_token_s=1.0)
"""T counts tokens."""
Graph = Sequence[Sequence[int]]
"""For each hop, the hops it directly depends on."""
CHAIN: Graph = ((), (0,), (1,))
PARALLEL: Graph = ((), (0,), (0,), (1, 2))


def episode(reward, graph: Graph = ((),), *, number=0, tokens=None, errors=(), agents=("solver",)):
    """One row per call; `errors` are the hops with a tool error."""
    tokens = tokens or [1] * len(graph)
    calls = tuple(GraphCall(hop=hop, after=tuple(after), num_tokens=tokens[hop]) for hop, after in enumerate(graph))
    return [
        replace(
            credit_row(reward, episode=number, hop=hop, agent=agents[hop % len(agents)]),
            calls=calls,
            signals={"tool_error": 1.0} if hop in errors else {},
        )
        for hop in range(len(graph))
    ]


def rewards(rows, *terms):
    return [row.reward for row in shape(rows, terms)]


def lone(*times, solved=None):
    """Episodes of one call each, that take these times."""
    solved = solved or [1.0] * len(times)
    return [
        row
        for number, (time, reward) in enumerate(zip(times, solved, strict=True))
        for row in episode(reward, number=number, tokens=[time])
    ]


@pytest.mark.parametrize(
    ("signals", "cost"),
    [
        ({}, 0.0),
        ({"tool_error": 1.0}, 0.05),
        ({"tool_error": 1.0, "format_error": 1.0}, 0.1),
        ({"language_mix": 0.09}, 0.0),
        ({"language_mix": 0.1}, 0.1 * 0.05),
        ({"language_mix": 0.5}, 0.025),
        ({"something_else": 1.0}, 0.0),
    ],
)
def test_a_call_costs_what_was_found_in_it(signals, cost):
    row = replace(credit_row(1.0), signals=signals)
    (shaped,) = shape([row], [Process()])
    assert shaped.parts["process"] == shaped.call_reward == -cost
    assert (shaped.reward, shaped.outcome) == (1.0 - cost, 1.0)


def test_a_call_costs_no_more_than_the_most():
    row = replace(credit_row(1.0), signals={"tool_error": 1.0, "format_error": 1.0})
    assert rewards([row], Process(costs={"tool_error": 0.3, "format_error": 0.3})) == [0.8]


def test_quicker_successes_earn_more():
    earned = rewards(lone(10, 12, 20), PER_TOKEN)
    assert earned == pytest.approx([1 + 0.1 * 2 / 12, 1.0, 1 - 0.1 * 8 / 12], rel=1e-12)
    assert earned == pytest.approx([1.016667, 1.0, 0.933333], abs=1e-6)


def test_a_lone_success_and_all_failures_earn_nothing_for_their_time():
    assert rewards(lone(1, 2, 3, solved=[1.0, 0.0, 0.0]), PER_TOKEN) == [1.0, 0.0, 0.0]
    assert rewards(lone(10, 20, 1, solved=[1.0, 1.0, 0.0]), PER_TOKEN)[2] == 0.0


def test_what_takes_no_time_at_all_is_not_compared():
    assert rewards(lone(0, 0), PER_TOKEN) == [1.0, 1.0]


def test_the_greedy_play_is_compared_and_not_compared_with():
    greedy = [replace(row, greedy=True) for row in episode(1.0, number=2, tokens=[5])]
    assert rewards([*lone(10, 20), *greedy], PER_TOKEN) == pytest.approx([1 + 0.1 / 3, 1 - 0.1 / 3, 1 + 0.1 * 2 / 3])
    assert rewards([*lone(10), *greedy], PER_TOKEN) == [1.0, 1.0], "one success beside it is nothing to compare"


def test_what_an_episode_earns_is_no_calls_own():
    rows = [replace(row, call_reward=0.25) for number in (0, 1) for row in episode(1.0, CHAIN, number=number)]
    timed = [replace(row, call_reward=0.25) for row in lone(10, 30)]
    for shaped in (shape(timed, [PER_TOKEN]), shape(rows, [Process(), RewardToGo(gamma=0.5)])):
        assert shaped[0].reward != 1.0
        assert {row.call_reward for row in shaped} == {0.25}


def test_an_outcome_that_is_neither_success_nor_failure_is_an_error():
    with pytest.raises(CreditError, match=r"has outcome 0\.5, for completion_time neither a success"):
        rewards(lone(1, 2, solved=[1.0, 0.5]), PER_TOKEN)


def test_an_agent_that_failed_in_a_turn_has_no_success():
    rows = [*episode(1.0, ((), (0,)), number=0), *lone(9, 9, 4)[1:]]
    rows[0] = replace(rows[0], reward=0.0)
    assert rewards(rows, PER_TOKEN)[:2] == [0.0, 1.0]


def test_prompts_and_tools_take_time_too():
    model = CompletionTime(prompt_token_s=0.5, output_token_s=2.0)
    assert model.cost(GraphCall(hop=0, new_prompt_tokens=4, num_tokens=3, tool_s=1.25)) == 4 * 0.5 + 3 * 2.0 + 1.25


TIMES = st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=6)


@given(TIMES)
def test_s4_any_success_beats_any_failure(plays):
    model = CompletionTime(bonus=0.999, prompt_token_s=0.0, output_token_s=1.0)
    earned = rewards(lone(*(time for time, _ in plays), solved=[float(solved) for _, solved in plays]), model)
    assert all(
        success > failure
        for success, (_, solved) in zip(earned, plays, strict=True)
        for failure, (_, other) in zip(earned, plays, strict=True)
        if solved and not other
    )


@given(TIMES, st.integers(2, 9))
def test_s4_a_slower_clock_changes_nothing_and_equal_times_earn_nothing(plays, factor):
    times, solved = [time for time, _ in plays], [float(solved) for _, solved in plays]
    slower = rewards(lone(*(factor * time for time in times), solved=solved), PER_TOKEN)
    assert slower == pytest.approx(rewards(lone(*times, solved=solved), PER_TOKEN), rel=1e-12)
    assert rewards(lone(*(times[0] for _ in times), solved=solved), PER_TOKEN) == solved


@given(
    tokens=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    others=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    data=st.data(),
)
def test_s4_running_two_calls_at_once_never_lowers_the_reward(tokens, others, data):
    chain = [tuple(range(hop)) for hop in range(len(tokens))]
    later = data.draw(st.integers(1, len(tokens) - 1))
    earlier = data.draw(st.integers(0, later - 1))
    at_once = [tuple(set(after) - {earlier}) if hop == later else after for hop, after in enumerate(chain)]
    rest = [row for number, time in enumerate(others) for row in episode(1.0, number=number + 1, tokens=[time])]
    one_by_one = rewards([*episode(1.0, chain, tokens=tokens), *rest], PER_TOKEN)[0]
    assert rewards([*episode(1.0, at_once, tokens=tokens), *rest], PER_TOKEN)[0] >= one_by_one - 1e-12


def test_the_longest_path_counts_calls_at_once_once():
    calls = [GraphCall(hop=hop, after=tuple(after), num_tokens=10**hop) for hop, after in enumerate(PARALLEL)]
    assert longest_path(calls, lambda call: call.num_tokens) == 1 + 100 + 1000
    assert longest_path([], lambda call: 1.0) == 0.0
    assert dict(descendants(calls)) == {0: {1, 2, 3}, 1: {3}, 2: {3}, 3: set()}


def test_a_chain_is_credited_with_what_comes_after_each_call():
    rows = episode(1.0, CHAIN, errors=[1])
    assert rewards(rows, Process(), RewardToGo()) == pytest.approx([0.95, 0.95, 1.0], rel=1e-12)


def test_what_comes_later_is_discounted_by_the_calls_in_between():
    rows = episode(1.0, CHAIN, errors=[2])
    shaped = rewards(rows, Process(costs={"tool_error": 0.2}), RewardToGo(gamma=0.5))
    assert shaped == pytest.approx([0.25 * (1 - 0.2), 0.5 * (1 - 0.2), 1 - 0.2], rel=1e-12)


def test_the_terminal_reward_has_the_time_in_it():
    quick, slow = episode(1.0, ((), (0,)), number=0, tokens=[1, 1]), episode(1.0, ((), (0,)), number=1, tokens=[3, 3])
    shaped = rewards([*quick, *slow], PER_TOKEN, RewardToGo(gamma=0.5))
    assert shaped == pytest.approx([0.5 * 1.05, 1.05, 0.5 * 0.95, 0.95], rel=1e-12)


@pytest.mark.parametrize(
    ("scope", "charged"),
    [("descendants", [0, 1]), ("agent", [1]), ("team", [0, 1])],
)
def test_the_scope_says_whose_later_calls_count(scope, charged):
    rows = episode(1.0, PARALLEL, errors=[3], agents=("planner", "solver"))
    shaped = shape(rows, [Process(), RewardToGo(scope=scope)])
    paying = [row.hop for row in shaped if row.reward == pytest.approx(0.95)]
    assert [hop for hop in paying if hop in (0, 1)] == charged


GRAPHS = st.integers(1, 6).flatmap(
    lambda size: st.tuples(*(st.sets(st.integers(0, max(hop - 1, 0)), max_size=hop) for hop in range(size)))
)


@given(graph=GRAPHS, scope=st.sampled_from(["descendants", "agent", "team"]), data=st.data())
def test_s5_a_penalty_reaches_no_later_call_and_by_descent_no_parallel_one(graph, scope, data):
    graph = [sorted(after) for after in graph]
    guilty = data.draw(st.integers(0, len(graph) - 1))
    agents = ("planner", "solver")
    clean = rewards(episode(1.0, graph, agents=agents), Process(), RewardToGo(scope=scope))
    charged = rewards(episode(1.0, graph, errors=[guilty], agents=agents), Process(), RewardToGo(scope=scope))
    changed = {hop for hop in range(len(graph)) if charged[hop] != clean[hop]}
    ancestors = {
        hop
        for hop, later in descendants(
            [GraphCall(hop=hop, after=tuple(after)) for hop, after in enumerate(graph)]
        ).items()
        if guilty in later
    }
    assert guilty in changed
    assert changed <= set(range(guilty + 1))
    if scope == "descendants":
        assert changed == {guilty, *ancestors}


def gradients(graph: Graph, probabilities, reward, *terms):
    """(expectation, summed variance) of the policy gradient of a game of two calls that are right or wrong.

    Call k is right with sigmoid(theta_k) = p_k; d/d theta_k log pi is 1 - p_k if right, else -p_k. A wrong call is a
    tool error; `reward(right, right)` ends the game.
    """
    weights, samples = [], []
    for right in itertools.product((True, False), repeat=2):
        errors = [hop for hop in range(2) if not right[hop]]
        scores = rewards(episode(reward(*right), graph, errors=errors), *terms)
        slopes = [(1 - p) if ok else -p for ok, p in zip(right, probabilities, strict=True)]
        samples.append([slope * score for slope, score in zip(slopes, scores, strict=True)])
        weights.append(np.prod([p if ok else 1 - p for ok, p in zip(right, probabilities, strict=True)]))
    values, chances = np.array(samples), np.array(weights)
    mean = chances @ values
    return mean, float(chances @ ((values - mean) ** 2).sum(axis=1))


class FullReturn(RewardToGo):
    """Every call is credited with the penalties of all calls."""

    def _counts(self, other, row, later):
        return other.hop != row.hop


SEQUENCE: Graph = ((), (0,))
AT_ONCE: Graph = ((), ())


@pytest.mark.parametrize("graph", [SEQUENCE, AT_ONCE])
@given(p=st.tuples(st.floats(0.05, 0.95), st.floats(0.05, 0.95)), cost=st.floats(0.0, 0.2))
def test_s6_what_was_before_a_call_has_no_part_in_its_expected_gradient(graph, p, cost):
    process = Process(costs={"tool_error": cost})

    def game(first, second):
        return float(first and second)

    whole, _ = gradients(graph, p, game, process, FullReturn())
    to_go, _ = gradients(graph, p, game, process, RewardToGo())
    assert to_go == pytest.approx(whole, abs=1e-12)


def test_s6_there_is_a_game_whose_gradient_varies_less():
    process = Process(costs={"tool_error": 0.2})

    def game(first, second):
        return float(second) - 1.0

    whole, noisy = gradients(SEQUENCE, (0.5, 0.5), game, process, FullReturn())
    to_go, calm = gradients(SEQUENCE, (0.5, 0.5), game, process, RewardToGo())
    assert to_go == pytest.approx(whole, abs=1e-12)
    # The second call's scores are 0, -.2, -1.2, -1.4 with what the first cost: (.04 + 1.44 + 1.96) / 16 - .3^2; without
    # it 0 and -1.2: 1.44 / 8 - .3^2. The first call's are the same.
    assert noisy - calm == pytest.approx(0.125 - 0.09, rel=1e-9)


@given(cost=st.floats(0.01, 0.2))
def test_a_discount_that_is_not_one_would_change_the_gradient(cost):
    assume(cost > 0)
    process = Process(costs={"tool_error": cost})
    whole, _ = gradients(SEQUENCE, (0.5, 0.5), lambda *right: float(all(right)), process, FullReturn())
    discounted, _ = gradients(SEQUENCE, (0.5, 0.5), lambda *right: float(all(right)), process, RewardToGo(gamma=0.5))
    assert abs(discounted - whole).max() > 0.05
