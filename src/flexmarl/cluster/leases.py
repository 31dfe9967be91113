"""Folders and processes of one run on this machine, written down where they can be found and removed without it.

    {temp}/flexmarl-{uid}/          one folder per run, locked by the run's controller while that lives
        k3x9q2/leases.json          what the run holds elsewhere: processes, paths
        k3x9q2/ray/                 and what it keeps here

A warden, a process of its own, removes all this when the controller dies; `flexmarl clean` does, when both died.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from flexmarl.errors import ConfigError

RECORD = "leases.json"
SHARED_MEMORY = Path("/dev/shm")
# Ray adds up to 62 characters to the path of a run's folder, and a socket's path may have 107.
LONGEST_ROOT = 32
# A recycled pid belongs to a process that started later than this; the clock may have been set by less meanwhile.
SAME_START_S = 2.0
# What a process writes while it dies; SIGKILL takes longer only in uninterruptible sleep.
DYING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """What a run holds, as its record says."""

    run: str
    """Name of the run, for people."""
    paths: tuple[str, ...] = ()
    """Files and folders outside of its own folder."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and start time of each; a process that has the pid but not the time is another one."""


def leases_root() -> Path:
    """The folder of this user's runs: in the temp folder, or in /tmp where that one's path is too long for a socket."""
    name = f"flexmarl-{os.getuid()}"
    root = Path(tempfile.gettempdir()) / name
    return root if len(str(root)) <= LONGEST_ROOT else Path("/tmp") / name


class RunLeases:
    """The leases of a live run; a context manager: after it, nothing that was added to it is left.

    >>> with RunLeases("quickstart") as leases:
    ...     leases.add_path(leases.shared_memory() / "more")
    """

    def __init__(self, run: str, *, root: Path | None = None) -> None:
        self._root = root or leases_root()
        with locked(own_folder(self._root)):
            self.folder = Path(tempfile.mkdtemp(prefix="", dir=self._root))
            """The run's own folder, short enough for a socket in it."""
            self._lock = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._leases = Leases(run=run)
        self._write()
        self._warden = start_warden(self.folder)

    def add_path(self, path: Path) -> None:
        """Notes a file or folder that ends with the run; call it before making it."""
        self._update(paths=(*self._leases.paths, str(path)))

    def add_processes(self, pids: Iterable[int]) -> None:
        """Notes processes that end with the run; one that is gone already is left out."""
        started = {pid: start for pid in pids if (start := started_at(pid)) is not None}
        self._update(processes=tuple({**dict(self._leases.processes), **started}.items()))

    def end_processes(self) -> None:
        """Ends the processes that were noted, and waits for it."""
        end_processes(lambda: live_processes(self._leases))
        self._update(processes=())

    def shared_memory(self) -> Path:
        """The run's folder in shared memory, or on disk where the system has no such folder; noted, not yet made."""
        if not SHARED_MEMORY.is_dir():
            return self.folder / "shm"
        folder = SHARED_MEMORY / f"{self._root.name}-{self.folder.name}"
        if str(folder) not in self._leases.paths:
            self.add_path(folder)
        return folder

    @property
    def warden_pid(self) -> int:
        """Process that cleans up should this one die."""
        return self._warden.pid

    def close(self) -> None:
        """Ends and removes all of it, the warden included; calling it twice is no error."""
        if self.folder.exists():
            release(self.folder)
            os.close(self._lock)
        self._warden.communicate()

    def __enter__(self) -> "RunLeases":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _update(self, **changes: object) -> None:
        held = {name: getattr(self._leases, name) for name in Leases.__slots__}
        self._leases = Leases(**{**held, **changes})
        self._write()

    def _write(self) -> None:
        new = self.folder / f"{RECORD}.new"
        new.write_text(json.dumps({name: getattr(self._leases, name) for name in Leases.__slots__}))
        new.replace(self.folder / RECORD)


def start_warden(folder: Path) -> subprocess.Popen[bytes]:
    """A process that waits for our end; of its own session, so that no Ctrl-C and no kill of our group reaches it."""
    return subprocess.Popen(
        [sys.executable, "-m", "flexmarl.cluster.warden", str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )


def abandoned(root: Path | None = None) -> Iterator[Path]:
    """Folders of runs whose controller is dead. Each stays locked while the caller looks at it."""
    root = root or leases_root()
    if not root.is_dir():
        return
    for folder in sorted(root.iterdir()):
        with contextlib.suppress(BlockingIOError, FileNotFoundError), locked(root), locked(folder, wait=False):
            yield folder


def read_leases(folder: Path) -> Leases:
    """What the record in a run's folder says; nothing if there is none, or one that a power cut left empty."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return Leases(run="?")
    processes = tuple((int(pid), float(started)) for pid, started in record["processes"])
    return Leases(run=record["run"], paths=tuple(record["paths"]), processes=processes)


def live_processes(leases: Leases) -> list[int]:
    """Pids of the noted processes that still run."""
    return [pid for pid, started in leases.processes if is_same(pid, started)]


def release(folder: Path) -> None:
    """Ends the processes and removes the paths that a run's folder lists, then the folder. Idempotent."""
    leases = read_leases(folder)
    end_processes(lambda: [*live_processes(leases), *writers(folder)])
    deadline = time.monotonic() + DYING_S
    for path in (*map(Path, leases.paths), folder):
        remove(path, deadline=deadline)


def end_processes(living: Callable[[], list[int]]) -> None:
    """Kills processes and waits until none of them lives."""
    deadline = time.monotonic() + DYING_S
    while (left := living()) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def writers(folder: Path) -> list[int]:
    """Pids of other processes that have a file in the folder open to write: a run may die while it starts them."""
    return [
        process.pid
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(Path(path).is_relative_to(folder) for path in written_by(process))
    ]


def written_by(process: psutil.Process) -> list[str]:
    """Files that a process has open to write; none of one that is gone or is not ours to ask."""
    try:
        return [file.path for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    except psutil.Error:
        return []


def remove(path: Path, *, deadline: float) -> None:
    """Removes a file or folder; again, while something that dies still writes into it."""
    while path.exists():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02 if path.exists() else 0)


def started_at(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None of one that is gone, or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None


def is_same(pid: int, started: float) -> bool:
    """Does the process that was noted with this start time still run?"""
    now = started_at(pid)
    return now is not None and abs(now - started) < SAME_START_S


def own_folder(root: Path) -> Path:
    """The folder of the user's runs, made if need be, closed to others. Raises ConfigError if somebody else has it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (owner := root.stat().st_uid) != os.getuid():
        raise ConfigError(f"'{root}' belongs to user {owner}, not to us; remove it or set TMPDIR to another folder")
    return root


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds the lock of a folder. Raises BlockingIOError if another has it and we do not wait."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(lock)
