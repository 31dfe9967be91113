"""Settings of the sandbox, in which tools run what models write: boxes of this machine, or of a service.

A service cannot promise all that a box of this machine guarantees (probe.py). What it cannot promise is data of its
settings, `unpromised`; a run begins only if the config accepts each of these by name.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator

from flexmarl.events.safe_json import masked
from flexmarl.sandbox.interface import MIB, Limits
from flexmarl.settings import Settings


class SandboxSettings(Settings):
    """Boxes of a run, on this machine, opened only for tools that need them. `flexmarl sandbox probe` tries them."""

    type: Literal["bubblewrap"] = "bubblewrap"
    """This kind, also of a section without a type."""
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

    remote: ClassVar[bool] = False
    unpromised: ClassVar[Mapping[str, str]] = {}

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


class SandboxFusionSettings(Settings):
    """Boxes of a SandboxFusion server: each call is a request, and a session is played again before its next call.

    Its default configuration isolates nothing from the server's machine, so that this machine is safe if the server
    runs on another one, and nothing else is promised.
    """

    type: Literal["sandbox_fusion"] = "sandbox_fusion"
    url: str = Field(pattern=r"^https?://[^@\s?#]+$")
    """Where the server is, e.g. http://sandbox-box:8080. A key or password does not belong here."""
    concurrency: int = Field(default=34, ge=1, le=4096)
    """Requests at a time, from each process that opens boxes; others wait. 34 is the server's own `max_concurrency`."""
    retries: int = Field(default=2, ge=0, le=20)
    """New attempts at a request that failed: no connection, another status than 200, no answer of SandboxFusion,
    SandboxError, or none in time. Then the episode fails."""
    patience_s: float = Field(default=30.0, gt=0, le=3600)
    """Time that a request may take beyond that of its call: a kernel starts, and the server may be busy."""
    memory_mib: int = Field(default=256, ge=32)
    """Most memory of one process in a box."""
    disk_mib: int = Field(default=16, ge=1, le=32)
    """Most that the files of a box may have together; they travel with each request."""
    cpu_s: int = Field(default=60, ge=1)
    """Most processor seconds of one process in a box."""
    output_kib: int = Field(default=1024, ge=1, le=8192)
    """Output that is kept of a call; the rest is dropped and counted."""
    accept: tuple[Literal["filesystem", "network", "processes", "syscalls", "memory", "pids", "disk"], ...] = ()
    """Guarantees that may be missing. The server promises none of these: a run begins only if all are named."""

    remote: ClassVar[bool] = True
    unpromised: ClassVar[Mapping[str, str]] = {
        "filesystem": "code reads what the server may read, files of other boxes included",
        "network": "code reaches what the server's machine reaches",
        "processes": "code sees and signals the processes of the server's user, other boxes included",
        "syscalls": "calls are not filtered",
        "memory": "only single processes have a limit",
        "pids": "the number of processes has no limit",
        "disk": "only single files have a limit while code runs",
    }

    @property
    def limits(self) -> Limits:
        """The same as the record that a box is opened with."""
        return Limits(
            memory_bytes=self.memory_mib * MIB,
            disk_bytes=self.disk_mib * MIB,
            cpu_s=self.cpu_s,
            output_bytes=self.output_kib * 1024,
        )


class E2bSettings(Settings):
    """Boxes in microVMs of E2B: one sandbox for each agent and tool of an episode, which is killed at its end."""

    type: Literal["e2b"] = "e2b"
    key_env: str = Field(default="E2B_API_KEY", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Environment variable that holds the key. The key itself does not belong into a config."""
    template: str = "code-interpreter-v1"
    """Template of the sandboxes; it must have E2B's code interpreter. Memory and disk of a box are the template's."""
    domain: str = Field(default="", pattern=r"^[^@\s/]*$")
    """Domain of an E2B of one's own; empty: E2B's."""
    internet: bool = False
    """True: code in a box may reach the internet. The guarantee `network` must then be accepted as missing."""
    lifetime_s: int = Field(default=3600, ge=60, le=86_400)
    """Longest life of a sandbox. E2B ends it then, whatever became of the run. Accounts allow one hour or one day."""
    retries: int = Field(default=2, ge=0, le=20)
    """New attempts at a request that failed. No code is run twice. Then the episode fails."""
    patience_s: float = Field(default=15.0, gt=0, le=3600)
    """Longest answer of E2B, beyond the time of a call. A call that holds its kernel for so long ends its box."""
    output_kib: int = Field(default=1024, ge=1, le=8192)
    """Output that is kept of a call; the rest is dropped and counted."""
    accept: tuple[Literal["network", "syscalls", "pids", "output"], ...] = ()
    """Guarantees that may be missing. E2B does not promise `syscalls`, `pids` and `output`, nor `network` with
    `internet`: a run begins only if these are named."""

    remote: ClassVar[bool] = True

    @field_validator("key_env")
    @classmethod
    def _names_a_variable(cls, key_env: str) -> str:
        if masked(key_env) != key_env:
            raise ValueError("a config may hold no key; give the name of the variable that holds it, e.g. E2B_API_KEY")
        return key_env

    @property
    def unpromised(self) -> Mapping[str, str]:
        """The guarantees that a box cannot give, each with the reason."""
        beyond = {"network": "sandbox.internet is true"} if self.internet else {}
        return {
            **beyond,
            "syscalls": "calls are not filtered: the kernel is that of the box's own virtual machine",
            "pids": "the number of processes has no limit but the memory of the virtual machine",
            "output": "E2B's client reads a result whole before it is cut",
        }

    @property
    def limits(self) -> Limits:
        """The limits of a box that are not those of its template."""
        return Limits(output_bytes=self.output_kib * 1024)


RemoteSandbox = SandboxFusionSettings | E2bSettings


def _of_this_machine(given: Any) -> Any:
    """A section without `type` is of bubblewrap."""
    return {"type": "bubblewrap", **given} if isinstance(given, Mapping) else given


AnySandbox = Annotated[
    Annotated[SandboxSettings | SandboxFusionSettings | E2bSettings, Field(discriminator="type")],
    BeforeValidator(_of_this_machine),
]
"""Settings of any kind of sandbox, chosen by `type`."""
