"""Remains of runs on this machine: what a controller that died left behind, found and removed.

What is removed follows from a run's folder alone: its record cannot name a path. A folder is a run's if it lies in a
root of ours (own_folder.py) and holds a plain `leases.json` of ours; a process is a run's if it is ours and started
when the record says. Whatever else lies in the root stays as it is. No link is followed: what is removed is named
inside the descriptor of the folder that it lies in, and `shutil.rmtree` works on descriptors, as it does on Linux.
"""

import contextlib
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from flexmarl.cluster.own_folder import exists_at, folder_at, locked, not_ours, opened, own_folder

RECORD = "leases.json"
# A run has tens of processes, of 30 bytes each; what is longer was not written by us.
LONGEST_RECORD = 2**20
SHARED_MEMORY = Path("/dev/shm")
# A recycled pid belongs to a process that started later than this; the clock may have been set by less meanwhile.
SAME_START_S = 2.0
# What a process writes while it dies; SIGKILL takes longer only in uninterruptible sleep.
DYING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Leases:
    """What a run holds, as its record says."""

    run: str
    """Name of the run, for people."""
    processes: tuple[tuple[int, float], ...] = ()
    """Pid and start time of each; a process that has the pid but not the time is another one."""


def shared_memory(folder: Path) -> Path:
    """The folder in shared memory of the run that has this folder; beside the root's name it has the run's."""
    if not SHARED_MEMORY.is_dir():
        return folder / "shm"
    return SHARED_MEMORY / f"{folder.parent.name}-{folder.name}"


def abandoned(root: Path) -> Iterator[Path]:
    """Folders of runs whose controller is dead. Each stays locked while the caller looks at it.

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


def strangers(root: Path) -> Iterator[tuple[Path, str]]:
    """What lies in the root and is no run of ours, and why. Raises ConfigError if the root is not ours alone."""
    if not os.path.lexists(root):
        return
    root = own_folder(root)
    with opened(root) as held:
        yield from ((root / name, why) for name in sorted(os.listdir(held)) if (why := no_run(held, name)))


def no_run(root: int, name: str) -> str:
    """Why something in the root is no run's folder; empty if it is one, or gone."""
    try:
        if why := not_ours(os.stat(name, dir_fd=root, follow_symlinks=False)):
            return why
        with folder_at(root, name) as folder:
            record = os.stat(RECORD, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return f"holds no {RECORD}" if exists_at(root, name) else ""
    except OSError as error:
        return f"cannot be looked into: {error.strerror}"
    ours = stat.S_ISREG(record.st_mode) and record.st_uid == os.getuid()
    return "" if ours else f"holds a {RECORD} that is no plain file of ours"


def read_leases(folder: Path) -> Leases:
    """What the record in a run's folder says; no process if there is none, or one that a power cut left empty."""
    try:
        with opened(folder.parent) as root, folder_at(root, folder.name) as held:
            # Not waiting: to open a pipe would, until somebody writes to it.
            record = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=held)
            with open(record, "rb") as file:
                return parse_leases(file.read(LONGEST_RECORD + 1))
    except OSError:
        return Leases(run="?")


def parse_leases(record: bytes) -> Leases:
    """What a record says, whatever wrote it: what is no name of a run and no process is left out.

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
    """Could this be the pid and the start time of a process?"""
    if not isinstance(plain, list) or [type(part) for part in plain] not in ([int, int], [int, float]):
        return False
    pid, started = plain
    return 1 < pid < 2**31 and 0 <= started < 2**53 and math.isfinite(started)


def live_processes(leases: Leases) -> list[psutil.Process]:
    """The noted processes that still run."""
    return [process for noted in leases.processes if (process := same_process(*noted))]


def held_paths(folder: Path) -> list[Path]:
    """The run's folder and its shared memory, as far as they are there and ours."""
    found = [path for path in (folder, shared_memory(folder)) if os.path.lexists(path)]
    return [path for path in found if not not_ours(path.lstat())]


def release(folder: Path) -> None:
    """Ends the processes of the run that has this folder, and removes its shared memory and the folder. Idempotent.

    Raises ConfigError if the folder does not lie in one of ours alone.
    """
    leases = read_leases(folder)
    with opened(folder.parent) as root:
        if not exists_at(root, folder.name) or no_run(root, folder.name):
            return
        end_processes(lambda: [*live_processes(leases), *writers(folder)])
        deadline = time.monotonic() + DYING_S
        for path in reversed(held_paths(folder)):  # The folder last: it has the record.
            with folder_at(None, path.parent) as place:
                remove(place, path.name, deadline=deadline)


def end_processes(living: Callable[[], list[psutil.Process]]) -> None:
    """Kills processes and waits until none of them lives."""
    deadline = time.monotonic() + DYING_S
    while (left := living()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # Which psutil does only if the pid is still this process's.
        time.sleep(0.02)


def writers(folder: Path) -> list[psutil.Process]:
    """Other processes of ours that have a file in the folder open to write: a run may die while it starts them."""
    return [
        process
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(Path(path).is_relative_to(folder) for path in written_by(process))
    ]


def written_by(process: psutil.Process) -> list[str]:
    """Files that a process of ours has open to write; none of one that is gone or another user's."""
    try:
        if process.uids().real != os.getuid():
            return []
        return [file.path for file in process.open_files() if getattr(file, "mode", "w") != "r"]
    except psutil.Error:
        return []


def remove(inside: int, name: str, *, deadline: float) -> None:
    """Removes what has this name, again while something that dies still writes into it. A link is not followed."""
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
    """Removes what lies in a folder; its record last, so that what an interruption leaves is still found."""
    for name in {*os.listdir(folder)} - {RECORD}:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)
        shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
    if os.listdir(folder) == [RECORD]:
        os.unlink(RECORD, dir_fd=folder)


def started_at(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; None of one that is gone, or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def same_process(pid: int, started: float) -> psutil.Process | None:
    """The process of ours that was noted with this start time, if it still runs; never this one."""
    now = started_at(pid)
    if now is None or abs(now - started) >= SAME_START_S or pid == os.getpid():
        return None
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return process if process.uids().real == os.getuid() else None
    return None
