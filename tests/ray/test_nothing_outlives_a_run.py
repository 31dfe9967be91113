"""A run's processes, files and shared memory end with its controller, however that ends."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Hang

pytestmark = pytest.mark.ray

CONTROLLER = [sys.executable, str(Path(__file__).with_name("doomed.py"))]


class Doomed:
    """A controller in a process group of its own, up and busy."""

    def __init__(self, root: Path, address: str = "local") -> None:
        self.root = root
        self.process = subprocess.Popen(
            [*CONTROLLER, address, str(root)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            text=True,
        )

    def wait_until_up(self) -> None:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        there = json.loads(line)
        self.processes = [psutil.Process(pid) for pid in there["pids"]]
        self.paths = [Path(path) for path in there["paths"]]
        assert len(self.processes) >= 2, "witness: Ray's processes and the workers run"
        assert all(path.is_dir() for path in self.paths), "witness: there is something to remove"

    def left(self) -> list[object]:
        """What is there of it, now."""
        alive = [one for one in self.processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return [*alive, *(path for path in self.paths if path.exists())]

    def wait_until_gone(self) -> None:
        """Looks again until nothing is left; what does not end is an error, not a hang."""
        left: list[object] = []
        try:
            while left := [*self.left(), *self.root.iterdir(), *mentioning(self.root)]:
                time.sleep(0.05)
        except Hang:
            raise AssertionError(f"left behind: {left}") from None


@pytest.fixture
def doomed(short_root: Path) -> Iterator[Doomed]:
    controller = Doomed(short_root)
    yield controller
    controller.process.kill()
    controller.process.communicate()


def mentioning(root: Path) -> list[psutil.Process]:
    """Processes that have this folder in their command line, as all of Ray's and the warden have."""
    return [one for one in psutil.process_iter(["cmdline"]) if f"{root}/" in " ".join(one.info["cmdline"] or ())]


def test_kill_9_of_the_controller_and_its_group_leaves_nothing(doomed: Doomed) -> None:
    doomed.wait_until_up()
    assert mentioning(doomed.root), "witness: Ray's processes are found this way"
    os.killpg(doomed.process.pid, signal.SIGKILL)
    assert doomed.process.wait() == -signal.SIGKILL
    doomed.wait_until_gone()


def test_kill_9_of_the_controller_alone_while_ray_starts_leaves_nothing(doomed: Doomed) -> None:
    while not list(doomed.root.glob("*/ray/session_*/sockets")):
        time.sleep(0.01)
    doomed.process.kill()
    assert doomed.process.wait() == -signal.SIGKILL
    doomed.processes, doomed.paths = [], []
    doomed.wait_until_gone()


def test_ctrl_c_ends_the_run_in_order_and_leaves_nothing(doomed: Doomed) -> None:
    doomed.wait_until_up()
    os.killpg(doomed.process.pid, signal.SIGINT)
    _, said = doomed.process.communicate()
    assert doomed.left() == []
    assert list(doomed.root.iterdir()) == []
    assert "KeyboardInterrupt" in said
    assert "WorkerError" not in said, "workers ended before the controller did"


def test_kill_9_of_a_guest_leaves_its_host_as_it_was(somebodys_ray: str, short_root: Path) -> None:
    vital = [one for one in psutil.Process().children(recursive=True) if one.name() in ("gcs_server", "raylet")]
    port = int(somebodys_ray.rpartition(":")[2])
    host = [
        one for one in vital if any(port in (end.laddr.port, *end.raddr[1:]) for end in one.net_connections(kind="tcp"))
    ]
    guest = Doomed(short_root, somebodys_ray)
    guest.wait_until_up()
    guest.process.kill()
    guest.process.communicate()
    guest.wait_until_gone()
    assert len(host) == 2
    assert all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in host)
