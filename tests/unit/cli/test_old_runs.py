"""A run folder of an older format is refused by every command that reads it, in one sentence, and left as it is."""

from pathlib import Path

import pytest
import yaml
from typer import Typer
from typer.testing import CliRunner

from flexmarl.analysis.summary import render_summary
from flexmarl.assemble.commands import assemble_run
from flexmarl.cli.runs import evaluate, export
from flexmarl.cli.simulate import simulate
from flexmarl.config import load_run
from flexmarl.errors import FlexmarlError
from flexmarl.events.journal import FORMAT
from flexmarl.events.run_folder import RunFolder
from flexmarl.simulator.workload import planned_task

STARTED = '{"t":0.0,"event":"run_started","seed":0}\n'
OLD = {1: STARTED, FORMAT - 1: f'{{"t":0.0,"event":"journal","format":{FORMAT - 1}}}\n{STARTED}'}
"""Journals by their format. Format 1 had no first line that says it."""
SETTINGS = {
    "name": "old",
    "tasks": {"type": "generator", "name": "multiplication"},
    "policies": {"solver": {"model": "none", "engine": {"type": "embedded", "slots": 4}}},
    "team": {
        "workflow": {"type": "sequential", "agents": ["solver"]},
        "agents": {"solver": {"policy": "solver", "system": "Answer.", "sampling": {"max_tokens": 8}}},
    },
    "batch": {"groups": 2, "episodes": 2},
}


@pytest.fixture(params=OLD)
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.config.write_text(yaml.safe_dump(SETTINGS))
    folder.journal.write_text(OLD[request.param])
    folder.metrics.write_text("")
    return folder


def invoke(command, *arguments: object) -> None:
    app = Typer()
    app.command()(command)
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if found.exception is not None:
        raise found.exception


COMMANDS = {
    "train --resume": lambda folder: assemble_run(load_run(folder.config), resume_from=folder.path),
    "eval": lambda folder: invoke(evaluate, folder.path),
    "export": lambda folder: invoke(export, folder.path, folder.path / "out"),
    "simulate --fit": lambda folder: invoke(simulate, "--fit", folder.path),
    "a recorded workload": lambda folder: planned_task(0, 0, "train", recorded=str(folder.path)),
    "the report": lambda folder: render_summary(folder.path),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_an_older_format_is_refused_and_left_as_it_is(folder: RunFolder, command: str) -> None:
    before = folder.journal.read_text()
    with pytest.raises(
        FlexmarlError, match=rf"journal\.jsonl is a journal of format [1{FORMAT - 1}], .* or begin a new run$"
    ):
        COMMANDS[command](folder)
    assert folder.journal.read_text() == before
