"""Whatever a config or an override says, it is taken or refused by name, in bounded work."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flexmarl.config import load_run, parse_override
from flexmarl.config.load import MAX_NODES, parse_yaml, read_yaml
from flexmarl.errors import ConfigError
from tests.unit.config.configs import MINIMAL

ODD = (
    *(
        "true",
        "1.0",
        "'1'",
        "1e400",
        "-.inf",
        ".nan",
        "10000000000000000000000000",
        "9" * 5000,
        "2026-02-31",
        "~",
        "''",
    ),
    *("[]", "{}", "[[a]: b]", "{[a]: b}", "? [a]", "!!int x", "!!binary '%'", "!!set {a}", "!!python/name:os.system"),
    *(
        "*a",
        "&a [*a]",
        "<<: 1",
        "{<<: [1]}",
        "{<<: {a: 1}}",
        "=",
        "- -",
        "a: b: c",
        "\t",
        "%YAML 9.9",
        "--- ---",
        "...",
    ),
    *('"\\0"', '"\\ud800"', '"\\x1b[2J"', "\u202e", "\x1b[31m", "[" * 200, "{a: " * 200, "x" * 5000, "../" * 2000),
    *("12:30:45", "0o17", "0x1F", "yes", "!!float 1_0", "!!timestamp 1", "!!merge x", "!!omap [1]", "!!pairs [a]"),
)
KEYS = tuple(line.split("=")[0] for line in (
    "steps=", "seed=", "name=", "mode=", "batch=", "batch.groups=", "batch.episodes=", "tasks=", "tasks.type=",
    "tasks.params=", "policies=", "policies.one=", "policies.one.model=", "policies.one.engine.slots=",
    "policies.one.training.optimizer.learning_rate=", "team=", "team.agents=", "team.agents.solver.tools=",
    "team.agents.solver.tools.0=", "team.agents.solver.tools.0.max_digits=", "team.workflow=", "credit.estimator=",
    "credit.shaping=", "evaluate.tasks=", "out=", "base=", "code=", "extends=", "simulation=", "simulation.costs=",
    "rollout.episode_timeout_s=", "cluster.device=", "checkpoint.budget_gb=", "nowhere=", "team.agents.solver.tools.²=",
    ".".join("a" * 3000) + "=",
))  # fmt: skip
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_well(error: ConfigError, *names: str) -> None:
    """The text is there, no line of it is a novel, and it names where the fault is."""
    assert any(name in str(error) for name in names), error
    assert all(len(line) < 20_000 for line in str(error).splitlines())


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "run.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


@MANY
@given(key=st.sampled_from(KEYS), value=st.sampled_from(ODD) | st.text(max_size=12))
@example(key="seed", value="1" + "0" * 23)
@example(key="batch.groups", value="1000000000000")
def test_any_override_is_taken_or_refused_by_name(config, key, value):
    override = f"{key}={value}"
    try:
        load_run(config, [override])
    except ConfigError as error:
        refused_well(error, override[:40], key.split(".")[0], str(config))


@MANY
@given(st.data())
def test_a_config_that_was_damaged_anywhere_is_taken_or_refused_by_name(config, data):
    text, path = MINIMAL, config.with_name("damaged.yaml")
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        cut = data.draw(st.integers(0, 12))
        text = text[:start] + data.draw(st.sampled_from(ODD) | st.text(max_size=8)) + text[start + cut :]
    path.write_bytes(text.encode(errors="surrogatepass"))
    try:
        load_run(path)
    except ConfigError as error:
        refused_well(error, str(path), "damaged.yaml")


@MANY
@given(st.binary(max_size=200))
@example(b"\xff\xfe\x00")
@example(b"? - a\n: b")
def test_any_bytes_are_a_mapping_or_refused_by_name(config, content):
    path = config.with_name("bytes.yaml")
    path.write_bytes(content)
    try:
        assert isinstance(read_yaml(path), dict)
    except ConfigError as error:
        refused_well(error, str(path))


@MANY
@given(st.text())
def test_any_text_is_an_override_or_refused_by_its_text(text):
    try:
        keys, _ = parse_override(text)
        assert all(keys)
    except ConfigError as error:
        refused_well(error, text[:40])


def bomb(levels: int, wide: int = 10) -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * wide)}]" for i in range(1, levels + 1)]
    return "\n".join(lines)


def deep(chains: int, levels: int = 50) -> str:
    lines = ["a0: &a0 x"]
    lines += [f"a{i}: &a{i} {'[' * levels}*a{i - 1}{']' * levels}" for i in range(1, chains + 1)]
    return "\n".join(lines)


@pytest.mark.parametrize("text", [bomb(9), bomb(60, 2), bomb(3, 60), deep(40), f"a: {'x, ' * MAX_NODES}", "[" * 10**5])
def test_what_unfolds_without_end_is_refused_before_it_unfolds(text):
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text if text.startswith("[") else text.replace("a: x", "a: [x") + ("]" if "a: x" in text else ""))


def test_aliases_that_unfold_to_little_are_what_they_name_each_apart():
    value: Any = parse_yaml("a: &a {x: [1]}\nb: *a\nc: [*a, *a]")
    assert value == {"a": {"x": [1]}, "b": {"x": [1]}, "c": [{"x": [1]}, {"x": [1]}]}
    value["b"]["x"].append(2)
    assert value["a"] == value["c"][0] == value["c"][1] == {"x": [1]}


def test_files_that_extend_each_other_without_end_are_refused(tmp_path):
    (tmp_path / "f0.yaml").write_text(MINIMAL, encoding="utf-8")
    for i in range(1, 30):
        (tmp_path / f"f{i}.yaml").write_text(f"extends: [f{i - 1}.yaml, f{i - 1}.yaml]", encoding="utf-8")
    with pytest.raises(ConfigError, match="extends leads to more than 100 files"):
        load_run(tmp_path / "f29.yaml")
