"""A `flexmarl train` in a process of its own, all that there is of it on this machine, and what it left on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from safetensors.torch import load_file

from flexmarl.cluster.leases import leases_root
from flexmarl.events.event import Event
from flexmarl.events.journal import read_journal
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.store_file import read_store
from tests.conftest import Hang

# What is being started when its parent is killed may show up late.
STAYS_S = 0.5
MAIN = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, all_threads=True)
from flexmarl.cli import main
main()
"""

E = TypeVar("E", bound=Event)


class Child:
    """One command with a temp folder of its own, by which everything that it starts is found."""

    def __init__(self, *words: object, cwd: Path, temp: Path) -> None:
        self.root = temp
        self.footprint = Footprint(temp)
        self._stderr = (cwd / f"stderr-{time.monotonic_ns()}").open("w+")
        self._stdout = (cwd / f"stdout-{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", MAIN, *map(str, words)],
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(temp)},
            stdout=self._stdout,
            stderr=self._stderr,
            process_group=0,
        )

    def wait(self) -> int:
        """The exit code; a hang fails, with what every thread did."""
        with self._shown():
            return self.process.wait()

    def wait_for(self, found: Callable[[], object], *, observing: bool = False) -> bool:
        """Looks until there is something; False if the command ended first. To observe meanwhile costs 0.1 s each."""
        observed = 0.0
        with self._shown():
            while not found():
                if self.process.poll() is not None:
                    return False
                if observing and time.monotonic() - observed > 1:
                    self.footprint.observe()
                    observed = time.monotonic()
                time.sleep(0.002)
        return True

    @contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except Hang as hang:
            raise AssertionError(f"{hang}\n{self.dump()}") from None

    def dump(self) -> str:
        """Threads of the controller, and what it said so far; it is ended."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(1)  # it answers when it wants to
        self.process.kill()
        return f"{self.stdout}\n{self.stderr}"

    @property
    def stdout(self) -> str:
        return _all_of(self._stdout)

    @property
    def stderr(self) -> str:
        return _all_of(self._stderr)

    def wait_until_gone(self) -> float:
        """Returns how many seconds it took until nothing was left, and stayed so; fails if something stays."""
        began = gone = time.monotonic()
        left: list[object] = []
        try:
            while time.monotonic() - gone < STAYS_S:
                if left := self.footprint.left():
                    gone = time.monotonic()
                time.sleep(0.05)
        except Hang:
            raise AssertionError(f"left behind: {left}") from None
        return gone - began

    def close(self) -> None:
        """Ends what a failed test left."""
        self.process.kill()
        self.process.wait()
        for process in self.footprint.processes():
            process.kill()
        self._stdout.close()
        self._stderr.close()


@dataclass
class Footprint:
    """What a command has on this machine, and what of that is left."""

    root: Path
    """Its temp folder."""
    pids: dict[int, float] = field(default_factory=dict)
    """Processes it was seen to have, with their start times."""
    ports: set[int] = field(default_factory=set)
    """Ports on which it was seen to listen."""
    sockets: set[tuple[str, str]] = field(default_factory=set)
    """Which of its processes was seen to listen at which address."""
    leases: set[str] = field(default_factory=set)
    """Names of its folders in the temp folder; its folder in shared memory has one of them in its name."""

    def observe(self) -> None:
        """Notes what there is now."""
        processes = self.processes()
        self.pids |= {process.pid: process.create_time() for process in processes}
        self.ports |= {port for pid, _, port in listening() if pid in self.pids}
        names = {process.pid: name_of(process) for process in processes}
        self.sockets |= {(names[pid], address) for pid, address, _ in listening() if pid in names}
        self.leases |= {path.name for path in inside(self.root) if path.parent.parent == self.root}

    def processes(self) -> list[psutil.Process]:
        """Live ones that were seen earlier, or that mention the temp folder."""
        return [one for one in psutil.process_iter() if one.pid != os.getpid() and self._has(one)]

    def _has(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if self.pids.get(process.pid) == process.create_time():
                return True
            words = [*process.cmdline(), *process.environ().values(), *open_files(process.pid)]
            return any(str(self.root) in word for word in words)
        except (psutil.Error, OSError):  # it ended meanwhile, or is not ours
            return False

    def left(self) -> list[object]:
        """Everything of it that is still there."""
        processes = self.processes()
        owners = {None, *(process.pid for process in processes)}
        ports = [f"port {port} of {pid}" for pid, _, port in listening() if port in self.ports and pid in owners]
        files = [path for path in inside(self.root) if path != self.root / leases_root().name]
        shared = [path for path in Path("/dev/shm").iterdir() if any(path.name.endswith(one) for one in self.leases)]
        return [*processes, *ports, *files, *shared]


def name_of(process: psutil.Process) -> str:
    """As the system shows it; `gone` of one that has ended meanwhile."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "gone"


def inside(folder: Path) -> Iterator[Path]:
    """Everything in a folder, while others remove it."""
    for where, folders, files in os.walk(folder):
        yield from (Path(where) / name for name in (*folders, *files))


def open_files(pid: int) -> Iterator[str]:
    """What a process has open, deleted files too: some of Ray's processes overwrite their command line and more."""
    for one in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield os.readlink(one)


def listening() -> Iterator[tuple[int | None, str, int]]:
    """Process, address and port of everything that listens on this machine."""
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr:
            yield one.pid, one.laddr.ip, one.laddr.port


@dataclass(frozen=True)
class Left:
    """What a run folder says of the run."""

    path: Path

    @property
    def journal(self) -> list[Event]:
        journal = RunFolder(self.path).journal
        return list(read_journal(journal)) if journal.exists() else []

    def events(self, *kinds: type[E]) -> list[E]:
        return [event for event in self.journal if isinstance(event, kinds)]

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads(RunFolder(self.path).summary.read_text())

    def consumed(self) -> list[tuple[Any, ...]]:
        """Every row of every agent: who, sampled and trained with which versions, how it ended, with what advantage."""
        with read_store(RunFolder(self.path).store) as store:
            return sorted(
                (agent, row.sample_id, row.policy, row.version, row.settled_version, row.state, row.values["advantage"])
                if "advantage" in row.values
                else (agent, row.sample_id, row.policy, row.version, row.settled_version, row.state)
                for agent in store.agents
                for row in store.rows(agent)
            )

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        """Every tensor of every policy in a checkpoint."""
        folder = RunFolder(self.path).checkpoints / f"step-{step:05d}"
        files = sorted(folder.glob("*/weights.safetensors"))
        assert files, f"no weights in {folder}"
        return {f"{file.parent.name}/{name}": one for file in files for name, one in load_file(file).items()}


def count_journalled(event: str, out: Path) -> int:
    """How many events of that name the journals of runs in a folder have so far."""
    journals = [RunFolder(path).journal for path in out.glob("sums-*")]
    return sum(path.read_text().count(f'"event":"{event}"') for path in journals if path.exists())


def assert_same(one: Left, other: Left, *, steps: int) -> None:
    """Both consumed the same, and ended with the same bits."""
    assert one.consumed() == other.consumed()
    ours, theirs = one.weights(steps), other.weights(steps)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _all_of(file: Any) -> str:
    file.flush()
    file.seek(0)
    return file.read()
