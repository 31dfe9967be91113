"""Configs from files and overrides, and what is said about wrong ones."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.config import load_run, parse_override
from flexmarl.config.load import read_yaml
from flexmarl.errors import ConfigError
from tests.unit.config.configs import MINIMAL, refused, write


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


def test_a_config_that_was_written_keeps_the_correction_that_its_run_had(config, tmp_path):
    settings = load_run(config, ["mode=async", "policies.one.training.correction={type: none}"])
    written = write(tmp_path / "written.yaml", yaml.safe_dump(settings.model_dump(mode="json")))
    assert load_run(written) == settings


def test_an_override_below_a_policy_or_agent_that_is_not_there_names_those_that_are(config):
    (policy,) = refused(config, "policies.on.training.micro_batch=4")
    assert "there is no policy on; there are: one, two; a new one is given whole, policies.on={...}" in policy
    (agent,) = refused(config, "team.agents.sover.sampling.max_tokens=4")
    assert "there is no agent sover; there are: solver, writer" in agent


def test_a_policy_or_agent_can_be_added_by_an_override_that_gives_it_whole(config):
    added = ["policies.three={model: model}", "policies.three.trainable=false", "team.agents.judge={policy: three}"]
    settings = load_run(config, [*added, "team.agents.judge.sampling.max_tokens=4"])
    assert (settings.policies["three"].trainable, settings.team.agents["judge"].policy) == (False, "three")


def test_policies_can_be_given_by_overrides_alone(config, tmp_path):
    bare = write(tmp_path / "bare.yaml", MINIMAL.replace("policies:", "tasks_of:").partition("tasks_of:")[0])
    given = [
        "policies.one.model=m",
        "team.agents.solver.policy=one",
        "team.workflow={type: sequential, agents: [solver]}",
    ]
    assert set(load_run(bare, given).policies) == {"one"}
