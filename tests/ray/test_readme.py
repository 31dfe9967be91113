"""Every command of the README that is not make's, and its script, are run, in their order."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, commands

pytestmark = pytest.mark.ray

RUNNER = """
import json, os, shutil, signal, socket, sys, threading, time
from pathlib import Path
from flexmarl.cli import main

def interrupt_once_it_serves(port):
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)

for words in json.load(sys.stdin):
    runs = sorted(map(str, Path("runs").glob("math_team-*")))
    for name, run in zip(("runs/OTHER", "runs/RUN"), runs):
        words = [word.replace(name, run) for word in words]
    sys.argv = ["flexmarl", *words]
    print("$", *words, flush=True)
    if words[0] == "serve":
        port = int(words[words.index("--port") + 1])
        threading.Thread(target=interrupt_once_it_serves, args=[port], daemon=True).start()
    try:
        main()
    except SystemExit as end:
        missing = 2 if words[0] == "sandbox" and not shutil.which("bwrap") else None
        interrupted = 130 if words[0] == "serve" else None
        assert end.code in (0, None, missing, interrupted), (words, end.code)
"""
"""Runs commands one after the other. RUN is the run that was begun last, and OTHER the one before it.

Without bubblewrap, the commands that need it are refused. `serve` is interrupted as soon as it answers."""
SMALLER = {
    "examples/math_team/cpu.yaml": [
        *("steps=1", "batch.groups=4", "cluster={backend: inline, threads: 1}"),
        *("evaluate={tasks: 8, every: 1, every_tasks: 8}", "checkpoint={every: 1, best: {metric: success}}"),
    ],
    "runs/RUN/config.yaml": ["steps=2"],
}
"""Overrides after a command that names such a config."""


@pytest.fixture
def clone(tmp_path: Path, short_root: Path) -> Path:
    """The working directory of one who has cloned the repository, with a temp folder of its own."""
    ignored = shutil.ignore_patterns("__pycache__", "runs")
    shutil.copytree(ROOT / "examples" / "math_team", tmp_path / "examples" / "math_team", ignore=ignored)
    return tmp_path


def run(script: str, given: str, clone: Path, temp: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temp)}
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, cwd=clone, env=environment, input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_command_of_the_readme_runs(clone: Path, short_root: Path) -> None:
    every = [shlex.split(command) for command in commands("README.md")]
    assert {words[0] for words in every} == {"make", "flexmarl"}
    assert [words[1:] for words in every if words[0] == "make"] == [["quickstart"], ["test"]]  # .ci/run runs these.
    ours = [words[1:] for words in every if words[0] == "flexmarl"]
    begun = next(words for words in ours if words[0] == "train")
    (place,) = (place for place, words in enumerate(ours) if words is begun)
    smaller = [
        words + (SMALLER.get(next((w for w in words if w in SMALLER), ""), []) if words[0] == "train" else [])
        for words in [*ours[:place], begun, *ours[place:]]
    ]
    said = run(RUNNER, json.dumps(smaller), clone, short_root)
    assert said.count("\n$ ") + 1 == len(ours) + 1
    assert (clone / "my_team" / "run.yaml").is_file()
    assert sorted(path.name for path in (clone / "models").iterdir()) == ["solver", "verifier"]


def test_the_script_of_the_readme_runs(clone: Path, short_root: Path) -> None:
    (block,) = (block for block in blocks("README.md", "python") if block.notes)
    show = "\nprint(len(said), evaluation.episodes, sorted(folder.name for folder in folders))"
    *_, shown = run(block.text + show, "", clone, short_root).splitlines()
    assert shown.endswith("16 ['solver', 'verifier']")
    assert int(shown.split()[0]) >= 2 * 4 * 8, "an episode has a turn of the solver at least"
