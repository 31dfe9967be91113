"""Terms that put another number in the place of the outcome, and what shaping keeps: laws S1 and S2."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from flexmarl.credit.shaping import SHAPING, AddedTerm, Terms, shape
from flexmarl.errors import CreditError
from flexmarl.testing.credit import check_term, credit_row


class Section(BaseModel):
    shaping: Terms = ()


def terms(*settings):
    """Terms as a config has them; a name stands for its defaults."""
    chosen = [{"type": each} if isinstance(each, str) else each for each in settings]
    return Section.model_validate({"shaping": chosen}).shaping


def chain(*rewards, agents=("solver",), **fields):
    """An episode of one call per turn, the agents taking turns."""
    return [
        credit_row(reward, hop=turn, agent=agents[turn % len(agents)], turn=turn, path=(0,), **fields)
        for turn, reward in enumerate(rewards)
    ]


def rewards(rows, *settings):
    return [row.reward for row in shape(rows, terms(*settings))]


@pytest.mark.parametrize(
    ("term", "row", "expected"),
    [
        ("none", credit_row(0.3), 0.3),
        ("hop_weighted", credit_row(2.0, hop=2), 0.6),
        ("hop_weighted", credit_row(-1.0, hop=0), -0.1),
        ("hop_weighted", credit_row(2.0, hop=14), 2.0),
        ("hop_discount", credit_row(2.0, hop=8), 2.0 * 0.99**2),
        ("hop_discount", credit_row(2.0, hop=12), 2.0),
        ({"type": "hop_discount", "gamma": 0.5, "max_hops": 3}, credit_row(2.0, hop=1), 0.5),
        ("turn_weighted", credit_row(2.0, turn=3), 1.0),
        ("turn_weighted", credit_row(2.0, turn=11), 2.0),
        ({"type": "turn_weighted", "clip": False}, credit_row(2.0, turn=11), 3.0),
        ("turn_discount", credit_row(2.0, turn=7), 2.0),
        ("turn_discount", credit_row(2.0, turn=5), 2.0 * 0.99**2),
        ({"type": "turn_discount", "last_undiscounted": False}, credit_row(2.0, turn=7), 2.0 * 0.99),
        ("binary", credit_row(0.5), 0.0),
        ("binary", credit_row(0.500001), 1.0),
        ("normalized", credit_row(-3.0), -1.0),
        ("normalized", credit_row(0.25), 0.25),
        ("shaped", credit_row(4.0, turn=0), 0.5),
        ("shaped", credit_row(4.0, turn=3), 1.0),
        ("shaped", credit_row(-9.0, turn=7), -1.0),
        ("shaped", credit_row(0.5, turn=11), 0.5),
        ({"type": "shaped", "clip": False}, credit_row(0.5, turn=11), 0.75),
        ({"type": "overlong", "max_tokens": 100, "buffer": 20}, credit_row(1.0, num_tokens=80), 1.0),
        ({"type": "overlong", "max_tokens": 100, "buffer": 20}, credit_row(1.0, num_tokens=90), 0.5),
        ({"type": "overlong", "max_tokens": 100, "buffer": 20}, credit_row(1.0, num_tokens=130), 0.0),
        ({"type": "overlong", "max_tokens": 100, "buffer": 20, "penalty": 0.4}, credit_row(1.0, num_tokens=95), 0.7),
    ],
)
def test_s1_a_row_is_worth_what_the_table_says(term, row, expected):
    assert rewards([row], term) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize(
    ("term", "raw", "expected"),
    [
        ("margin", (0, 1, 1), (0, 1.5, 1.25)),
        ("margin", (1, 0, 1), (1, -0.5, 1.25)),
        ("quality", (0, 1, 1), (0, 1, 1.25)),
        ("quality", (1, 0, 1), (1, 0, 1.25)),
        ("margin_with_outcome", (0, 1, 1), (0.5, 2.0, 1.75)),
        ("margin_with_outcome", (1, 0, 0), (1, -0.5, -0.25)),
        ("quality_with_outcome", (1, 0, 1), (1.5, 0.5, 1.75)),
    ],
)
def test_s1_a_turn_is_compared_with_the_raw_turns_before_it(term, raw, expected):
    assert rewards(chain(*raw), term) == pytest.approx(expected, rel=1e-12)


def test_s1_in_a_debate_the_turns_before_are_everybodys():
    debate = chain(1, 0, 0, 1, agents=("pro", "con"))
    assert rewards(debate, "margin") == [1, 0, -0.5, 1.5], "an agent's own: (1, 0) and (0, 1)"
    assert rewards(debate, {"type": "margin", "scope": "team"}) == pytest.approx([1, -0.5, -0.25, 1 + 0.5 * 2 / 3])


@pytest.mark.parametrize(
    ("kind", "own", "teams"),
    [("margin", (1, 0, -0.5, 1.5), (1, -0.5, -0.25, 4 / 3)), ("quality", (1, 0, 0, 1), (1, 0, -0.25, 7 / 6))],
)
def test_s1_every_term_that_compares_turns_has_a_scope_and_its_own_share_of_the_outcome(kind, own, teams):
    debate = chain(1, 0, 0, 1, agents=("pro", "con"))
    assert rewards(debate, kind) == pytest.approx(own)
    assert rewards(debate, {"type": kind, "scope": "team"}) == pytest.approx(teams)
    with_outcome = {"type": f"{kind}_with_outcome", "beta": 0.25}
    ends = (0, 0.25, 0, 0.25)
    assert rewards(debate, with_outcome) == pytest.approx([r + end for r, end in zip(own, ends, strict=True)])
    assert rewards(debate, {**with_outcome, "scope": "team"}) == pytest.approx([r + 0.25 for r in teams])


def test_turns_of_one_number_are_not_before_one_another_and_calls_of_one_turn_count_once():
    at_once = [
        credit_row(reward, hop=hop, agent=agent, turn=0)
        for hop, (agent, reward) in enumerate([("pro", 1.0), ("con", 0.0)])
    ]
    two_calls = [
        credit_row(1.0, hop=2, agent="pro", turn=1),
        credit_row(0.0, hop=3, agent="pro", turn=1),
    ]
    last = credit_row(1.0, hop=4, agent="con", turn=2)
    shaped = rewards([*at_once, *two_calls, last], {"type": "margin", "scope": "team"})
    assert shaped[:2] == [1.0, 0.0]
    assert shaped[4] == pytest.approx(1 + 0.5 * (1 - (1.0 + 0.0 + 0.5) / 3))


def test_quality_needs_outcomes_between_0_and_1():
    with pytest.raises(
        CreditError, match=r"t0_1_t0e0 of agent solver has outcome 1.5; `quality` needs .* use `margin`"
    ):
        rewards(chain(1.0, 1.5), "quality")


def tree(**nodes):
    return [
        credit_row(reward, hop=hop, path=tuple(map(int, path.strip("_").split("_"))))
        for hop, (path, reward) in enumerate(nodes.items())
    ]


def test_s1_a_candidate_of_a_tree_is_compared_with_its_raw_parent_and_siblings():
    rows = tree(_0=1.0, _1=0.0, _0_0=1.0, _0_1=0.0)
    assert rewards(rows, "tree") == pytest.approx([1.3, -0.3, 1.15, -0.3], rel=1e-12)
    assert rewards(tree(_0=1.0), "tree") == [1.0], "neither parent nor siblings"
    assert rewards(tree(_0=1.0, _0_0=0.0), "tree") == pytest.approx([1.0, -0.3]), "a parent alone"


def test_trees_of_two_episodes_are_two_trees():
    rows = [credit_row(reward, episode=episode, path=(0,)) for episode, reward in enumerate((1.0, 0.0))]
    assert rewards(rows, "tree") == [1.0, 0.0]


def test_outside_a_tree_the_tree_term_says_so():
    with pytest.raises(CreditError, match="sample t0_0_t0e0 of agent solver has no path"):
        rewards([credit_row(1.0)], "tree")


@pytest.mark.parametrize("text", ["first", "", "1"])
def test_a_text_where_a_term_reads_a_number_is_an_error_that_names_tag_and_sample(text):
    row = credit_row(1.0, tags={"potential": text})
    with pytest.raises(CreditError, match=f"the tag 'potential' of sample {row.sample_id} .* must be a number, got"):
        rewards([row], "potential")


@pytest.mark.parametrize("term", ["turn_discount", "turn_weighted"])
def test_a_workflows_own_tag_turn_moves_no_term(term):
    row = credit_row(1.0, turn=2)
    assert rewards([replace(row, tags={"turn": "first"})], term) == rewards([row], term)


@pytest.mark.parametrize(("solved", "earned"), [((0, 0), 0.0), ((1, 0), 1.0), ((1, 1), 0.0), ((1, 0, 0, 0), 0.75)])
def test_s1_a_proposer_earns_most_for_what_is_solved_half_of_the_time(solved, earned):
    proposal = credit_row(0.0, agent="proposer")
    attempts = [credit_row(float(score), hop=hop + 1, turn=hop + 1) for hop, score in enumerate(solved)]
    term = {"type": "learnability", "agents": ["proposer"], "solvers": ["solver"]}
    assert rewards([proposal, *attempts], term) == [earned, *solved], "the solvers keep their own"


def test_an_attempt_at_the_threshold_has_not_solved_the_task():
    proposal = credit_row(0.0, hop=0, agent="proposer", turn=0)
    attempts = [credit_row(reward, hop=hop, turn=hop) for hop, reward in ((1, 0.5), (2, 0.75))]
    term = {"type": "learnability", "agents": ["proposer"], "solvers": ["solver"]}
    assert rewards([proposal, *attempts], term) == [1.0, 0.5, 0.75]


def test_a_proposer_whose_task_nobody_tried_is_an_error():
    term = {"type": "learnability", "agents": ["proposer"], "solvers": ["solver"]}
    with pytest.raises(CreditError, match="no trained turn of solver"):
        rewards([credit_row(0.0, agent="proposer")], term)


def test_each_candidate_of_a_turn_is_an_attempt():
    term = {"type": "learnability", "agents": ["proposer"], "solvers": ["solver"]}
    proposal = credit_row(0.0, agent="proposer", turn=0, path=(0,))
    attempts = [
        credit_row(outcome, hop=1 + candidate, agent="solver", turn=1, path=(0, candidate))
        for candidate, outcome in enumerate((1.0, 0.0, 0.0, 0.0))
    ]
    assert rewards([proposal, *attempts], term) == [0.75, 1.0, 0.0, 0.0, 0.0]


def defaults(kind):
    more = {
        "overlong": {"max_tokens": 3, "buffer": 2},
        "learnability": {"agents": ["solver"], "solvers": ["solver"]},
        "potential": {"tag": "turn"},
    }
    return {"type": kind, **more.get(kind, {})}


@pytest.mark.parametrize("kind", SHAPING.built_in)
@given(raw=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5))
def test_s2_raw_rewards_are_read_and_left_as_they_are_and_parts_add_up(kind, raw):
    rows = chain(*raw)
    before = [replace(row) for row in rows]
    once = shape(rows, terms(defaults(kind)))
    assert rows == before
    assert shape(rows, terms(defaults(kind))) == once
    assert shape([*reversed(rows)], terms(defaults(kind))) == [*reversed(once)], "the order of rows changes nothing"
    for row in once:
        assert row.reward is not None
        assert sum(row.parts.values()) == pytest.approx(row.reward, abs=1e-12)
        assert list(row.parts) == ["outcome", kind]


def test_terms_read_raw_rewards_whatever_stands_before_them():
    settings = ["turn_weighted", defaults("potential"), defaults("overlong")]
    rows = chain(0.5, 1.0, 1.0)
    forward, backward = shape(rows, terms(*settings)), shape(rows, terms(*reversed(settings)))
    assert [row.reward for row in forward] == [row.reward for row in backward]


def test_a_term_reads_what_another_agent_was_given_not_what_a_term_made_of_it():
    rows = chain(1.0, 0.0, agents=("solver", "judge"))
    margin = {"type": "margin", "scope": "team", "agents": ["judge"]}
    assert rewards(rows, {"type": "hop_weighted", "agents": ["solver"]}, margin) == [0.1, -0.5]


def test_a_missing_reward_stays_missing():
    rows = [credit_row(None), credit_row(1.0, hop=1)]
    (missing, present) = shape(rows, terms("turn_weighted", "process"))
    assert missing is rows[0]
    assert present.reward == 0.125


def test_a_term_is_for_the_agents_it_names():
    rows = chain(1.0, 1.0, agents=("solver", "judge"))
    shaped = shape(rows, terms({"type": "hop_weighted", "agents": ["judge"]}))
    assert [row.reward for row in shaped] == [1.0, 0.2]
    assert [dict(row.parts) for row in shaped] == [{}, {"outcome": 1.0, "hop_weighted": -0.8}]


def test_parts_of_the_workflow_stay_and_only_the_outcome_is_reshaped():
    row = replace(credit_row(1.5, outcome=1.0, hop=1), parts={"outcome": 1.0, "style": 0.5}, act_reward=0.75)
    (shaped,) = shape([row], terms({"type": "hop_weighted", "max_hops": 4}))
    assert (shaped.reward, shaped.outcome) == (1.0, 0.5)
    assert dict(shaped.parts) == {"outcome": 1.0, "style": 0.5, "hop_weighted": -0.5}


@pytest.mark.parametrize(
    ("reward", "own", "reshaped"),
    [
        ({"outcome": 2.0}, {}, 0.0),
        ({"outcome": 2.0, "style": 0.25}, {"style": 0.25}, 0.25),
        ({"outcome": 2.0, "style": 0.25}, {"outcome": 2.0}, 1.0),
        ({"outcome": 2.0, "style": 0.25}, {"outcome": 0.5, "style": 0.25}, 0.25 + 0.25),
    ],
)
def test_a_call_keeps_its_share_of_an_outcome_that_is_reshaped(reward, own, reshaped):
    row = replace(
        credit_row(sum(reward.values()), outcome=2.0),
        parts=reward,
        act_reward=sum(own.values()),
        act_outcome=own.get("outcome"),
    )
    (shaped,) = shape([row], terms("normalized"))
    assert (shaped.outcome, shaped.act_reward) == (1.0, reshaped)


def test_a_call_that_was_given_a_zero_bears_what_becomes_of_it():
    given = [replace(row, act_reward=row.reward, act_outcome=row.reward) for row in chain(1.0, 0.0, 1.0)]
    assert [row.act_reward for row in shape(given, terms("margin"))] == [1.0, -0.5, 1.25]
    of_team = shape(chain(1.0, 0.0, 1.0), terms("margin"))
    assert [row.act_reward for row in of_team] == [0.0, 0.0, 0.0]


def test_a_filter_sees_the_reshaped_outcome_and_no_penalty():
    (row,) = shape([credit_row(1.0, num_tokens=9)], terms("turn_weighted", defaults("overlong")))
    assert (row.reward, row.outcome) == (0.125 - 1.0, 0.125)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("binary", "margin"), "binary and margin both replace the outcome of every agent"),
        (
            ({"type": "binary", "agents": ["solver"]}, "margin"),
            "both replace the outcome of solver; use one of them, or limit each with `agents`",
        ),
        (("reward_to_go", "process"), "reward_to_go comes before process, but reads it; put it last"),
        (({"type": "overlong", "max_tokens": 5, "buffer": 9},), "buffer: 9 is more than max_tokens=5"),
        (({"type": "process", "costs": {"tool_error": -1}},), "tool_error: a cost must be at least 0, got -1"),
        (({"type": "completion_time", "bonus": 1.0},), "bonus: 1 must be less than success - failure = 1"),
    ],
)
def test_terms_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        terms(*settings)


def test_two_agents_may_have_outcomes_of_their_own():
    assert terms({"type": "binary", "agents": ["solver"]}, {"type": "margin", "agents": ["judge"]})


@pytest.mark.parametrize("kind", SHAPING.built_in)
def test_every_term_passes_the_conformance_check(kind):
    (term,) = terms(defaults(kind))
    check_term(term)


class Peeking(AddedTerm):
    """A term that looks at the task's other episodes, and says that it sees a row."""

    type: Literal["peeking"] = "peeking"

    def added(self, rows):
        return {row.sample_id: len(rows) for row in rows}


class Negative(Peeking):
    """A term that makes rewards negative, and does not say so."""

    def added(self, rows):
        return {row.sample_id: -1.0 for row in rows}


@pytest.mark.parametrize(
    ("term", "law"),
    [
        (Peeking(), "attribute sees is 'row'"),
        (Negative(), "property may_be_negative is False, .* let may_be_negative return True"),
    ],
)
def test_the_check_of_terms_names_the_law_that_breaks(term, law):
    with pytest.raises(AssertionError, match=law):
        check_term(term)
