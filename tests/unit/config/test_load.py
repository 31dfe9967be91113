"""Configs from files and overrides, and what is said about wrong ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from flexmarl.config import RunSettings, cautions, load_run, parse_override
from flexmarl.config.load import read_yaml
from flexmarl.credit.estimators import ESTIMATORS, AnyEstimator
from flexmarl.errors import ConfigError

SOLVERS = "credit.shaping=[{type: potential, agents: [solver]}]"
MINIMAL = """
tasks: {type: generator, name: sums}
policies:
  one: &policy {model: model, engine: {type: embedded, slots: 4}}
  two: *policy
team:
  workflow: {type: sequential, agents: [solver, writer]}
  agents:
    solver: {policy: one, tools: [{type: calculator}], syntax: {type: function}}
    writer: {policy: two}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_run(path, overrides)
    return [line.removeprefix(f"{path}: ") for line in str(error.value).splitlines()]


def test_overrides_reach_sections_that_the_file_leaves_out_or_empty(config):
    config.write_text(f"{MINIMAL}\nbatch:\n", encoding="utf-8")
    settings = load_run(config, ["batch.groups=8", "policies.one.training.optimizer.learning_rate=3e-4"])
    assert settings.batch.groups == 8
    assert settings.policies["one"].training.optimizer.learning_rate == 3e-4


def test_what_an_anchor_shares_is_overridden_apart(config):
    settings = load_run(config, ["policies.one.engine.slots=9"])
    assert (settings.policies["one"].engine.slots, settings.policies["two"].engine.slots) == (9, 4)


def test_an_override_reaches_into_a_list(config):
    settings = load_run(config, ["team.agents.solver.tools.0.max_digits=7"])
    assert settings.team.agents["solver"].tools[0].max_digits == 7  # type: ignore[attr-defined]


def test_relative_paths_start_from_the_config(config, monkeypatch):
    monkeypatch.chdir(config.parent.parent)
    settings = load_run(Path(config.parent.name) / config.name)
    assert settings.path("model") == config.parent / "model"
    assert settings.path("/elsewhere") == Path("/elsewhere")


def test_a_tilde_is_the_home_folder(config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    settings = load_run(config, ["out=~/runs"])
    assert settings.out == tmp_path / "home" / "runs"
    assert settings.path("~/model") == tmp_path / "home" / "model"


def test_a_written_config_loads_back_to_the_same_settings(config, tmp_path):
    settings = load_run(config, ["policies.one.training.optimizer.eps=1e-30", "credit.filter=null", "mode=sync"])
    written = tmp_path / "elsewhere" / "config.yaml"
    written.parent.mkdir()
    written.write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    assert load_run(written) == settings


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text("abc xyz", max_size=5), st.lists, max_leaves=5))
def test_an_override_means_what_its_yaml_means(value):
    keys, parsed = parse_override(f"a.b-c={yaml.safe_dump(value, default_flow_style=True)}")
    assert (keys, parsed) == (["a", "b-c"], value)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("-2E5", -2e5), ("", ""), ("a=b", "a=b"), ("'1e-3'", "1e-3"), ("1e3", 1000.0)]
)
def test_numbers_and_signs_in_overrides(text, value):
    assert parse_override(f"key={text}") == (["key"], value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("groups", "must look like key.subkey=value"),
        ("=3", "must look like key.subkey=value"),
        ("a..b=3", "must look like key.subkey=value"),
        ("a=[1,", "the value '[1,' is not YAML"),
        ("a={b: 1, b: 2}", "the key 'b' is given twice"),
    ],
)
def test_an_override_that_cannot_be_read_is_shown(text, words):
    with pytest.raises(ConfigError, match=r"^override ") as error:
        parse_override(text)
    assert text in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not YAML: expected ',' or ']', but got '<stream end>' (line 1, column 6)"),
        ("a: {b: 1}\nc: 2\na: 3", "the key 'a' is given twice (line 3, column 1)"),
        ("- a\n- b", "must hold a mapping of settings, got list"),
        ("", "must hold a mapping of settings, got NoneType"),
        ("a: &a [*a]", "the YAML anchor 'a' contains itself; write it out (line 1, column 8)"),
        ("[a, b]: 1", "a key must be a text, got a list; put a text that begins with a bracket into quotes (line 1"),
        ("{{a: 1}: 2}", "a key must be a text, got a mapping"),
        (f"a: {'[' * 3000}{']' * 3000}", "more than 64 levels of nesting"),
        (f"a: {'9' * 5000}", "a value that cannot be read: Exceeds the limit (4300 digits)"),
        ("a: 2026-13-45", "a value that cannot be read: month must be in 1..12 (line 1, column 4)"),
        ('a: "\\ud800"', "NUL and lone surrogates are no characters (line 1, column 4)"),
        ('a: "\\0"', "NUL and lone surrogates are no characters (line 1, column 4)"),
        ("a: !!python/object:os.system {}", "is not YAML"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path, text, words):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert str(error.value).startswith(str(path))
    assert words in str(error.value)


def test_merge_keys_and_their_exceptions_are_no_duplicates(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", encoding="utf-8")
    assert read_yaml(path)["b"] == {"x": 1, "y": 3}


def test_a_file_that_is_no_text_or_not_there_is_named(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "run.yaml", tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match=str(path)):
            read_yaml(path)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("batch.grups=4", "batch.grups is not a setting (its value: 4); did you mean 'groups'?"),
        ("batch.zzz=4", "batch.zzz is not a setting (its value: 4); known here: episodes, groups"),
        ("batch.groups=0", "batch.groups must be greater than or equal to 1, got 0"),
        ("batch.groups=2.5", "batch.groups must be a valid integer, got a number with a fractional part, got 2.5"),
        ("batch=3", "batch must be a mapping of settings (episodes, groups), got 3"),
        (
            "mode=fast",
            "mode must be 'sync', 'microbatch', 'colocated', 'one_step_off', 'async', 'fifo' or 'greedy', got 'fast'",
        ),
        ("name=yes", "name must be a valid string, got True; put it in quotes"),
        ("name=a b", "name must match ^[A-Za-z0-9._-]+$ (Names the run folder), got 'a b'"),
        (
            "policies.one.engine={slots: 3}",
            "policies.one.engine.type must be one of 'embedded', and is missing in {'slots': 3}",
        ),
        ("cluster={backend: rai}", "cluster.backend must be 'inline', 'ray' or 'simulated', got 'rai'"),
        ("tasks=5", "tasks must be a mapping of settings with a type: 'generator', 'jsonl', 'huggingface', got 5"),
        ("tasks={type: jsonl}", "tasks.file is missing, and has no default"),
        ("tasks={type: jsonl, fle: x, file: y}", "tasks.fle is not a setting (its value: 'x'); did you mean 'file'?"),
        ("policies.one.modl=x", "policies.one.modl is not a setting (its value: 'x'); did you mean 'model'?"),
        (
            "policies.two={}",
            "policies.two.model is missing, and has no default (A Hugging Face folder (relative to "
            "the config) or the name of a model on the hub)",
        ),
        (
            "team.agents.writer.parser=3",
            "team.agents.writer.parser must be a valid string, "
            "or must be a mapping of settings with a type: 'choice', got 3; put it in quotes",
        ),
        (
            "team.agents.writer.memory=some",
            "team.agents.writer.memory must be 'none' or 'full', or must be a valid integer, got 'some'",
        ),
        (
            "credit.estimator={type: grpo, key: 3}",
            "credit.estimator.key must be a valid tuple, or must be a valid dictionary, got 3",
        ),
        (
            "credit.estimator={type: hierarchical, episode_roles: 5}",
            "credit.estimator.episode_roles must be a valid tuple, got 5",
        ),
        (
            "credit.estimator={type: hierarchical, episode_roles: [[solver]]}",
            "credit.estimator.episode_roles.0 must be a valid string, got ['solver']",
        ),
        (
            "credit.filter.reward_range=[1, 0]",
            "credit.filter.reward_range: 1.0 is not below 0.0; give the worst reward, then the best",
        ),
        (
            "team.agents.writer.sampling.stop=['']",
            "team.agents.writer.sampling.stop: '' would end every message at once; leave it out",
        ),
        (
            "team.agents.solver.syntax=null",
            "team.agents.solver.syntax: an agent with tools (calculator) needs one; use type: function or tag",
        ),
        ("seed=-1", "seed must be greater than or equal to 0, got -1"),
    ],
)
def test_every_kind_of_mistake_is_explained(config, override, line):
    assert refused(config, override) == [line]


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("credit.estimator={type: grpo, std_floor: .inf}", "credit.estimator.std_floor"),
        ("credit.estimator={type: gdpo, weights: {style: .inf}}", "credit.estimator.weights.style"),
        ("credit.shaping=[{type: margin, alpha: .inf}]", "credit.shaping.0.alpha"),
        ("credit.filter.tol=.inf", "credit.filter.tol"),
        ("credit.invalid_action.penalty=.inf", "credit.invalid_action.penalty"),
    ],
)
def test_credit_calculates_with_finite_numbers(config, override, key):
    assert refused(config, override) == [f"{key} must be a finite number, got inf"]
    assert refused(config, override.replace(".inf", ".nan")) == [f"{key} must be a finite number, got nan"]


def test_the_alternatives_of_a_union_are_told_one_by_one_where_they_differ(config):
    said = refused(config, "credit.estimator={type: grpo, key: {a: 3}}")
    assert said == [
        "credit.estimator.key must be a valid tuple, got {'a': 3}",
        "credit.estimator.key.a must be a valid tuple, got 3",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed.x=1", "'seed' is the value 2, which has no keys"),
        ("code.7=x", "'code' is a list of 1; it has no '7'"),
        ("code.last=x", "'code' is a list of 1; it has no 'last'"),
    ],
)
def test_an_override_into_what_is_no_section_is_refused(config, override, words):
    config.write_text(f"{MINIMAL}\nseed: 2\ncode: [a.py]\n", encoding="utf-8")
    assert refused(config, override) == [f"override '{override}': {words}"]


def test_secrets_are_not_printed(config):
    said = refused(config, "api_key=abc123", "batch={groups: x, token: abc123}", "seed=hf_abcdefgh123")
    assert len(said) == 4
    assert not any("abc123" in line or "hf_abc" in line for line in said)
    assert any(line.startswith("api_key is not a setting (its value: ***)") for line in said)


def test_long_values_are_shortened(config):
    (line,) = refused(config, f"seed={'x' * 1000}")
    assert len(line) < 250


def test_all_mistakes_are_told_at_once(config):
    assert len(refused(config, "batch.grups=4", "steps=x", "mode=fast", "team.agents.writer.policy=three")) == 3


def test_the_cross_checks_of_a_run_are_told_at_once(config):
    said = refused(config, "team.agents.writer.policy=three", "batch.episodes=1")
    assert said[0] == "team.agents.writer.policy 'three' is not one of the policies; there are: one, two"
    assert said[1].startswith("batch.episodes is 1")


def test_a_frozen_policy_may_be_served_in_any_type(config):
    mixed = ["policies.two.engine.dtype=bfloat16"]
    assert refused(config, *mixed)[0].startswith("policies.two.engine.dtype is 'bfloat16', but training.dtype")
    assert load_run(config, [*mixed, "policies.two.trainable=false"]).trained == {"one"}


def test_one_episode_is_enough_for_an_estimator_that_keeps_lone_rewards(config):
    settings = load_run(config, ["batch.episodes=1", "credit.estimator={type: grpo}", "credit.filter=null"])
    assert isinstance(settings, RunSettings)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_config_stands_on_top_of_those_that_it_extends(config, tmp_path):
    write(tmp_path / "pace.yaml", "batch: {groups: 4, episodes: 2}\nmode: sync\n")
    both = write(tmp_path / "both.yaml", "extends: [run.yaml, pace.yaml]\nbatch: {groups: 3}\n")
    settings = load_run(both, ["seed=5"])
    assert (settings.batch.groups, settings.batch.episodes, settings.mode, settings.seed) == (3, 2, "sync", 5)
    assert set(settings.policies) == {"one", "two"}


def test_a_section_of_another_type_takes_the_place_of_the_one_below(config, tmp_path):
    write(tmp_path / "below.yaml", "extends: run.yaml\ncredit: {estimator: {type: grpo, singleton: raw}}\n")
    above = write(tmp_path / "above.yaml", "extends: below.yaml\ncredit: {estimator: {type: drmas}}\n")
    assert load_run(above).credit.estimator.type == "drmas"  # type: ignore[attr-defined]


def test_what_is_extended_must_be_there_and_must_not_lead_back(config, tmp_path):
    lost = write(tmp_path / "lost.yaml", "extends: nowhere.yaml")
    with pytest.raises(ConfigError, match=r"nowhere\.yaml' does not exist"):
        load_run(lost)
    write(tmp_path / "a.yaml", "extends: b.yaml")
    circle = write(tmp_path / "b.yaml", "extends: a.yaml")
    with pytest.raises(ConfigError, match="extends leads back to itself"):
        load_run(circle)
    with pytest.raises(ConfigError, match="extends must be a YAML file or a list of them, got 3"):
        load_run(write(tmp_path / "three.yaml", "extends: 3"))


def test_what_only_simulated_devices_can_do_is_refused_elsewhere(config):
    assert refused(config, "balance.rule=queue_gap") == [
        "balance.rule is 'queue_gap', but only simulated instances can be moved to another policy so far; "
        "use cluster.backend=simulated, or balance.rule=none"
    ]
    assert refused(config, "process_groups.at_once=1") == [
        "process_groups.at_once is 1, but only simulated trainers can leave their devices so far; "
        "use cluster.backend=simulated, or process_groups.at_once=null"
    ]


def test_rows_are_ready_alone_only_if_nothing_compares_them(config):
    assert refused(config, "credit.ready=trajectory", "credit.filter=null") == [
        "credit.ready is 'trajectory', but credit.estimator compares the rows of a group; use credit.estimator.type="
        "reinforce without terms that compare episodes, whitening or balance, or credit.ready=group"
    ]
    alone = "estimator: {type: reinforce}, filter: null, ready: trajectory"
    for also, where in {
        "per_agent: {writer: {type: rloo}}": "per_agent.writer",
        "shaping: [{type: binary}, {type: completion_time}]": "shaping[1]",
        "whiten: policy": "whiten",
        "agent_balance: equal, whiten: agent": "whiten, credit.agent_balance",
    }.items():
        (line,) = refused(config, f"credit={{{alone}, {also}}}")
        assert line.startswith(f"credit.ready is 'trajectory', but credit.{where} compares the rows of a ")


def test_a_deterministic_run_is_on_policy(config):
    assert refused(config, "deterministic=true", "mode=async") == [
        "deterministic is true, but mode is 'async', in which the rows of a batch depend on time; "
        "use mode=microbatch, or deterministic=false"
    ]


def test_what_takes_whole_groups_needs_whole_groups(config):
    alone = ["credit={estimator: {type: reinforce}, filter: null, ready: trajectory}"]
    assert refused(config, "mode=greedy", *alone) == [
        "credit.ready is 'trajectory', but mode 'greedy' takes whole groups; use credit.ready=group"
    ]
    assert refused(config, "pipeline.updates=per_policy") == [
        "pipeline.updates is 'per_policy', but in mode 'microbatch' all policies end a step together; use mode=async, "
        "or pipeline.updates=together"
    ]


def test_what_depends_on_time_is_no_part_of_a_deterministic_run(config):
    alone = ["credit={estimator: {type: reinforce}, filter: null, ready: trajectory}"]
    assert refused(config, "deterministic=true", *alone) == [
        "deterministic is true, but credit.ready is 'trajectory', and which trajectory ends first depends on time; "
        "use credit.ready=group, or deterministic=false"
    ]


def test_rollout_is_ahead_only_where_it_would_wait(config):
    assert refused(config, "mode=async", "pipeline.ahead=true") == [
        "pipeline.ahead is true, but in mode 'async' rollout does not wait for updates, or engines sleep "
        "during training; use mode=microbatch, or pipeline.ahead=false"
    ]


def test_costs_are_those_of_a_policy_or_of_the_rest(config):
    assert refused(config, "simulation.costs={onee: {}, default: {}, two: {}}") == [
        "simulation.costs.onee is for none of the policies; there are: one, two, and default for the rest"
    ]


def test_what_whitens_or_balances_makes_credit_look_at_the_whole_step(config):
    whitened = ["mode=async", "pipeline.updates=per_policy", "credit.whiten=policy"]
    assert refused(config, *whitened) == [
        "pipeline.updates is 'per_policy', but credit compares a whole batch; use pipeline.updates=together"
    ]


def test_a_critic_is_there_exactly_where_credit_looks_at_values(config):
    problems = refused(config, "credit.estimator={type: gae}")
    assert problems[0] == (
        "credit compares agent 'solver' with a critic's values, but policies.one.training.critic is null; "
        "use policies.one.training.critic={}, or another estimator"
    )
    assert refused(config, "policies.one.training.critic={}") == [
        "policies.one.training.critic is set, but no estimator of its agents reads values; use critic=null, or "
        "credit.estimator.type=gae"
    ]


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


@pytest.mark.parametrize("mode", ["sync", "microbatch", "colocated", "one_step_off", "async", "fifo", "greedy"])
def test_what_older_versions_sampled_is_corrected_unless_it_is_said_otherwise(config, mode):
    def chosen(*overrides):
        policies = load_run(config, [f"mode={mode}", *overrides]).policies
        return [policies[name].training.correction.model_dump() for name in ("one", "two")]

    capped = {"type": "tis", "low": 0.0, "cap": 2.0, "veto": None, "batch_normalise": False}
    none, on_policy = {"type": "none"}, mode in ("sync", "microbatch", "colocated")
    assert chosen() == [none if on_policy else capped] * 2
    assert chosen("policies.one.training.correction={type: none}") == [none, none if on_policy else capped]
    assert chosen("policies.one.training.correction={type: icepop}")[0]["type"] == "icepop"
    assert chosen("policies.two.trainable=false")[1] == none


def test_a_config_that_was_written_keeps_the_correction_that_its_run_had(config, tmp_path):
    settings = load_run(config, ["mode=async", "policies.one.training.correction={type: none}"])
    written = write(tmp_path / "written.yaml", yaml.safe_dump(settings.model_dump(mode="json")))
    assert load_run(written) == settings


def keys_of(config, *overrides):
    return [caution.key for caution in cautions(load_run(config, overrides))]


def test_what_is_allowed_and_has_a_price_is_said_and_nothing_else(config):
    assert keys_of(config) == keys_of(config, "mode=async") == []
    warm = "team.agents.solver.sampling.temperature=0.7"
    assert keys_of(config, warm) == ["team.agents.solver.sampling"]
    assert keys_of(config, "team.agents.writer.sampling={top_k: 5, top_p: 0.9}") == ["team.agents.writer.sampling"]
    (caution,) = cautions(load_run(config, [warm]))
    assert str(caution).startswith("team.agents.solver.sampling: temperature 0.7, but the loss takes log-probabilities")
    assert str(caution).endswith("or policies.one.training.correction={type: tis}")
    assert keys_of(config, warm, "policies.one.training.correction={type: tis}") == []
    assert keys_of(config, warm, "policies.one.trainable=false") == []
    uncorrected = [f"policies.{name}.training.correction={{type: none}}" for name in ("one", "two")]
    assert keys_of(config, "mode=greedy", *uncorrected) == [
        *("policies.one.training.correction", "policies.two.training.correction")
    ]
    tree = "team.workflow={type: turns, turn: any, candidates: 4}"
    by_depth = "credit.shaping=[{type: turn_discount, max_turns: 3, gamma: 0.5}]"
    assert keys_of(config, by_depth) == []
    (caution,) = cautions(load_run(config, [tree, by_depth]))
    assert caution.key == "credit.shaping[0]"
    assert "the first one counts 0.25 times the last" in caution.price
    for kind in ("turn_weighted", "shaped"):
        assert keys_of(config, tree, f"credit.shaping=[{{type: {kind}}}]") == ["credit.shaping[0]"]


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


def test_an_estimator_with_a_memory_needs_groups_in_an_order(config):
    assert refused(config, "mode=async", "credit.estimator={type: rae}") == [
        "credit.estimator keeps a state from episode to episode, in a fixed order, but mode 'async' takes groups as "
        "they finish; use mode=microbatch or mode=fifo, or an estimator without a state"
    ]


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


def test_rows_stream_only_where_their_gradients_are_a_line_of_their_credit(config):
    assert refused(config, "credit.streaming=linear", "mode=sync") == [
        "credit.streaming is 'linear', but in mode 'sync' rows wait for more than their group, or are not on-policy; "
        "use mode=microbatch, or credit.streaming=off"
    ]
    assert refused(config, "credit.streaming=linear", "policies.one.training.entropy_coef=0.1") == [
        "credit.streaming is 'linear', but policies.one.training.entropy_coef adds a term that no advantage "
        "multiplies; leave it out; or credit.streaming=off"
    ]
    assert "which needs deterministic=false" in refused(config, "credit.streaming=linear", "deterministic=true")[0]


def test_groups_are_replaced_where_a_step_waits_for_them(config):
    assert refused(config, "credit.filter.refill=true", "mode=async") == [
        "credit.filter.refill is true, but mode 'async' admits another task for every dropped one anyway; "
        "use refill=false there"
    ]


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


@pytest.mark.parametrize("kind", ESTIMATORS)
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


def test_a_memory_has_no_order_in_a_greedy_run_either(config):
    assert "in a fixed order, but mode 'greedy'" in refused(config, "mode=greedy", "credit.estimator={type: rae}")[0]


def test_a_row_that_is_ready_alone_has_no_filter_and_does_not_stream(config):
    alone = ["credit.ready=trajectory", "credit.estimator={type: reinforce}"]
    assert refused(config, *alone) == [
        "credit.ready is 'trajectory', but credit.filter judges whole groups; use credit.filter=null, or "
        "credit.ready=group"
    ]
    streaming = ["credit.streaming=linear", "credit.ready=trajectory", "credit.filter=null"]
    assert any("and credit.ready=group" in line for line in refused(config, *streaming))
