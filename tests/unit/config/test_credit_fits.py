"""Terms, keys and estimators that do not fit the team, the batch or each other are refused, each by its name."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from flexmarl.config import RunSettings, load_run
from flexmarl.credit.estimators import ESTIMATORS, AnyEstimator
from flexmarl.errors import ConfigError
from tests.unit.config.configs import refused

SOLVERS = "credit.shaping=[{type: potential, agents: [solver]}]"


def test_one_episode_is_enough_for_an_estimator_that_keeps_lone_rewards(config):
    settings = load_run(config, ["batch.episodes=1", "credit.estimator={type: grpo}", "credit.filter=null"])
    assert isinstance(settings, RunSettings)


def test_terms_and_estimators_are_for_agents_of_the_team(config):
    assert refused(config, "credit.shaping=[{type: binary, agents: [nobody]}]") == [
        "credit.shaping[0] is for agent 'nobody'; the team has: solver, writer"
    ]
    assert refused(config, "credit.per_agent={nobody: {type: rloo}}") == [
        "credit.per_agent.nobody is for agent 'nobody'; the team has: solver, writer"
    ]


@pytest.mark.parametrize(
    ("estimator", "where"),
    [
        ("{type: grpo, key: {nobody: [task], '*': [task]}}", "key"),
        ("{type: hierarchical, episode_roles: [solver, nobody]}", "episode_roles"),
    ],
)
def test_keys_of_credit_are_for_agents_of_the_team(config, estimator, where):
    for section in ("estimator", "per_agent.solver"):
        assert refused(config, f"credit.{section}={estimator}") == [
            f"credit.{section}.{where} is for agent 'nobody'; the team has: solver, writer"
        ]


def test_every_trained_agent_has_a_key(config):
    key = "credit.estimator={type: grpo, key: {solver: [task]}, singleton: zero}"
    said = (
        "credit has a key for solver, but none for agent 'writer'; add it to the estimator's key, or '*' for all others"
    )
    assert refused(config, key) == [said]
    assert said in refused(config, key, "batch.episodes=1"), "however many episodes there are"
    load_run(config, [key, "credit.per_agent={writer: {type: rloo}}"])
    load_run(config, [key, "policies.two.trainable=false"])


@pytest.mark.parametrize("override", ["estimator={type: c3}", "shaping=[{type: tree}]"])
def test_candidates_are_compared_only_where_a_turn_has_several(config, override):
    tree = "team.workflow={type: turns, turn: any, candidates: 4}"
    where = "estimator" if "c3" in override else "shaping[0]"
    for workflow, kind in ((tree.replace("4", "1"), "turns"), ("steps=1", "sequential")):
        assert refused(config, f"credit.{override}", workflow) == [
            f"credit.{where} compares the candidates of a turn, but team.workflow of type '{kind}' plays each turn "
            f"once; use team.workflow.type=turns with candidates=4, or leave credit.{where} out"
        ]
    load_run(config, [f"credit.{override}", tree])
    load_run(config, [f"credit.{override}", "team.workflow={type: custom, name: one_that_forks}"])


def test_a_potential_has_the_discount_of_what_follows_a_call(config):
    short = "credit.shaping=[{type: potential, gamma: 0.5, agents: [solver]}]"
    critic = "policies.one.training.critic={}"
    steps = "credit.per_agent={solver: {type: step_gae, lam: 1, gamma: GAMMA}}"
    assert refused(config, short, critic, steps.replace("GAMMA", "1")) == [
        "credit.shaping[0].gamma is 0.5, but what follows a call of agent 'solver' is discounted by 1, so that an "
        "agent could gain by going to and fro; use gamma=1"
    ]
    load_run(config, [short, critic, steps.replace("GAMMA", "0.5")])
    assert (
        "of agent 'solver' is discounted by 0.25," in refused(config, short, critic, steps.replace("GAMMA", "0.25"))[0]
    )


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["credit.estimator={type: reinforce++}"],
            "credit.shaping[0] is a potential, which turns no gradient only where what follows a call is added up, but "
            "the estimator of agent 'solver', reinforce++, credits a call with its own reward; use",
        ),
        (
            ["credit.estimator={type: gigpo}"],
            "credit.shaping[0] is a potential, but the estimator of agent 'solver', gigpo, compares a call with "
            "rewards that come after it, of which the potential is a part; use",
        ),
        (
            ["credit.shaping=[{type: potential}, {type: reward_to_go, scope: agent}]"],
            "credit.shaping[0] is a potential, but the estimator of agent 'solver', default, compares a call with",
        ),
        (
            [
                "credit.shaping=[{type: potential}, {type: reward_to_go, scope: agent}]",
                "credit.estimator={type: reinforce}",
                "credit.whiten=policy",
            ],
            "credit.shaping[0] is a potential, but credit.whiten is 'policy', which takes a mean off",
        ),
        (
            ["credit.shaping=[{type: potential}, {type: reward_to_go}]", "credit.estimator={type: reinforce}"],
            "credit.shaping[0].scope is 'agent', but credit.shaping[1] adds up what follows by scope 'descendants', so "
            "that phi before and after a call of agent 'solver' does not cancel; use scope=agent in both",
        ),
        (
            [
                "credit.shaping=[{type: potential, gamma: 0.5}, {type: reward_to_go, scope: agent, gamma: 0.5}]",
                "credit.estimator={type: reinforce}",
            ],
            "credit.shaping[0] is a potential, but credit.shaping[1].gamma is 0.5 for every call of the team in",
        ),
        (
            [
                "credit.shaping=[{type: potential, agents: [solver]}, {type: reward_to_go, scope: team}]",
                "credit.estimator={type: reinforce}",
            ],
            "credit.shaping[0] is a potential for solver, but credit.shaping[1] adds up what they earn for agent",
        ),
        (
            [
                "credit.shaping=[{type: potential, scope: team}, {type: reward_to_go, scope: team, agents: [solver]}]",
                "credit.estimator={type: reinforce}",
            ],
            "credit.shaping[0] is a potential, which turns no gradient only where what follows a call is added up, but "
            "the estimator of agent 'writer', reinforce,",
        ),
        (
            ["credit.per_agent={solver: {type: step_gae}}", "policies.one.training.critic={}", SOLVERS],
            "credit.shaping[0] is a potential, but credit.per_agent.solver.lam is 0.95, with which a critic that has",
        ),
        (
            [
                "credit.per_agent={solver: {type: step_gae, lam: 1}}",
                "policies.one.training.critic={}",
                SOLVERS,
                "credit.untrained_finish=[length]",
            ],
            "credit.shaping[0] is a potential, but credit.untrained_finish leaves calls out of what is added up",
        ),
    ],
)
def test_a_potential_is_refused_wherever_it_would_not_cancel(config, overrides, line):
    assert any(said.startswith(line) for said in refused(config, "credit.shaping=[{type: potential}]", *overrides))


def test_a_potential_of_frozen_agents_alone_changes_nothing_and_is_refused(config):
    to_go = ["credit.shaping=[{type: potential, agents: [solver]}, {type: reward_to_go, scope: agent}]"]
    to_go += ["credit.estimator={type: reinforce}"]
    load_run(config, to_go)
    assert refused(config, *to_go, "policies.one.trainable=false") == [
        "credit.shaping[0] is a potential for solver, which no training changes; name a trained agent in its agents "
        "(writer), or leave potential out"
    ]
    load_run(config, [*to_go, "policies.one.trainable=false", "policies.two.trainable=false"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["credit.shaping=[{type: potential}, {type: reward_to_go, scope: agent}]", "credit.estimator={type: remax}"],
        [
            "credit.shaping=[{type: potential, scope: team}, {type: reward_to_go, scope: team}]",
            "credit.estimator={type: reinforce}",
        ],
        [
            "credit.shaping=[{type: potential, scope: team}]",
            "credit.estimator={type: step_gae, lam: 1}",
            "policies.one.training.critic={}",
            "policies.two.training.critic={}",
        ],
    ],
)
def test_a_potential_is_taken_where_what_follows_is_added_up(config, overrides):
    load_run(config, overrides)


@pytest.mark.parametrize(
    "term",
    [
        *("{type: margin}", "{type: quality_with_outcome}", "{type: process}"),
        *(
            "{type: overlong, max_tokens: 9, buffer: 3}",
            "{type: completion_time, bonus: 1, success: 0.5, failure: -1}",
        ),
    ],
)
def test_what_divides_by_the_mean_reward_takes_no_term_that_may_be_negative(config, term):
    free = ["credit.invalid_action=null", f"credit.shaping=[{term}]"]
    (line,) = refused(config, *free, "credit.estimator={type: max_rl}")
    assert line.startswith("credit.estimator divides by the mean reward of a group")
    assert "shaping[0], " in line
    assert refused(config, *free, "credit.per_agent={writer: {type: max_rl}}")[0].startswith("credit.per_agent.writer")
    named = f"credit.shaping=[{term[:-1]}, agents: [solver]}}]"
    load_run(config, ["credit.invalid_action=null", named, "credit.per_agent={writer: {type: max_rl}}"])
    harmless = "credit.shaping=[{type: binary}, {type: completion_time}, {type: process, most: 0}]"
    load_run(config, ["credit.invalid_action=null", harmless, "credit.estimator={type: max_rl}"])


def test_what_divides_by_the_mean_reward_takes_no_divergence_out_of_it(config):
    max_rl = ["credit.estimator={type: max_rl}", "credit.invalid_action=null"]
    (line,) = refused(config, *max_rl, "policies.two.training.kl={type: k1, where: reward}")
    assert line.startswith("policies.two.training.kl.where is 'reward', which may make rewards of agent 'writer' neg")
    load_run(config, [*max_rl, "policies.two.training.kl={type: k2}"])


def test_what_follows_a_call_is_added_up_once(config):
    to_go = "credit.shaping=[{type: process}, {type: reward_to_go, agents: [solver]}]"
    steps = "credit.per_agent={solver: {type: step_gae}}"
    assert refused(config, to_go, "credit.per_agent={solver: {type: gigpo}}")[0].startswith(
        "credit.shaping[1] adds up the rewards after each call of agent 'solver', as does its estimator, gigpo"
    )
    assert refused(config, to_go, "credit.estimator={type: gdpo}")[0].startswith(
        "credit.shaping[1] adds up all parts of the rewards that follow each call of agent 'solver', but its estimator"
    )
    assert refused(config, to_go, steps, "policies.one.training.critic={}") == [
        "credit.shaping[1] adds up the rewards after each call of agent 'solver', as does its estimator, step_gae: "
        "they would count twice; leave reward_to_go out, or use another estimator"
    ]
    load_run(config, [to_go.replace("solver", "writer"), steps, "policies.one.training.critic={}"])


def test_one_episode_of_a_task_is_enough_where_it_is_compared_with_itself(config):
    assert "batch.episodes is 1, but the estimator of agent 'solver'" in refused(config, "batch.episodes=1")[0]
    load_run(config, ["batch.episodes=1", "credit.estimator={type: default, key: [task, agent, episode]}"])
    load_run(config, ["batch.episodes=1", "team.workflow={type: turns, turn: any, candidates: 4}"])


def test_what_goes_from_call_to_call_needs_episodes_that_do_not_branch(config):
    tree = "team.workflow={type: turns, turn: any, candidates: 4}"
    terms = [f"{{type: {kind}}}" for kind in ("hop_weighted", "hop_discount", "margin", "quality")]
    terms += [f"{{type: {kind}}}" for kind in ("margin_with_outcome", "quality_with_outcome", "completion_time")]
    given = {f"credit.shaping=[{term}]": "shaping[0]" for term in [*terms, "{type: reward_to_go}"]}
    given |= {
        "credit.estimator={type: gigpo}": "estimator",
        "credit.per_agent={writer: {type: gigpo}}": "per_agent.writer",
    }
    for override, where in given.items():
        assert refused(config, tree, override) == [
            f"credit.{where} follows calls one by one, but team.workflow.candidates is 4, so that an episode branches "
            "at every turn; use team.workflow.candidates=1, or compare the candidates of a turn "
            "(credit.estimator.type=atgrpo or c3, shaping type tree)"
        ]
        load_run(config, [override, tree.replace("4", "1")])
    assert "credit.estimator follows calls one by one" in "".join(
        refused(config, tree, "credit.estimator={type: step_gae}")
    )
    assert "credit.shaping[0] follows calls one by one" in "".join(
        refused(config, tree, "credit.shaping=[{type: potential}]")
    )
    load_run(config, [tree, "credit.shaping=[{type: turn_weighted}, {type: process}]"])


def test_one_episode_is_enough_where_each_agent_keeps_its_reward_or_nothing_is_trained(config):
    lone = "batch.episodes=1"
    assert refused(config, lone, "credit.estimator={type: default, singleton: error}")[0].startswith("batch.episodes")
    grpo = [lone, "credit.estimator={type: grpo}", "credit.filter=null"]
    one_of_two = refused(config, *grpo, "credit.per_agent={writer: {type: default}}")
    assert [line.partition(" compares")[0] for line in one_of_two] == [
        "batch.episodes is 1, but the estimator of agent 'writer'"
    ]
    load_run(config, grpo)
    load_run(config, [lone, "policies.one.trainable=false", "policies.two.trainable=false"])


def lone_episodes(config, kind, *overrides):
    """What is said where a task has one episode; `kind` is of both agents' estimators."""
    estimator: Any = TypeAdapter(AnyEstimator).validate_python({"type": kind})
    tree = "team.workflow={type: turns, turn: any, candidates: 4}"
    critics = [f"policies.{name}.training.critic={{}}" for name in ("one", "two") if "values" in estimator.uses]
    by_step = ["credit.invalid_action=null"] if kind == "max_rl" else []
    forks = ["team.workflow={type: custom, name: any}"] if estimator.needs_branches else []
    assert tree not in forks
    try:
        given = [f"credit.estimator={{type: {kind}}}", "batch.episodes=1", *critics, *by_step, *forks, *overrides]
        load_run(config, given)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ESTIMATORS.built_in)
def test_one_episode_of_a_task_is_refused_wherever_the_filter_would_drop_every_task(config, kind):
    estimator: Any = TypeAdapter(AnyEstimator).validate_python({"type": kind})
    said, unfiltered = lone_episodes(config, kind), lone_episodes(config, kind, "credit.filter=null")
    trains = estimator.learns_from_equal_rewards or estimator.needs_branches
    assert bool(said) != trains, said
    if said:
        assert "batch.episodes is 1, " in said
        assert "agent 'solver'" in said
    keeps_its_reward = getattr(estimator, "singleton", "raw") == "raw"
    assert bool(unfiltered) != (trains or keeps_its_reward), unfiltered


def test_a_policy_that_is_not_trained_needs_no_critic(config):
    trained = ["credit.estimator={type: gae}", "policies.one.training.critic={}"]
    assert refused(config, *trained)[0].startswith("credit compares agent 'writer' with a critic's values")
    load_run(config, [*trained, "policies.two.trainable=false"])
    load_run(config, [*trained[1:], "credit.per_agent={solver: {type: gae}}"])


def test_the_agents_that_a_term_looks_at_are_of_the_team_too(config):
    assert refused(config, "credit.shaping=[{type: learnability, agents: [writer], solvers: [nobody]}]") == [
        "credit.shaping[0] is for agent 'nobody'; the team has: solver, writer"
    ]
