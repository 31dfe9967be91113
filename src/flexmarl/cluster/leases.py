"""Folders and processes of one run on this machine, recorded so that others can find and remove them after it died.

    {temp}/flexmarl-{uid}/            one folder per run, locked by the run's controller while that lives
        k3x9q2/leases.json            the run's name and its processes
        k3x9q2/ray/                   the files of its private Ray
        k3x9q2/spilled/               published weights that have no room in memory (spill.py)
    /dev/shm/flexmarl-{uid}-k3x9q2/   its shared memory

A warden, a separate process, removes all this when the controller dies. If both have died, `flexmarl clean` does. The
code of the removal is in remains.py.
"""

import fcntl
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import psutil

from flexmarl.cluster.own_folder import locked, open_folder, opened, own_folder
from flexmarl.cluster.remains import RECORD, Leases, end_processes, live_processes, release, shared_memory, started_at

# A socket's path may have 107 characters: the root's, 9 of the run's folder, and up to 70 that Ray adds.
LONGEST_ROOT = 28


def leases_root(temp: Path | None = None) -> Path:
    """The folder of this user's runs: in the temp folder, or in /tmp if that path is too long for a socket."""
    name = f"flexmarl-{os.getuid()}"
    root = (temp or Path(tempfile.gettempdir())) / name
    return root if len(str(root)) <= LONGEST_ROOT else Path("/tmp") / name


class RunLeases:
    """The leases of a live run. A context manager: after its block, nothing that was added to the leases is left.

    >>> with RunLeases("quickstart") as leases:
    ...     leases.shared_memory().mkdir()
    """

    def __init__(self, run: str, *, root: Path | None = None) -> None:
        """Raises ConfigError if `root` is not a folder of this user alone."""
        self.run, self.root = run, root
        """As they were given; the run's agents on other nodes have leases of their own with the same."""
        root = own_folder(root or leases_root())
        self._leases = Leases(run=run)
        with opened(root) as held, locked(held):
            self.folder = Path(tempfile.mkdtemp(prefix="", dir=root))
            """The run's own folder. Its path is short enough for a socket in it."""
            self._lock = open_folder(self.folder)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            self._write()  # While the root is locked, so that nobody finds a folder without its record.
        self._warden = Warden(self.folder)

    def add_processes(self, pids: Iterable[int]) -> None:
        """Records processes that end with the run; a process that has already ended is left out."""
        started = {pid: start for pid in pids if (start := started_at(pid)) is not None}
        self._record({**dict(self._leases.processes), **started})

    def end_processes(self) -> None:
        """Ends the recorded processes, and waits for their end."""
        end_processes(lambda: live_processes(self._leases))
        self._record({})

    def shared_memory(self) -> Path:
        """The path of the run's folder in shared memory, or on disk if the system has none. It is not yet made."""
        return shared_memory(self.folder)

    def spilled(self) -> Path:
        """The path of the run's folder on disk for what has no room in shared memory. It is not yet made."""
        return self.folder / "spilled"

    def close(self) -> None:
        """Ends and removes everything, including the warden. Calling it twice is allowed."""
        if self.folder.exists():
            release(self.folder)
            os.close(self._lock)
        self._warden.close()

    def __enter__(self) -> "RunLeases":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _record(self, processes: dict[int, float]) -> None:
        self._leases = Leases(run=self._leases.run, processes=tuple(processes.items()))
        self._write()

    def _write(self) -> None:
        new = self.folder / f"{RECORD}.new"
        new.write_text(json.dumps(asdict(self._leases)))
        new.replace(self.folder / RECORD)


class Warden:
    """The process that waits for our end.

    It has its own session, so that no Ctrl-C or kill of our group reaches it, and is no child of ours: Ray kills the
    children of an actor that ends.
    """

    def __init__(self, folder: Path) -> None:
        """Starts it for a run's folder."""
        command = shlex.join([sys.executable, "-m", "flexmarl.cluster.remains", str(folder)])
        reading, self._held = os.pipe()
        try:
            starter = subprocess.run(
                # A shell gives what it starts in the background no stdin, unless it is told which.
                ["/bin/sh", "-c", f"exec 3<&0; {command} <&3 3<&- >/dev/null & echo $!"],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=reading,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                check=True,
            )
        finally:
            os.close(reading)
        self.pid = int(starter.stdout)
        self._process = psutil.Process(self.pid)

    def close(self) -> None:
        """Ends it, after it has removed what is left. Calling it twice is allowed."""
        if self._held >= 0:
            os.close(self._held)
            self._held = -1
        with suppress(psutil.NoSuchProcess):
            self._process.wait()
