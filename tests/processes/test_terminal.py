"""A run outlives its terminal; what models and tasks say does not steer one."""

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flexmarl.assemble.commands import assemble_run
from flexmarl.assemble.ending import Supervisor
from flexmarl.cli.terminal import READER_CLOSED
from flexmarl.config import load_run
from flexmarl.events.journal import read_journal
from flexmarl.events.notices import Starting
from tests.commands import run_commands

FLEXMARL = (sys.executable, "-c", "from flexmarl.cli import main; main()")
CHATTY = '''
import sys
from flexmarl.agents import workflow


@workflow("chatty")
async def chatty(task, team):
    """Prints, as workflows of users do, and reports what would steer a terminal."""
    for seat in team:
        print("playing", task.prompt, flush=True)
        print("playing", task.prompt, file=sys.stderr, flush=True)
        (await seat.act(task.prompt)).reward(1.0)
    team.report(**{"\\x1b[2J\\u202esuccess": 1.0})
'''


@pytest.fixture
def chatty(small_run: Path, tmp_path: Path) -> list[str]:
    """Overrides of a run that says much."""
    (tmp_path / "chatty.py").write_text(CHATTY, encoding="utf-8")
    code = f"code=[{small_run.parent / 'tasks.py'}, {tmp_path / 'chatty.py'}]"
    return [code, "team.workflow={type: custom, name: chatty}", "credit.filter=null"]


def summary_of(folder: Path) -> dict[str, object]:
    (written,) = folder.glob("runs/*/summary.json")
    return json.loads(written.read_text())


def test_a_run_whose_reader_has_gone_goes_on_to_its_end(small_run, chatty, tmp_path):
    read, write = os.pipe()
    os.close(read)
    words = [*FLEXMARL, "train", str(small_run), *chatty]
    done = subprocess.run(words, cwd=tmp_path, stdout=write, stderr=write, check=False)
    os.close(write)
    assert done.returncode == 0
    assert summary_of(tmp_path)["steps"] == 2


def test_a_run_without_any_stdout_writes_into_no_file_of_its_own(small_run, chatty, tmp_path):
    command = 'exec "$@" <&- >&- 2>&-'
    words = ["sh", "-c", command, "sh", *FLEXMARL, "train", str(small_run), *chatty]
    assert subprocess.run(words, cwd=tmp_path, check=False).returncode == 0
    (folder,) = tmp_path.glob("runs/*")
    assert summary_of(tmp_path)["steps"] == 2
    assert sum(1 for _ in read_journal(folder / "journal.jsonl")) > 0
    assert not any(b"playing" in file.read_bytes() for file in folder.glob("*.jsonl"))


def test_a_run_whose_terminal_is_closed_goes_on_and_can_still_be_stopped(small_run, tmp_path):
    words = [*FLEXMARL, "train", str(small_run), "steps=100000", "evaluate.tasks=0"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("step "))
        process.send_signal(signal.SIGHUP)
        for _ in range(2):
            next(line for line in process.stdout if line.startswith("step "))
        process.stdout.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 130
    finally:
        process.kill()
        process.wait()


def test_other_commands_end_when_their_reader_has_gone_with_a_code_of_its_own(small_run, tmp_path):
    read, write = os.pipe()
    os.close(read)
    for words in (["check", str(small_run)], ["clean", "--dry-run"]):
        done = subprocess.run([*FLEXMARL, *words], cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr) == (READER_CLOSED, b""), words
    wrong = [*FLEXMARL, "check", str(small_run), "steps=-1"]
    assert subprocess.run(wrong, stdout=write, stderr=subprocess.PIPE, check=False).returncode == 2
    os.close(write)


def test_no_command_lets_a_text_steer_the_terminal_and_json_is_strict(small_run, chatty, tmp_path):
    def said(*commands: tuple[str, ...], codes: tuple[int, ...]) -> list[bytes]:
        ended = run_commands(*commands, cwd=tmp_path)
        assert tuple(one.returncode for one in ended) == codes, ended
        for one in ended:
            assert b"\x1b[2J" not in one.stdout + one.stderr
            assert "\u202e".encode() not in one.stdout + one.stderr
        return [one.stdout for one in ended]

    table, _, _ = said(
        ("train", str(small_run), *chatty),
        ("train", str(small_run), "name=\x1b[2J"),
        ("check", str(small_run), 'tasks.name="\\e[2J"'),
        codes=(0, 2, 2),
    )
    assert b"\\x1b[2J\\u202esuccess" in table
    (folder,) = map(str, tmp_path.glob("runs/*"))
    odd = "SELECT x'ff' AS a, 9e999 AS b, char(27) || '[2J' AS c, x'80' AS d"
    figures, figures_as_json, rows, rows_as_json, _ = said(
        ("eval", folder),
        ("eval", folder, "--json"),
        ("store", folder, odd),
        ("store", folder, odd, "--json"),
        ("store", folder, "SELECT char(27) || '[2J"),
        codes=(0, 0, 0, 0, 2),
    )
    assert b"\\x1b[2J" in figures
    assert figures_as_json.isascii()
    assert b"\\x1b[2J" in rows
    (row,) = json.loads(rows_as_json, parse_constant=pytest.fail)
    assert row == {"a": "x'ff'", "b": "inf", "c": "\x1b[2J", "d": "x'80'"}


def test_a_folder_whose_name_is_no_text_is_refused_in_words(small_run, tmp_path):
    odd = tmp_path / os.fsdecode(b"\xff")
    odd.mkdir()
    (odd / "run.yaml").write_text(small_run.read_text(encoding="utf-8"), encoding="utf-8")
    for done in run_commands(("check", small_run), ("train", small_run), ("train", "run.yaml"), cwd=odd):
        assert (done.returncode, b"is not UTF-8" in done.stderr) == (2, True), done.stderr
        assert b"Traceback" not in done.stderr


def test_a_terminal_shows_what_the_start_waits_for(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # Nothing moves on a dumb one.
    waits, screen = list[str](), StringIO()
    run = assemble_run(
        load_run(small_run, ["cluster.backend=inline", "steps=1", "evaluate.tasks=0", f"out={tmp_path}"])
    )
    supervisor = Supervisor({Starting: lambda starting: waits.append(starting.waits_for)})
    run.train(Console(file=screen, force_terminal=True, width=200), supervisor=supervisor)
    (loading,) = waits
    assert loading == "loading model: 1 engine, 1 trainer"
    assert loading in screen.getvalue()
