"""Every kind of mistake in a config is explained: the key, the value, and what works."""

import pytest

from tests.unit.config.configs import MINIMAL, refused


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("batch_groups=4", "batch_groups is not a setting (its value: 4); did you mean 'batch.groups'?"),
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
            "policies.one.engine.type must be one of 'embedded', 'openai', 'scripted', 'timed', 'vllm', and is "
            "missing in {'slots': 3}",
        ),
        ("cluster={backend: rai}", "cluster.backend must be 'inline', 'ray' or 'simulated', got 'rai'"),
        ("tasks=5", "tasks must be a mapping of settings with a type: 'generator', 'jsonl', 'huggingface', got 5"),
        ("tasks={type: jsonl}", "tasks.file is missing, and has no default"),
        ("tasks={type: jsonl, fle: x, file: y}", "tasks.fle is not a setting (its value: 'x'); did you mean 'file'?"),
        ("policies.one.modl=x", "policies.one.modl is not a setting (its value: 'x'); did you mean 'model'?"),
        (
            "policies.two={}",
            "policies.two.model is missing, and has no default (A Hugging Face folder (relative to "
            "the config), the name of a model on the hub, or a policy of another run: {run: runs/RUN, policy: solver}, "
            "whose weights are copied into the new run's folder)",
        ),
        (
            "team.agents.writer.parser=3",
            "team.agents.writer.parser must be a valid string, "
            "or must be a mapping of settings with a type: 'choice', got 3; put it in quotes",
        ),
        (
            "team.agents.writer.context=some",
            "team.agents.writer.context must be 'none' or 'full', got 'some'",
        ),
        (
            "team.agents.writer.context=2",
            "team.agents.writer.context must be a mapping of settings (compact, hide_results, last, tools), got 2",
        ),
        (
            "team.agents.writer.context.compact={limit_tokens: 900, kep: 1}",
            "team.agents.writer.context.compact.kep is not a setting (its value: 1); did you mean 'keep'?",
        ),
        (
            "team.agents.writer.context={compact: {limit_tokens: 1536}}",
            "team.agents.writer.context.compact.limit_tokens must be below 1536, got 1536: a reply, ask and a summary "
            "come behind so long a prompt, team.agents.writer.sampling.max_tokens is 256 and policies.two.engine."
            "max_len is 2048; lower it, or raise engine.max_len",
        ),
        (
            "team.agents.writer.memory=2",
            "team.agents.writer: `memory` is called `context` now; instead of memory: 2 write context: {last: 2}",
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
            "team.agents.solver.syntax={type: function, names: {find: search}}",
            "team.agents.solver.syntax.names: {'find': 'search'} has no word for the tool 'calculator'; add one, "
            "e.g. {calculator: calculator}",
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
    (line,) = refused(config, "rollout.max_token=3")
    assert line.startswith("rollout.max_token is not a setting (its value: 3)"), "a small number is no secret"


def test_long_values_are_shortened(config):
    (line,) = refused(config, f"seed={'x' * 1000}")
    assert len(line) < 250


def test_all_mistakes_are_told_at_once(config):
    assert len(refused(config, "batch.grups=4", "steps=x", "mode=fast", "team.agents.writer.policy=three")) == 3


def test_the_cross_checks_of_a_run_are_told_at_once(config):
    said = refused(config, "team.agents.writer.policy=three", "batch.episodes=1")
    assert said[0] == "team.agents.writer.policy 'three' is not one of the policies; there are: one, two"
    assert said[1].startswith("batch.episodes is 1")
