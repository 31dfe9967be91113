"""Files of a node that have no room in memory: those that went unread for longest are on disk, under the same names.

    /dev/shm/flexmarl-{run}/spill.json                          how much memory files may take, and the folder on disk
    /dev/shm/flexmarl-{run}/weights%2Fjudge%2F3.object          a file in memory, or a symbolic link to
    {temp}/flexmarl-{uid}/{run}/spilled/{id}.object             the same file on disk

Who reads a file need not know where it is: a file that moves keeps its bytes, and whoever has it open keeps reading the
memory. A file moves once, to the disk; from there it is read through the system's cache of files. Files that nobody has
named are blocks, memory to write to again (objects/backends/blocks.py): they are given back before any file moves
further than it must. The folder on disk lies in the run's own, which its leases remove. This file imports no torch.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from uuid import uuid4

import psutil

RECORD = "spill.json"
"""The record in the folder in memory. It is also the lock under which names change."""
SUFFIX = ".object"


@dataclass(frozen=True)
class Spill:
    """The two folders of a node's files. All processes of the node that use them make one of the same record."""

    memory: Path
    disk: Path
    most_bytes: int
    """Memory that files and blocks take at most. Two processes that make room at the same moment may each take some."""

    @classmethod
    def allow(cls, memory: Path, disk: Path, most_bytes: int) -> None:
        """Lets files in the folder `memory` go to `disk`, from now on. Makes that folder."""
        disk.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = memory / f"{RECORD}.new"
        new.write_text(json.dumps({"disk": str(disk), "most_bytes": most_bytes}))
        new.replace(memory / RECORD)

    @classmethod
    def of(cls, memory: Path) -> Self | None:
        """The spill of the folder, None if its files stay in memory."""
        try:
            record = json.loads((memory / RECORD).read_text())
        except FileNotFoundError:
            return None
        return cls(memory, Path(record["disk"]), record["most_bytes"])

    def make_room(self, num_bytes: int, *, reusing: str = "") -> bool:
        """Moves files to disk until `num_bytes` more fit; returns False if they do not fit in memory at all.

        One free block whose name begins with `reusing` stays: it is what will be written to. Raises OSError if the disk
        refuses a file.
        """
        if num_bytes > self.most_bytes:
            return False
        for name in self._longest_unread_first():
            if self._held_bytes(free=False) + num_bytes <= self.most_bytes:
                break
            self._sweep()
            self._move(name)
        reused = next((size for name, size in self._free_blocks() if reusing and name.startswith(reusing)), 0)
        if self._held_bytes(free=True) - reused + num_bytes > self.most_bytes:
            self.remove_free(reusing=reusing)
        return self._held_bytes(free=False) + num_bytes <= self.most_bytes

    def move_one(self) -> bool:
        """Moves the file that went unread for longest, and gives back free blocks: the memory is full though less was
        taken than is allowed. Returns False if nothing could be moved.
        """
        moved = any(self._move(name) for name in self._longest_unread_first())
        self.remove_free()
        return moved

    def new_path(self) -> Path:
        """A path on disk for a new file of this process; `name` names it when it is complete."""
        return self.disk / f"{os.getpid()}-{uuid4().hex}{SUFFIX}"

    def name(self, path: Path, name: str) -> None:
        """Gives a complete file on disk its name. Raises FileExistsError if there is one of that name."""
        with self._locked():
            (self.memory / name).symlink_to(path)

    def remove(self, name: str) -> None:
        """Removes a file, wherever it is. An unknown name is ignored."""
        path = self.memory / name
        with self._locked(), suppress(FileNotFoundError):
            target = path.readlink() if path.is_symlink() else None
            path.unlink()
            if target is not None:
                target.unlink(missing_ok=True)

    def remove_free(self, *, reusing: str = "") -> None:
        """Gives back the memory of free blocks that nobody reads, but for one whose name begins with `reusing`."""
        kept = False
        for name, _ in self._free_blocks():
            if reusing and not kept and name.startswith(reusing):
                kept = True
                continue
            with suppress(FileNotFoundError, BlockingIOError), self._opened(name, fcntl.LOCK_EX) as block:
                if os.fstat(block).st_nlink == 1:
                    os.ftruncate(block, 0)  # Who keeps it mapped uses a map only under a lock, and of a named file.
                    (self.memory / name).unlink()

    def _move(self, name: str) -> bool:
        """Moves a file to disk. Returns False if it is gone, or somebody is writing it."""
        path, copy = self.memory / name, self.new_path()
        try:
            with self._opened(name, fcntl.LOCK_SH) as source:  # Nobody writes to it while it is copied.
                inode = os.fstat(source).st_ino
                with open(source, "rb", closefd=False) as there, copy.open("xb") as here:
                    copy.chmod(0o600)
                    shutil.copyfileobj(there, here, 1 << 20)
                with self._locked():
                    if path.lstat().st_ino != inode:
                        raise FileNotFoundError(path)
                    link = self.memory / f"{RECORD}.link"
                    link.unlink(missing_ok=True)  # It may be that of a process that died here.
                    link.symlink_to(copy)
                    link.replace(path)
        except (FileNotFoundError, BlockingIOError):
            copy.unlink(missing_ok=True)
            return False
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        return True

    def _sweep(self) -> None:
        """Removes what processes that died have left on disk: files that have no name."""
        with self._locked():
            named = {path.readlink().name for path in self.memory.iterdir() if path.is_symlink()}
            for path in self.disk.iterdir():
                if path.name not in named and not psutil.pid_exists(int(path.name.partition("-")[0])):
                    path.unlink()

    def _longest_unread_first(self) -> list[str]:
        """Names of the files in memory, by the time of their last use."""
        return [name for _, name in sorted((status.st_mtime_ns, name) for name, status in self._files())]

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        for name, status in self._entries():
            if name.endswith((SUFFIX, ".cut")):
                yield name, status

    def _free_blocks(self) -> list[tuple[str, int]]:
        """Names and sizes of the blocks that no file is in."""
        found = ((name, status) for name, status in self._entries() if name.endswith(".block"))
        return sorted((name, status.st_size) for name, status in found if status.st_nlink == 1)

    def _held_bytes(self, *, free: bool) -> int:
        """Memory of all files, and, with `free`, of free blocks."""
        sizes = {
            status.st_ino: status.st_size
            for name, status in self._entries()
            if free or not name.endswith(".block") or status.st_nlink > 1
        }
        return sum(sizes.values())

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        """The entries of the folder that take memory."""
        with os.scandir(self.memory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and entry.name != RECORD:
                        yield entry.name, status

    @contextmanager
    def _opened(self, name: str, lock: int) -> Iterator[int]:
        """Opens a file in memory and locks it. Raises BlockingIOError if somebody else has a lock that excludes it."""
        try:
            descriptor = os.open(self.memory / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:  # A symbolic link: another process has moved it.
            raise FileNotFoundError(name) from error
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keeps names as they are for as long as the block lasts, which is short: no bytes are copied in it."""
        descriptor = os.open(self.memory / RECORD, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def reserve(descriptor: int, num_bytes: int) -> None:
    """Reserves the memory or the disk of an open file. Raises OSError.

    A disk is asked first: to reserve more than is free takes all of it for a moment, in which others cannot write.
    """
    room = os.fstatvfs(descriptor)
    missing = num_bytes - os.fstat(descriptor).st_blocks * 512
    if room.f_blocks and missing > room.f_bavail * room.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.posix_fallocate(descriptor, 0, num_bytes)
