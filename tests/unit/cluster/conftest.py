"""A controller that tests of its leases kill."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

# A controller: takes leases in argv[1], has shared memory and notes a process that it starts, says so, and waits.
CONTROLLER = """
import subprocess, sys, time
from pathlib import Path
from flexmarl.cluster.leases import RunLeases
leases = RunLeases("doomed", root=Path(sys.argv[1]))
leases.shared_memory().mkdir()
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
leases.add_processes([worker.pid])
print(worker.pid, leases._warden.pid, leases.shared_memory(), flush=True)
time.sleep(600)
"""


class Doomed:
    """A controller in a process of its own, with a worker, shared memory and a warden."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.controller = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", CONTROLLER, str(root)], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(self.controller.kill)
        assert self.controller.stdout
        worker, warden, shared = self.controller.stdout.readline().split()
        self.worker, self.warden, self.shared = psutil.Process(int(worker)), psutil.Process(int(warden)), Path(shared)
        (self.folder,) = root.iterdir()
        assert self.worker.is_running(), "witness: there is something to end"
        assert self.shared.is_dir(), "witness: there is something to remove"


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Doomed]:
    with ExitStack() as stack:
        yield Doomed(tmp_path / "root", stack)
