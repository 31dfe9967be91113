import copy
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.agents.episode_log import Ledger
from flexmarl.agents.remembering import ContextSettings, recall
from flexmarl.agents.team import Team, reserved_names
from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.agents.tables import context, spec


def played(workflow, agents=("solver", "verifier")):
    team = spec({name: {} for name in agents}).seat(context(lambda *_: "ok"))
    run_virtual(workflow(team))
    return team


def test_rewards_of_replies_and_seats_add_up_and_none_is_a_state():
    async def workflow(team):
        team.solver.reward(1.0)
        first = await team.solver.act("a")
        first.reward(0.25)
        first.reward(-0.5)
        await team.solver.act("b")
        await team.verifier.act("c")
        (await team.verifier.act("d")).reward(0.0)

    team = played(workflow)
    assert list(team.rewards().values()) == [0.75, 1.0, None, 0.0], "a seat's reward covers the turns still to come"
    assert list(team.rewards()) == [turn.sample_id for turn in team.turns]


def test_a_reward_is_kept_apart_by_part_and_by_whom_it_was_given_to():
    async def workflow(team):
        first = await team.solver.act("a")
        await team.verifier.act("b")
        team.reward(1.0)
        team.solver.reward(0.5)
        team.solver.reward(0.25, part="style")
        first.reward(-0.125, part="length")
        first.reward(0.0625)

    team = played(workflow)
    solver, verifier = (turn.sample_id for turn in team.turns)
    assert team.parts() == {
        solver: {"outcome": 1.5625, "style": 0.25, "length": -0.125},
        verifier: {"outcome": 1.0},
    }
    assert team.rewards() == {solver: 1.6875, verifier: 1.0}
    assert team.call_rewards() == {solver: {"outcome": 0.0625, "length": -0.125}, verifier: {}}


def test_a_turn_that_nobody_rewarded_has_no_parts():
    async def workflow(team):
        await team.verifier.act("b")
        team.solver.reward(1.0)

    team = played(workflow)
    (turn,) = team.turns
    assert team.parts() == {turn.sample_id: {}}
    assert team.rewards() == {turn.sample_id: None}


def test_a_part_has_the_name_of_a_variable():
    async def workflow(team):
        (await team.solver.act("a")).reward(1.0, part="a/b")

    with pytest.raises(EpisodeError, match=r"named as a variable is, e\.g\. 'format', got 'a/b'"):
        played(workflow)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_is_a_finite_number(reward):
    async def workflow(team):
        (await team.solver.act("a")).reward(reward)

    with pytest.raises(EpisodeError, match="finite"):
        played(workflow)


def test_a_team_knows_its_seats_by_name_and_in_order():
    team = spec({"solver": {}, "verifier": {}}).seat(context(lambda *_: "ok"))
    assert team.solver is team["solver"]
    assert [seat.name for seat in team] == ["solver", "verifier"]
    with pytest.raises(AttributeError, match="no agent 'slover'; it has: solver, verifier"):
        team.slover.act("a")
    with pytest.raises(EpisodeError, match="no agent 'slover'; it has: solver, verifier"):
        team["slover"]
    assert copy.copy(team).solver is team.solver


def test_no_agent_can_have_a_name_that_the_team_uses_itself():
    team = spec({"solver": {}}).seat(context(lambda *_: "ok"))
    public = {name for name in (*vars(Team), *vars(team)) if not name.startswith("_")}
    assert public == reserved_names()


def test_each_episode_has_an_environment_of_its_own():
    made = []
    agents = spec({"solver": {}})
    ctx = context(lambda *_: "ok", environment=lambda task: made.append(task) or object())
    team, other = agents.seat(ctx), agents.seat(ctx)
    assert not made, "it is made at first use"
    assert team.environment is team.environment is not other.environment
    with pytest.raises(EpisodeError, match="this run has none"):
        _ = agents.seat(context(lambda *_: "ok")).environment


def test_the_same_trajectory_has_the_same_chances():
    def draws(**changes):
        return spec({"solver": {}}).seat(context(lambda *_: "ok", **changes)).rng.random()

    assert draws() == draws()
    assert len({draws(), draws(run_seed=2), draws(trajectory_id="g0e1a0")}) == 3
    assert random.random() != draws()


def test_metrics_are_kept_and_must_be_numbers():
    team = spec({"solver": {}}).seat(context(lambda *_: "ok"))
    team.report(success=1, rounds=2)
    team.report(rounds=3)
    assert team.metrics == {"success": 1.0, "rounds": 3.0}
    with pytest.raises(EpisodeError, match="'success' must be a finite number, got nan"):
        team.report(success=float("nan"))


@pytest.mark.parametrize(
    ("policies", "trained", "level"),
    [
        ("aa", "", "L0"),
        ("aa", "a", "L1"),
        ("a", "a", "L1"),
        ("ab", "ab", "L3"),
        ("ab", "a", "mixed"),
        ("aab", "ab", "mixed"),
        ("abc", "abc", "L3"),
    ],
)
def test_the_level_says_how_far_the_agents_are_specialised(policies, trained, level):
    agents = {f"agent{index}": {"policy": policy} for index, policy in enumerate(policies)}
    assert spec(agents, policies=policies, trained=trained).level.name == level


@pytest.mark.parametrize(("adapters", "level"), [("ab", "L2"), ("a", "L3")])
def test_agents_with_an_adapter_each_on_one_base_are_of_a_level_of_their_own(adapters, level):
    agents = {"solver": {"policy": "a"}, "judge": {"policy": "b"}}
    assert spec(agents, policies="ab", trained="ab", adapters=adapters).level.name == level


def test_the_level_says_what_makes_it_so():
    level = spec({"solver": {"policy": "a"}, "judge": {"policy": "b"}}, policies="ab", trained="a").level
    assert level.because == "solver trains a, judge uses the frozen b"


@pytest.mark.parametrize(
    ("agents", "trained", "message"),
    [
        ({"solver": {"policy": "q"}}, (), "team.agents.solver.policy: there is no policy 'q'; there are: p"),
        ({"solver": {"parser": "last_lime"}}, ("p",), "team.agents.solver.parser: there is no parser 'last_lime'; did"),
        ({"solver": {}}, ("p", "r"), "policies.r is trained, but no agent acts with it"),
    ],
)
def test_a_team_that_does_not_fit_its_policies_is_refused(agents, trained, message):
    with pytest.raises(ConfigError, match=message):
        spec(agents, trained=trained)


@given(last=st.sampled_from(["none", "full"]) | st.integers(1, 6), acts=st.lists(st.integers(), max_size=8))
def test_the_last_acts_are_remembered_in_order(last, acts):
    kept = recall(ContextSettings(last=last) if isinstance(last, int) else last, acts)
    limit = {"none": 0, "full": len(acts)}.get(last, last)
    assert list(kept) == acts[max(0, len(acts) - limit) :]


def test_calls_are_numbered_in_the_episode_in_the_agent_and_in_the_context():
    ledger = Ledger()
    numbers = [ledger.next_call(agent, hashed) for agent, hashed in (("a", "x"), ("b", "x"), ("a", "y"), ("a", "x"))]
    assert numbers == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 0, 2), (3, 2, 1, 3)]


def test_an_agent_without_tools_is_not_stopped_by_their_syntax():
    assert spec({"solver": {"syntax": {"type": "function"}}}).agents["solver"].syntax is None
