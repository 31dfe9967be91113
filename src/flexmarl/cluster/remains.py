"""Remains of runs on this machine: finding and removing what a dead controller left behind.

The paths to remove follow from a run's folder alone: its record cannot name a path. A folder belongs to a run if it is
in a root of ours (own_folder.py) and holds a plain `leases.json` of ours. A process belongs to a run if it is ours and
started when the record says. Everything else in the root stays as it is. No link is followed: each removal names an
entry inside an open folder descriptor, and `shutil.rmtree` works on descriptors too, as it does on Linux.
"""

import contextlib
import json
import math
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flexmarl.cluster.own_folder import exists_at, folder_at, locked, not_ours, opened, own_folder

RECORD = "leases.json"
# A run has tens of processes, of 30 bytes each. A longer record was not written by us.
LONGEST_RECORD = 2**20
SHARED_MEMORY = Path("/dev/shm")
# A process with a reused pid started later by more than this. The clock may have been corrected by less than this.
SAME_START_S = 2.0
# The time in which a killed process ends and stops writing. SIGKILL takes longer only in uninterruptible sleep.
DYING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """The record of a run: what it holds."""

    run: str
    """Name of the run, for people."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and start time of each. A process with the pid but another start time is not the run's."""


def shared_memory(folder: Path) -> Path:
    """The folder in shared memory of the run in `folder`. Its name joins the names of the root and of `folder`."""
    if not SHARED_MEMORY.is_dir():
        return folder / "shm"
    return SHARED_MEMORY / f"{folder.parent.name}-{folder.name}"


def abandoned(root: Path) -> Iterator[Path]:
    """Yields the folders of runs whose controller is dead. Each stays locked while the caller looks at it.

    Raises ConfigError if the root is not ours alone.
    """
    if not os.path.lexists(root):
        return
    root = own_folder(root)
    with opened(root) as held:
        for name in sorted(os.listdir(held)):
            if no_run(held, name):
                continue
            with (
                contextlib.suppress(BlockingIOError, FileNotFoundError),
                locked(held),
                folder_at(held, name) as run,
                locked(run, wait=False),
            ):
                yield root / name


def foreign_paths(root: Path) -> Iterator[tuple[Path, str]]:
    """Yields what is in the root but is no run of ours, and why. Raises ConfigError if the root is not ours alone."""
    if not os.path.lexists(root):
        return
    root = own_folder(root)
    with opened(root) as held:
        yield from ((root / name, why) for name in sorted(os.listdir(held)) if (why := no_run(held, name)))


def no_run(root: int, name: str) -> str:
    """The reason why an entry of the root is no run's folder; empty if it is one, or is gone."""
    try:
        if why := not_ours(os.stat(name, dir_fd=root, follow_symlinks=False)):
            return why
        with folder_at(root, name) as folder:
            record = os.stat(RECORD, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return f"holds no {RECORD}" if exists_at(root, name) else ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    ours = stat.S_ISREG(record.st_mode) and record.st_uid == os.getuid()
    return "" if ours else f"holds a {RECORD} that is no plain file of ours"


def read_leases(folder: Path) -> Leases:
    """Reads the record in a run's folder. It has no processes if it is missing, or empty because of a power cut."""
    try:
        with opened(folder.parent) as root, folder_at(root, folder.name) as held:
            # O_NONBLOCK, because opening a pipe would otherwise wait until somebody writes to it.
            record = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=held)
            with open(record, "rb") as file:
                return parse_leases(file.read(LONGEST_RECORD + 1))
    except OSError:
        return Leases(run="?")


def parse_leases(record: bytes) -> Leases:
    """Reads a record, whoever wrote it: anything but a run's name and processes is left out.

    >>> parse_leases(b'{"run": "math", "processes": [[77, 1.5], [-1, 1.5], [true, "x"]], "paths": ["/home"]}')
    Leases(run='math', processes=((77, 1.5),))
    """
    try:
        plain = json.loads(record) if len(record) <= LONGEST_RECORD else None
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        return Leases(run="?")
    run, listed = plain.get("run"), plain.get("processes")
    processes = [one for one in listed if is_process(one)] if isinstance(listed, list) else []
    return Leases(
        run=run if isinstance(run, str) and run.isprintable() else "?",
        processes=tuple((pid, float(started)) for pid, started in processes),
    )


def is_process(plain: Any) -> bool:
    """True if this could be the pid and the start time of a process."""
    if not isinstance(plain, list) or [type(part) for part in plain] not in ([int, int], [int, float]):
        return False
    pid, started = plain
    return 1 < pid < 2**31 and 0 <= started < 2**53 and math.isfinite(started)


def live_processes(leases: Leases) -> list[psutil.Process]:
    """The recorded processes that still run."""
    return [process for recorded in leases.processes if (process := same_process(*recorded))]


def held_paths(folder: Path) -> list[Path]:
    """The run's folder and its folder in shared memory, if they exist and are ours."""
    found = [path for path in (folder, shared_memory(folder)) if os.path.lexists(path)]
    return [path for path in found if not not_ours(path.lstat())]


def release(folder: Path) -> None:
    """Ends the processes of the run in `folder`, and removes its shared memory and the folder. Idempotent.

    Raises ConfigError if the folder's parent is not ours alone.
    """
    leases = read_leases(folder)
    with opened(folder.parent) as root:
        if not exists_at(root, folder.name) or no_run(root, folder.name):
            return
        end_processes(lambda: [*live_processes(leases), *writers(folder)])
        deadline = time.monotonic() + DYING_S
        for path in reversed(held_paths(folder)):  # The folder comes last, because it has the record.
            with folder_at(None, path.parent) as place:
                remove(place, path.name, deadline=deadline)


def end_processes(living: Callable[[], list[psutil.Process]]) -> None:
    """Kills the processes that `living` lists and waits until it lists none, at most `DYING_S`."""
    deadline = time.monotonic() + DYING_S
    while (left := living()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil does this only if the pid is still this process's.
        time.sleep(0.02)


def writers(folder: Path) -> list[psutil.Process]:
    """Other processes of ours that have a file in the folder open for writing.

    The record may lack them, because a run may die while it starts them.
    """
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(Path(path).is_relative_to(folder) for path in written_by(process))
    ]


def written_by(process: psutil.Process) -> list[str]:
    """Files that a process of ours has open for writing; none if it is gone or another user's."""
    try:
        if process.uids().real != os.getuid():
            return []
        return [file.path for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    except psutil.Error:
        return []


def remove(inside: int, name: str, *, deadline: float) -> None:
    """Removes an entry of the folder `inside`, without following a link.

    Tries again until `deadline`, because a dying process may still write into it.
    """
    while exists_at(inside, name):
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=inside)
        with contextlib.suppress(OSError), folder_at(inside, name) as folder:
            empty(folder)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=inside)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02 if exists_at(inside, name) else 0)


def empty(folder: int) -> None:
    """Empties a folder. Its record goes last, so that a run whose removal was interrupted is still found."""
    for name in {*os.listdir(folder)} - {RECORD}:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    if os.listdir(folder) == [RECORD]:
        os.unlink(RECORD, dir_fd=folder)


def started_at(pid: int) -> float | None:
    """The start time of a process, in seconds since the epoch; None if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def same_process(pid: int, started: float) -> psutil.Process | None:
    """The process of ours with this pid and start time, if it still runs; never the calling process."""
    now = started_at(pid)
    if now is None or abs(now - started) >= SAME_START_S or pid == os.getpid():
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if process.uids().real == os.getuid() else None
    return None


def guard(folder: Path) -> None:
    """Runs as the warden, a process of its own for each run: removes what the controller left, however that ended.

    It waits for the end of its stdin, whose other end the controller holds: the kernel closes a dead process's pipes.
    """
    sys.stdin.buffer.read()
    if folder.exists():  # After a normal end it is gone already.
        release(folder)


if __name__ == "__main__":
    guard(Path(sys.argv[1]))
