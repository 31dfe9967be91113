"""How much `train` prints: by --log-level, FLEXMARL_LOG and --quiet."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flexmarl.cli import app
from flexmarl.events.log import SURVIVED, EventLog, LogLevel
from flexmarl.events.run_events import CheckpointFailed, MonitorFailed, StepStarted, WorkerLost
from flexmarl.events.serving_events import InstanceLost
from flexmarl.records import InstanceId, WorkerId


def train(config: Path, *words: object, log: str | None = None) -> Result:
    arguments = ["train", str(config), "steps=1", "evaluate.tasks=0", *map(str, words)]
    result = CliRunner().invoke(app, arguments, env={"FLEXMARL_LOG": log, "TRANSFORMERS_VERBOSITY": None})
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(variable, "warning")  # Set back at the end, whatever a command sets.


def test_a_quiet_run_prints_its_folder_alone(small_run: Path, tmp_path: Path) -> None:
    for number, how in enumerate((["--quiet"], ["-q"], ["--log-level", "warning"], ["--log-level", "error"])):
        done = train(small_run, f"out={tmp_path / str(number)}", *how)
        (folder,) = (tmp_path / str(number)).iterdir()
        assert done.stdout == f"{folder}\n"
        assert done.stderr == ""


def test_the_environment_sets_the_level_and_the_command_line_wins(small_run: Path, tmp_path: Path) -> None:
    assert len(train(small_run, f"out={tmp_path / 'a'}", log="error").stdout.splitlines()) == 1
    shown = train(small_run, f"out={tmp_path / 'b'}", "--log-level", "info", log="error")
    assert "step 1/1" in shown.stdout


def test_debug_has_every_event_of_the_journal(small_run: Path, tmp_path: Path) -> None:
    done = train(small_run, f"out={tmp_path}", "--log-level", "debug")
    (folder,) = tmp_path.iterdir()
    lines = [line.removeprefix("flexmarl: debug: ") for line in done.stderr.splitlines() if "flexmarl: debug" in line]
    _, *journal = (folder / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [json.loads(line) for line in journal]


def test_an_unknown_level_is_answered_with_those_there_are(small_run: Path) -> None:
    refused = CliRunner().invoke(app, ["train", str(small_run)], env={"FLEXMARL_LOG": "loud"})
    assert refused.exit_code == 2
    assert all(name in refused.stderr for name in ("FLEXMARL_LOG", "'loud'", "error", "warning", "info", "debug"))


@pytest.mark.parametrize(
    ("level", "heard"),
    [("error", []), ("warning", ["checkpoint_failed", "monitor_failed"]), ("info", ["monitor_failed"])],
)
def test_what_a_run_survived_is_a_warning(level: str, heard: list[str]) -> None:
    lines: list[str] = []
    log = EventLog(LogLevel(level), lines.append)
    events = [CheckpointFailed(step=3, because="the disk is full"), MonitorFailed(because="no terminal")]
    for event in (*events, StepStarted(step=4, versions={})):
        log.hear(event)
    assert [line.split(", ")[1].split(":")[0] for line in lines] == heard
    assert {type(event) for event in events} <= set(SURVIVED)


def test_a_warning_of_a_loss_names_what_is_lost() -> None:
    lines: list[str] = []
    log = EventLog(LogLevel.WARNING, lines.append)
    log.hear(WorkerLost(process=WorkerId.parse("engine/one/0"), node="here", pid=7, because="it was killed"))
    log.hear(InstanceLost(instance=InstanceId.parse("one/0"), because="its process is gone"))
    assert [line.partition(" s, ")[2] for line in lines] == [
        "worker_lost: engine/one/0: it was killed",
        "instance_lost: one/0: its process is gone",
    ]
