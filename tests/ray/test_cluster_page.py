"""docs/howto/cluster.md on one machine: its `ray start` lines make two nodes, on which its config trains a team."""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from flexmarl.events.run_events import ProcessStarted
from tests.docs.pages import commands, files
from tests.ray.child_run import Child, Left

pytestmark = pytest.mark.ray

PAGE = "docs/howto/cluster.md"


@pytest.fixture
def address(short_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of the Ray that the page's commands start, with two CPUs on each node and a home of its own."""
    monkeypatch.setenv("HOME", str(short_root))  # Ray keeps the token there.
    port = free_port()
    try:
        for line in commands(PAGE)[:5]:
            words = shlex.split(line.replace("HEAD:6379", f"127.0.0.1:{port}").replace("6379", str(port)))
            if words[0] == "export":
                monkeypatch.setenv(*words[1].split("="))
                continue
            head = ["--include-dashboard=false", f"--temp-dir={short_root}/ray"] if "--head" in words else []
            more = ["--num-cpus=2", *head] if words[1] == "start" else []
            program = str(Path(sys.executable).with_name(words[0]))
            done = subprocess.run([program, *words[1:], *more], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        yield f"127.0.0.1:{port}"
    finally:
        ours = [one for one in psutil.process_iter() if f"{short_root}/ray" in " ".join(words_of(one))]
        for process in ours:
            process.kill()
        psutil.wait_procs(ours)


def free_port() -> int:
    """A port that no program gets without asking for it."""
    for port in range(20_000 + os.getpid() % 10_000, 32_768):
        with suppress(OSError), socket.socket() as one:
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has ended."""
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def test_the_page_trains_a_team_on_two_nodes(address: str, small_run: Path, tmp_path: Path, short_root: Path) -> None:
    start, train = files(PAGE)["cluster.yaml"], commands(PAGE)[5]
    settings = yaml.safe_load(start.replace("HEAD:6379", address))
    config = tmp_path / "cluster.yaml"
    config.write_text(
        yaml.safe_dump({"extends": [str(small_run)], "base": str(small_run.parent), **settings, "steps": 1})
    )
    assert shlex.split(train) == ["flexmarl", "train", config.name]
    child = Child(*shlex.split(train)[1:], f"out={tmp_path / 'runs'}", cwd=tmp_path, temp=short_root)
    assert child.wait() == 0, child.stderr
    (path,) = (tmp_path / "runs").iterdir()
    places = {str(event.process): event.node for event in Left(path).events(ProcessStarted)}
    assert places["engine/one/0"] == "second"
    assert places["trainer/one"] == "head"
