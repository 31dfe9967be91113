"""Control groups for boxes, of version 1 and 2: limits of memory and processes that hold for all of a box together.

Version 1: groups below this process's own in the hierarchies `memory` and `pids`, which root may make.
Version 2: groups below this process's own, if it was delegated (`systemd-run --user --scope -p Delegate=yes`); for
root, beside its own. A group with processes cannot have limited groups below, so this process first moves into a leaf.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from flexmarl.errors import EpisodeError
from flexmarl.sandbox.interface import Limits

PREFIX = "flexmarl-"
"""How names of our groups begin: `flexmarl-{pid}-{start of the process, in centiseconds}-{number}`."""
ROOT = Path("/sys/fs/cgroup")
NEARLY = 0.9
"""Share of its memory that a box must have had at least for its end to be its own fault."""
WAITS_S = (0.001, 0.002, 0.005, *(0.01 for _ in range(500)))
"""Pauses in which the processes of a group end."""


@dataclass(frozen=True, slots=True)
class CgroupTree:
    """The folders below which groups are made."""

    memory: Path
    pids: Path
    version: int
    cpu: Path | None = None
    """The folder that counts processor time, if there is one. It limits nothing."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Each folder, once."""
        return tuple(dict.fromkeys(one for one in (self.memory, self.pids, self.cpu) if one))


class BoxGroup:
    """The group of one box."""

    def __init__(self, tree: CgroupTree, name: str, limits: Limits) -> None:
        """Makes the group. Raises OSError if this process may not."""
        self._tree, self._name, self._most = tree, name, limits.memory_bytes
        self._folders = [folder / name for folder in tree.folders]
        made: list[Path] = []
        try:
            for folder in self._folders:
                folder.mkdir()
                made.append(folder)
            self._limit(limits)
        except OSError:
            for folder in made:
                folder.rmdir()
            raise

    @property
    def _memory(self) -> Path:
        return self._tree.memory / self._name

    @property
    def _pids(self) -> Path:
        return self._tree.pids / self._name

    @property
    def entries(self) -> list[str]:
        """Files into which a process writes 0 to enter."""
        return [str(folder / "cgroup.procs") for folder in self._folders]

    def _limit(self, limits: Limits) -> None:
        (self._pids / "pids.max").write_text(str(limits.pids))
        most = str(limits.memory_bytes)
        if self._tree.version == 2:
            (self._memory / "memory.max").write_text(most)
            with suppress(FileNotFoundError):  # A kernel without swap accounting.
                (self._memory / "memory.swap.max").write_text("0")
            with suppress(FileNotFoundError):
                (self._memory / "memory.oom.group").write_text("0")
            return
        (self._memory / "memory.limit_in_bytes").write_text(most)
        with suppress(FileNotFoundError):
            (self._memory / "memory.memsw.limit_in_bytes").write_text(most)

    def peak_bytes(self) -> int:
        """Most memory that the box had; 0 if the kernel does not say."""
        name = "memory.peak" if self._tree.version == 2 else "memory.max_usage_in_bytes"
        return _number(self._memory / name)

    def out_of_memory(self) -> int:
        """Processes of the box that were ended because it had used up its memory, not because the machine had none."""
        if 0 < self.peak_bytes() < NEARLY * self._most:
            return 0
        name = "memory.events" if self._tree.version == 2 else "memory.oom_control"
        return _field(self._memory / name, "oom_kill")

    def cpu_s(self) -> float:
        """Processor seconds that the box has taken; 0 if the kernel does not count them for it."""
        if self._tree.cpu is None:
            return 0.0
        if self._tree.version == 2:
            return _field(self._tree.cpu / self._name / "cpu.stat", "usage_usec") / 1e6
        return _number(self._tree.cpu / self._name / "cpuacct.usage") / 1e9

    def processes(self) -> list[int]:
        """Processes of the box."""
        with suppress(OSError):
            return [int(line) for line in (self._pids / "cgroup.procs").read_text().split()]
        return []

    async def remove(self) -> None:
        """Ends what is left in the group, and removes it. Raises EpisodeError if processes do not end."""
        for pause in WAITS_S:
            for pid in self.processes():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for folder in self._folders:
                with suppress(OSError):
                    folder.rmdir()
            if not any(folder.exists() for folder in self._folders):
                return
            await asyncio.sleep(pause)
        raise EpisodeError(f"the sandbox cannot remove {self._folders[0]}: its processes do not end")


class Cgroups:
    """Makes the groups of this process's boxes."""

    def __init__(self, tree: CgroupTree) -> None:
        self._tree, self._made = tree, 0
        self.name = f"{PREFIX}{os.getpid()}-{_start_of(os.getpid())}"
        """How the names of its groups begin."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in which its groups are."""
        return self._tree.folders

    @classmethod
    def here(cls, root: Path = ROOT) -> "Cgroups | str":
        """The groups of this process; a text says why it can make none."""
        try:
            tree = tree_of(root, Path("/proc/self/cgroup").read_text())
        except OSError as error:
            return f"no control groups below {root}: {error.strerror}"
        if isinstance(tree, str):
            return tree
        cgroups = cls(tree)
        cgroups.sweep()
        try:
            tried = cgroups.group(Limits())
        except OSError as error:
            return f"{error.filename} cannot be written: {error.strerror}"
        for folder in tried._folders:
            folder.rmdir()
        return cgroups

    def group(self, limits: Limits) -> BoxGroup:
        """Makes the group of one box."""
        self._made += 1
        return BoxGroup(self._tree, f"{self.name}-{self._made}", limits)

    def sweep(self) -> None:
        """Removes empty groups of processes that were killed."""
        for folder in self._tree.folders:
            for left in folder.glob(f"{PREFIX}*-*-*"):
                pid, start = left.name.removeprefix(PREFIX).split("-")[:2]
                if start != _start_of(int(pid)):
                    with suppress(OSError):
                        left.rmdir()


def tree_of(root: Path, membership: str) -> CgroupTree | str:
    """The folders for our groups. `membership`: the content of /proc/self/cgroup. A text says why there are none."""
    own = dict(_memberships(membership))
    if "memory" in own and "pids" in own:
        memory, pids = _below(root / "memory", own["memory"]), _below(root / "pids", own["pids"])
        return CgroupTree(memory, pids, 1, _below(root / "cpuacct", own["cpuacct"]) if "cpuacct" in own else None)
    if "" not in own or not (root / "cgroup.controllers").is_file():
        return f"there are no control groups for memory and pids below {root}"
    ours = _below(root, own[""])
    moved = ours.name == f"{PREFIX}controller"  # By us, or by the process that started this one.
    top = ours.parent if ours != root and (moved or os.geteuid() == 0) else ours
    offered = set((top / "cgroup.controllers").read_text().split())
    if not {"memory", "pids"} <= offered:
        return f"{top} does not have the controllers memory and pids, but {' '.join(sorted(offered)) or 'none'}"
    enabled = set((top / "cgroup.subtree_control").read_text().split())
    if not {"memory", "pids"} <= enabled:
        try:
            # The root of a container has a type, and all its processes must go; that of the machine needs no leaf.
            if top != root or (top / "cgroup.type").exists():
                leaf = top / f"{PREFIX}controller"
                leaf.mkdir(exist_ok=True)
                for pid in (top / "cgroup.procs").read_text().split() if top == root else ["0"]:
                    with suppress(ProcessLookupError):
                        (leaf / "cgroup.procs").write_text(pid)
            (top / "cgroup.subtree_control").write_text("+memory +pids")
        except OSError as error:
            return f"{top} is not delegated to this user: {error.strerror}"
    return CgroupTree(top, top, 2, top)


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        yield from ((controller, path) for controller in controllers.split(","))


def _below(root: Path, path: str) -> Path:
    """Our own group; in a container it may be the root that is seen there."""
    own = root / path.lstrip("/")
    return own if own.is_dir() else root


def _number(path: Path) -> int:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return 0


def _field(path: Path, name: str) -> int:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _start_of(pid: int) -> str:
    """Start of a process in centiseconds; "" if there is none."""
    try:
        return str(int(psutil.Process(pid).create_time() * 100))
    except psutil.Error:
        return ""
