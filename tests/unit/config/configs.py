"""A small config, and what is said about those that are refused."""

from pathlib import Path

import pytest

from flexmarl.config import load_run
from flexmarl.errors import ConfigError

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


def refused(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        load_run(path, overrides)
    return [line.removeprefix(f"{path}: ") for line in str(error.value).splitlines()]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
