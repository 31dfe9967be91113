"""The commands, where another user was there first: they refuse by name, and touch nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import everything_in

pytestmark = pytest.mark.slow

MAIN = "from flexmarl.cli import main; main()"
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
ROOT = f"flexmarl-{os.getuid()}"
RECORD = '{"run": "theirs", "paths": ["%s"], "processes": [[%d, %r]]}'


def flexmarl(*words: object, temp: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, whose temp folder is one where everyone may write."""
    environment = {**os.environ, "TMPDIR": str(temp)}
    command = [sys.executable, "-c", MAIN, *map(str, words)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_clean_and_train_refuse_what_another_user_put_in_the_place_of_our_folder(
    planted: str, stranger: Any, small_run: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    (precious / "k3x9q2").mkdir(parents=True)
    with subprocess.Popen(SLEEP) as process:
        record = RECORD % (precious, process.pid, psutil.Process(process.pid).create_time())
        (precious / "k3x9q2" / "leases.json").write_text(record)
        script = {
            "folder": 'mkdir -m 777 "$root"; mkdir "$root/k3x9q2"; printf "%s" "$record" > "$root/k3x9q2/leases.json"',
            "link": 'ln -s "$ours" "$root"',
        }
        stranger.does(script[planted], root=ROOT, record=record, ours=precious)
        before = everything_in(stranger.folder / ROOT), everything_in(precious)
        out = tmp_path / "out"
        for command in (("clean",), ("train", small_run, "cluster.backend=ray", f"out={out}")):
            said = flexmarl(*command, temp=stranger.folder, cwd=tmp_path)
            assert said.returncode == 2, said.stderr
            assert f"flexmarl: '{stranger.folder / ROOT}' " in said.stderr
            assert "65534" in said.stderr
            assert "Traceback" not in said.stderr
        assert (everything_in(stranger.folder / ROOT), everything_in(precious)) == before
        assert process.poll() is None
        (run,) = out.iterdir()
        again = ("train", run / "config.yaml", "--resume", run)
        resumed = flexmarl(*again, temp=stranger.folder, cwd=tmp_path)
        assert resumed.returncode == 2
        assert f"flexmarl: '{stranger.folder / ROOT}' " in resumed.stderr
        assert (everything_in(stranger.folder / ROOT), everything_in(precious)) == before
        process.kill()


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_resume_and_train_refuse_what_another_user_put_in_the_place_of_our_runs(
    planted: str, stranger: Any, small_run: Path, tmp_path: Path
) -> None:
    trained = flexmarl("train", small_run, "steps=1", f"out={tmp_path}/runs", temp=tmp_path, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    ours = Path(trained.stdout.splitlines()[-1])
    copy = tmp_path / "copy"
    shutil.copytree(ours.parent, copy)
    for path in (copy, *copy.rglob("*")):
        os.chown(path, 65534, 65534)
    if planted == "folder":
        shutil.move(copy, stranger.folder / "runs")
    else:
        stranger.does('ln -s "$ours" runs', ours=ours.parent)
    theirs = stranger.folder / "runs" / ours.name
    before = everything_in(stranger.folder), everything_in(ours.parent)
    for words in (("--resume", theirs, "steps=1"), ("steps=1", f"out={stranger.folder / 'runs'}")):
        said = flexmarl("train", small_run, *words, temp=tmp_path, cwd=tmp_path)
        assert said.returncode == 2, said.stderr
        assert f"'{stranger.folder / 'runs'}' belongs to user 65534" in said.stderr
        assert "Traceback" not in said.stderr
    assert (everything_in(stranger.folder), everything_in(ours.parent)) == before
