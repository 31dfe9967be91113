"""A potential changes no expected gradient of a policy, or is refused: on a corridor small enough to try every play.

Three calls at most; each goes on with probability p, or stays. The second step on is the goal, and pays 1. All calls
share one logit, so a play's gradient is the sum of A_k (1 - p) over calls that went and of -A_k p over the others.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.credit import CreditSettings
from flexmarl.credit.interface import CreditRow, GraphCall, LaterCalls
from flexmarl.credit.shaping.base import AddedTerm
from flexmarl.credit.shaping.outcomes import Potential
from flexmarl.errors import CreditError
from flexmarl.records import AgentName
from flexmarl.testing.credit import credit_row

GOAL, CALLS = 2, 3
AGENTS = ("even", "odd")
Phi = Sequence[float]
"""Of the places 0 and 1, in which calls are made."""


def plays() -> list[tuple[bool, ...]]:
    """Every way through: whether each call went on, to the goal or the last call."""
    found = []
    for moves in itertools.product((True, False), repeat=CALLS):
        reached = [sum(moves[: n + 1]) for n in range(CALLS)]
        length = reached.index(GOAL) + 1 if GOAL in reached else CALLS
        found.append(moves[:length])
    return sorted(set(found))


def rows_of(play: tuple[bool, ...], episode: int, phi: Phi, *, agents: Sequence[str]) -> list[CreditRow]:
    rows, place = [], 0
    calls = tuple(GraphCall(hop=hop, after=(hop - 1,) if hop else ()) for hop in range(len(play)))
    for hop, went in enumerate(play):
        reward = float(went and place + 1 == GOAL)
        tags = {"potential": phi[place], "anchor": str(place), "env_step": hop}
        row = credit_row(
            reward,
            episode=episode,
            hop=hop,
            agent=agents[hop % len(agents)],
            num_tokens=1,
            turn=hop,
            tags=tags,
            policy="p",
        )
        rows.append(replace(row, act_reward=reward, act_outcome=reward, calls=calls, values=(0.3 - 0.1 * place,)))
        place += went
    return rows


def gradient(credit: CreditSettings, p: float, phi: Phi, *, agents: Sequence[str] = ("even",)) -> float:
    """Expected sum of A grad log p over two episodes, by enumeration; the greedy play, where one is used, goes on."""
    terms = []
    for pair in itertools.product(plays(), repeat=2):
        rows = [row for number, play in enumerate(pair) for row in rows_of(play, number, phi, agents=agents)]
        if "greedy" in credit.uses:
            rows += [replace(row, greedy=True) for row in rows_of((True, True), 2, phi, agents=agents)]
        given = credit.credit(credit.shape(rows))
        moves = {f"t0_{hop}_t0e{number}": went for number, play in enumerate(pair) for hop, went in enumerate(play)}
        chance = math.prod(p if went else 1 - p for went in moves.values())
        slopes = {name: (1 - p) if went else -p for name, went in moves.items()}
        terms.append(chance * math.fsum(given.weights[n] * given.advantages[n] * slope for n, slope in slopes.items()))
    return math.fsum(terms)


def configured(estimator: dict[str, Any], *terms: dict[str, Any], **options: Any) -> CreditSettings:
    return CreditSettings.model_validate(
        {"estimator": estimator, "shaping": terms, "invalid_action": None, "filter": None, **options}
    )


TO_GO = {"type": "reward_to_go", "scope": "agent"}
POTENTIAL = {"type": "potential"}
STEPS = {"type": "step_gae", "lam": 1, "scope": "agent"}


def misfits(credit: CreditSettings, agents: Sequence[AgentName]) -> list[str]:
    return [line for where, term in credit.terms.items() for line in term.misfits(where, credit, agents)]


@pytest.mark.parametrize("p", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("phi", [(0.0, 0.9), (50.0, -3.0), (0.0, 0.0)])
@pytest.mark.parametrize(
    ("estimator", "terms"), [(STEPS, [POTENTIAL]), ({"type": "reinforce"}, [POTENTIAL, TO_GO])], ids=["steps", "to_go"]
)
def test_where_what_follows_is_added_up_the_gradient_is_that_of_the_chance_to_arrive(estimator, terms, p, phi):
    # J = 3 p^2 (1 - p) + p^3, and d/dlogit = p (1 - p) d/dp: 6 p^2 (1 - p)^2, of each of the two episodes.
    assert gradient(configured(estimator, *terms), p, phi) == pytest.approx(12 * p**2 * (1 - p) ** 2, abs=1e-12)


TURNED: list[dict[str, Any]] = [
    {"type": kind} for kind in ("default", "grpo", "drmas", "rloo", "dr_grpo", "opo", "reinforce", "reinforce++", "gae")
]
TURNED += [{"type": "rae"}, {"type": "gigpo"}, {"type": "rllm"}, {"type": "reinforce++_baseline"}, {"type": "remax"}]


@pytest.mark.parametrize("estimator", TURNED, ids=lambda estimator: estimator["type"])
def test_what_adds_nothing_up_is_refused_for_its_gradient_would_turn(estimator):
    refused = configured(estimator, POTENTIAL)
    assert misfits(refused, [AgentName("even")])
    plain = gradient(configured(estimator), 0.5, (0.0, 0.0))
    levels = [(0.0, -100.0), (0.0, 100.0), (-100.0, 0.0), (100.0, 0.0)]
    signs = {math.copysign(1, gradient(refused, 0.5, phi)) for phi in levels}
    assert plain > 0
    assert -1.0 in signs, "some potential turns it"


FACTORS = st.sampled_from([0.5, 0.9, 1.0])
SCOPES = st.sampled_from(["agent", "team"])
ESTIMATORS = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("default", "grpo", "reinforce", "reinforce", "remax", "remax")]),
    st.fixed_dictionaries({"type": st.just("gigpo"), "gamma": FACTORS}),
    st.fixed_dictionaries(
        {"type": st.just("step_gae"), "gamma": FACTORS, "lam": st.sampled_from([0.9, 1.0, 1.0]), "scope": SCOPES}
    ),
)
NAMED = st.sampled_from([(), (), ("even",)])
POTENTIALS = st.fixed_dictionaries(
    {"type": st.just("potential"), "gamma": FACTORS | st.just(1.0), "scope": SCOPES, "agents": NAMED}
)
OTHERS = st.lists(
    st.sampled_from(
        [
            {"type": "hop_discount", "gamma": 0.5, "max_hops": 2},
            {"type": "turn_weighted", "max_turns": 2},
            {"type": "margin"},
            {"type": "overlong", "max_tokens": 2, "buffer": 2},
            {"type": "process"},
        ]
    ),
    max_size=2,
    unique_by=lambda term: term["type"] if term["type"] in ("overlong", "process") else "one of the outcome",
)
TO_GOES = st.none() | st.fixed_dictionaries(
    {
        "type": st.just("reward_to_go"),
        "gamma": st.sampled_from([0.5, 1.0, 1.0]),
        "scope": st.sampled_from(["agent", "team", "descendants"]),
        "agents": NAMED,
    }
)


@settings(max_examples=400, deadline=None)
@given(
    estimator=ESTIMATORS,
    potential=POTENTIALS,
    others=OTHERS,
    to_go=TO_GOES,
    whiten=st.sampled_from([None, None, None, "policy"]),
    agents=st.sampled_from([("even",), AGENTS]),
    phi=st.tuples(st.floats(-100, 100), st.floats(-100, 100)),
    p=st.floats(0.1, 0.9),
)
def test_in_any_composition_of_terms_a_potential_is_refused_by_name_or_changes_no_expected_gradient(
    estimator, potential, others, to_go, whiten, agents, phi, p
):
    terms = [potential, *others, *([to_go] if to_go else [])]
    chosen = configured(estimator, *terms, whiten=whiten)
    trained = [AgentName(agent) for agent in agents]
    refusals = misfits(chosen, trained)
    if refusals:
        assert all(line.startswith("credit.shaping[") for line in refusals)
        return
    without = gradient(configured(estimator, *terms[1:], whiten=whiten), p, phi, agents=agents)
    assert gradient(chosen, p, phi, agents=agents) == pytest.approx(without, abs=1e-9)


@pytest.mark.parametrize("in_baseline", [False, True])
def test_a_potential_is_refused_where_calls_are_left_out_of_what_is_added_up(in_baseline):
    credit = configured(STEPS, POTENTIAL, untrained_finish=["length"], untrained_in_baseline=in_baseline)
    refused = misfits(credit, [AgentName("even")])
    assert ["credit.untrained_finish leaves calls out" in line for line in refused] == ([] if in_baseline else [True])


def test_calls_that_said_nothing_are_no_step_of_a_potential():
    (first, second, third) = rows_of((False, True, True), 0, (1.0, 5.0), agents=["even"])
    silent = [first, replace(second, num_tokens=0, values=()), third]
    shaped = configured(STEPS, POTENTIAL).shape(silent)
    assert [row.call_reward for row in shaped] == [4.0, 0.0, -5.0]


def test_a_potential_beyond_what_a_reward_may_be_is_refused_by_name():
    rows = rows_of((True, True), 0, (1e300, 0.0), agents=["even"])
    with pytest.raises(CreditError, match=r"sample t0_0_t0e0 of agent even has potential 1e\+300"):
        configured(STEPS, POTENTIAL).shape(rows)


class DoubledReturn(AddedTerm):
    """A term of a user that adds up the agent's later calls. It has no settings of its own."""

    type: Literal["doubled_return"] = "doubled_return"

    @property
    def later_calls(self) -> LaterCalls:
        return LaterCalls(scope="agent", gamma=0.5)

    def added(self, rows):
        return {}


def test_a_term_that_adds_up_later_calls_says_how_and_needs_no_settings_of_certain_names():
    credit = CreditSettings.model_validate({"estimator": {"type": "reinforce"}})
    credit = credit.model_copy(update={"shaping": (Potential(), DoubledReturn())})
    (discount, between) = credit.shaping[0].misfits("shaping[0]", credit, [AgentName("solver")])
    assert discount.startswith("credit.shaping[0].gamma is 1, but what follows a call of agent 'solver' is discounted")
    assert between.startswith("credit.shaping[0] is a potential, but credit.shaping[1].gamma is 0.5 for every call")
