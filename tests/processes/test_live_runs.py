"""Runs in processes of their own that are stopped, or that somebody else would go on with."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from flexmarl import cli
from flexmarl.events.journal import read_journal
from flexmarl.events.run_events import RunFailed


@contextmanager
def live_run(config: Path, folder: Path, *, background: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own that has saved something and goes on for ever.

    In the `background` it ignores Ctrl-C, as what a script starts with `&` does.
    """
    words = [sys.executable, "-u", "-c", "from flexmarl.cli import main; main()", "train", str(config), "steps=100000"]
    begin = partial(signal.signal, signal.SIGINT, signal.SIG_IGN) if background else None
    process = subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=begin
    )
    try:
        assert process.stdout is not None
        saved = "runs/*/checkpoints/step-*/MANIFEST.json"
        next(line for line in process.stdout if list(folder.glob(saved)))  # It says something at every step.
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ending", "background"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_ctrl_c_and_sigterm_name_the_checkpoint_and_how_to_go_on(small_run: Path, tmp_path, ending, background):
    with live_run(small_run, tmp_path, background=background) as process:
        process.send_signal(ending)
        _, errors = process.communicate()
    assert process.returncode == 130
    (line,) = errors.splitlines()
    assert "flexmarl: stopped. Last good checkpoint: runs/sums-" in line
    assert "continue with: flexmarl train runs/sums-" in line
    (journal,) = tmp_path.glob("runs/*/journal.jsonl")
    assert sum(isinstance(event, RunFailed) for event in read_journal(journal)) == 1


def test_a_live_run_is_not_resumed_and_not_touched(small_run: Path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with live_run(small_run, tmp_path) as process:
        (folder,) = tmp_path.glob("runs/*")
        monkeypatch.setattr(sys, "argv", ["flexmarl", "train", f"{folder}/config.yaml", "--resume", str(folder)])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        assert stopped.value.code == 1
        assert process.poll() is None, "it still runs"
    assert str(process.pid) in capsys.readouterr().err
    told = [event.name for event in read_journal(folder / "journal.jsonl")]
    assert told.count("run_started") == 1
    assert not {"run_failed", "store_rewound", "checkpoint_removed"} & set(told)
