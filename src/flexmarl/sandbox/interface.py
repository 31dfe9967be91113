"""The interface of a sandbox: a box is opened for one seat of one episode, is never shared and never used again.

async with sandbox.open({"data.csv": "a,b\n1,2\n"}, Limits()) as box:
    outcome = await box.run("print(open('data.csv').read())", timeout_s=5)      # a text is Python, in one session
    outcome = await box.run(["ls", "-l"], timeout_s=5)                            # a list is a command
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

MIB = 2**20
NOBODY = 65534
"""The user that boxes of root are."""


class Ended(StrEnum):
    """The way in which a run in a box ended."""

    EXITED = "exited"
    """By itself; `exit` has its status. Code that raised an exception has 1."""
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_MUCH_OUTPUT = "too_much_output"
    """Its replies to the sandbox were too long. What it only prints is cut, which is no end."""
    KILLED = "killed"
    """It ended its own interpreter, or a signal did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that one box may use."""

    memory_bytes: int = 256 * MIB
    """Memory of all its processes and files together."""
    pids: int = 64
    """Processes and threads, four of ours included."""
    disk_bytes: int = 64 * MIB
    """Size of /box, of /tmp and of /dev/shm, each."""
    cpu_s: int = 60
    """Processor seconds of one process."""
    output_bytes: int = MIB
    """Bytes that are kept of each of the two outputs of a run; the rest is read, dropped and counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxOutcome:
    """The result of one run in a box."""

    ended: Ended
    exit: int | None = None
    """Exit status; None if there is none. Minus a signal's number if a signal ended a command."""
    stdout: str = ""
    stderr: str = ""
    cpu_s: float = 0.0
    """Processor seconds that the box took during the run; 0 if nothing counts them."""
    wall_s: float = 0.0
    peak_bytes: int = 0
    """Most memory that the box had until then; 0 if nothing counts it."""
    dropped_bytes: int = 0
    """Bytes of output that were not kept."""
    lost: bool = False
    """True if the box has ended: its files and the state of its session are lost."""

    @property
    def ok(self) -> bool:
        """True if it ended by itself, without an error."""
        return self.ended is Ended.EXITED and self.exit == 0


class Box(Protocol):
    """One open box. Runs of one box wait for one another."""

    async def run(self, code: str | Sequence[str], *, stdin: str = "", timeout_s: float = 10.0) -> BoxOutcome:
        """Runs Python code in the box's session, or a command.

        `stdin` is for commands. Whatever the code does is a BoxOutcome; EpisodeError is for a fault of the sandbox. If
        the call is cancelled, the box is ended before the cancellation passes. In a box that has ended, every run is
        `KILLED`, with `lost`.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file below /box. Raises EpisodeError if that is impossible: the box is full or has ended."""
        ...

    async def read(self, path: str) -> bytes:
        """Reads a regular file below /box, through no link. Raises FileNotFoundError if there is none."""
        ...


class Sandbox(Protocol):
    """Opens boxes, any number at once."""

    def open(
        self,
        files: Mapping[str, str | bytes] = {},
        limits: Limits | None = None,
        *,
        relay: Path | None = None,
        reads: Sequence[Path] = (),
    ) -> AbstractAsyncContextManager[Box]:
        """Opens a box with files below /box. Leaving the block ends all that runs in it, and removes all of it.

        `limits` None: the sandbox's own. `relay`: a Unix socket of this machine that the box may connect to, at
        /run/relay.sock: the only way out that a box can have. `reads`: absolute paths of files and folders that it may
        read where they are, beside /usr. Raises EpisodeError if no box can be opened.
        """
        ...
