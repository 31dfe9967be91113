"""Settings of the sandbox, in which tools run what models write."""

from typing import Literal

from pydantic import Field

from flexmarl.sandbox.interface import MIB, Limits
from flexmarl.settings import Settings


class SandboxSettings(Settings):
    """The boxes of a run. They are opened only for tools that need them; `flexmarl sandbox probe` tries them."""

    python: str = "auto"
    """Interpreter in the box; below /usr, or in a folder that everybody may read. auto: /usr/bin/python3, or the one
    that runs flexmarl."""
    memory_mib: int = Field(default=256, ge=32)
    """Most memory of a box, its files included."""
    pids: int = Field(default=64, ge=8)
    """Most processes and threads of a box, four of the sandbox's own included."""
    disk_mib: int = Field(default=64, ge=1)
    """Size of /box, of /tmp and of /dev/shm in a box."""
    cpu_s: int = Field(default=60, ge=1)
    """Most processor seconds of one process in a box."""
    output_kib: int = Field(default=1024, ge=1)
    """Output that is kept of a call; the rest is dropped and counted."""
    spare: int = Field(default=0, ge=0, le=1024)
    """Boxes whose interpreters are started ahead, in each process that opens boxes; each serves one episode. A spare
    takes about 6 MB; it saves the first call of an episode the start of its box."""
    accept: tuple[Literal["rlimits"], ...] = ()
    """Weaker guarantees that are good enough. rlimits: without control groups, limits of each process stand for the
    limits of memory and processes of the box. A box of many processes can then take many times its memory."""

    @property
    def limits(self) -> Limits:
        """The same as the record that a box is opened with."""
        return Limits(
            memory_bytes=self.memory_mib * MIB,
            pids=self.pids,
            disk_bytes=self.disk_mib * MIB,
            cpu_s=self.cpu_s,
            output_bytes=self.output_kib * 1024,
        )
