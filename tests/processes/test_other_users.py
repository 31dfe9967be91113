"""The commands, where another user was there first: they refuse by name, and touch nothing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import Command, run_commands
from tests.conftest import everything_in

pytestmark = pytest.mark.slow

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
ROOT = f"flexmarl-{os.getuid()}"
RECORD = '{"run": "theirs", "paths": ["%s"], "processes": [[%d, %r]]}'


def flexmarl(*commands: Command, temp: Path, cwd: Path) -> list[subprocess.CompletedProcess[bytes]]:
    """Commands whose temp folder is one where everyone may write."""
    return run_commands(*commands, cwd=cwd, environment={"TMPDIR": str(temp)})


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Whatever becomes of the block, nobody waits for the process."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_clean_and_train_refuse_what_another_user_put_in_the_place_of_our_folder(
    planted: str, stranger: Any, small_run: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    (precious / "k3x9q2").mkdir(parents=True)
    with subprocess.Popen(SLEEP) as process, killed_at_the_end(process):
        record = RECORD % (precious, process.pid, psutil.Process(process.pid).create_time())
        (precious / "k3x9q2" / "leases.json").write_text(record)
        script = {
            "folder": 'mkdir -m 777 "$root"; mkdir "$root/k3x9q2"; printf "%s" "$record" > "$root/k3x9q2/leases.json"',
            "link": 'ln -s "$ours" "$root"',
        }
        stranger.does(script[planted], root=ROOT, record=record, ours=precious)
        before = everything_in(stranger.folder / ROOT), everything_in(precious)
        out = tmp_path / "out"
        refused = (("clean",), ("train", small_run, "cluster.backend=ray", f"out={out}"))
        for said in flexmarl(*refused, temp=stranger.folder, cwd=tmp_path):
            assert said.returncode == 2, said.stderr
            assert f"flexmarl: '{stranger.folder / ROOT}' ".encode() in said.stderr
            assert b"65534" in said.stderr
            assert b"Traceback" not in said.stderr
        assert (everything_in(stranger.folder / ROOT), everything_in(precious)) == before
        assert process.poll() is None
        (run,) = out.iterdir()
        again = ("train", run / "config.yaml", "--resume", run)
        (resumed,) = flexmarl(again, temp=stranger.folder, cwd=tmp_path)
        assert resumed.returncode == 2
        assert f"flexmarl: '{stranger.folder / ROOT}' ".encode() in resumed.stderr
        assert (everything_in(stranger.folder / ROOT), everything_in(precious)) == before


@pytest.fixture(scope="module")
def trained(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended; nobody writes there."""
    folder = tmp_path_factory.mktemp("trained")
    (ended,) = flexmarl(("train", small_run, "steps=1", f"out={folder}/runs"), temp=folder, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return Path(os.fsdecode(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("planted", ["folder", "link"])
def test_resume_and_train_refuse_what_another_user_put_in_the_place_of_our_runs(
    planted: str, stranger: Any, small_run: Path, trained: Path, tmp_path: Path
) -> None:
    ours = tmp_path / "runs" / trained.name
    shutil.copytree(trained.parent, ours.parent)
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
    train = ("train", small_run, "steps=1")
    refused = ((*train, "--resume", theirs), (*train, f"out={stranger.folder / 'runs'}"))
    for said in flexmarl(*refused, temp=tmp_path, cwd=tmp_path):
        assert said.returncode == 2, said.stderr
        assert f"'{stranger.folder / 'runs'}' belongs to user 65534".encode() in said.stderr
        assert b"Traceback" not in said.stderr
    assert (everything_in(stranger.folder), everything_in(ours.parent)) == before
