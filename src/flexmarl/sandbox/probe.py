"""Runs the probe of a sandbox: it tries each guarantee in boxes of its own, with code of ours that attacks.

consumes     a sandbox; a listener, a file and a process of this machine that no box may reach
waits for    three boxes, one after the other, each at most PROBE_S; one box of a service
produces     a Guarantee for each of GUARANTEES: held, or the reason why not and what would help
unblocked by the end of a box, or its time limit
"""

import asyncio
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flexmarl.errors import ConfigError, EpisodeError
from flexmarl.sandbox.interface import MIB, Ended, Limits, Sandbox
from flexmarl.sandbox.settings import AnySandbox, RemoteSandbox, SandboxSettings

PROBE_S = 20.0
"""Most seconds of one attack of the probe."""
SMALL = Limits(memory_bytes=96 * MIB, pids=24, disk_bytes=4 * MIB, cpu_s=20, output_bytes=MIB)
"""Limits of the boxes that the probe tries."""

GUARANTEES: Mapping[str, str] = {
    "filesystem": "nothing of this machine can be read but /usr, and nothing can be written",
    "network": "nothing can be reached, on this machine or beyond",
    "processes": "no process outside can be seen or signalled",
    "syscalls": "no namespaces, mounts, tracing, or rings into the kernel",
    "memory": "all processes and files of a box together have one limit",
    "pids": "a box cannot start more processes than it was given",
    "disk": "a box cannot write more than it was given",
    "output": "what a box prints cannot fill this process",
}
"""The guarantees, each in a sentence."""

REMEDIES: Mapping[str, str] = {
    "sandbox needs bwrap": "install it: apt-get install bubblewrap (0.8 or newer)",
    "sandbox needs setpriv": "install it: apt-get install util-linux",
    "Unknown option": "install bubblewrap 0.8 or newer; this one is older",
    "namespace": "allow user namespaces: sysctl -w user.max_user_namespaces=10000 kernel.unprivileged_userns_clone=1 "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --security-opt seccomp=unconfined --security-opt "
    "apparmor=unconfined --security-opt systempaths=unconfined",
    "proc": "in Docker: --security-opt systempaths=unconfined",
    "uid map": "allow user namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    "execvp": "set sandbox.python to an interpreter that every user may read and run, e.g. /usr/bin/python3",
    "bind": "set sandbox.python to an interpreter in a folder that every user may read, e.g. /usr/bin/python3",
}
"""Advice, by a part of the reason why no box starts."""
ANY = "install bubblewrap 0.8 or newer and allow user namespaces (docs/howto/sandbox.md)"
GROUPS = (
    "as root use a machine or container whose control groups are writable (Docker: --privileged, or --cgroupns=host -v "
    "/sys/fs/cgroup:/sys/fs/cgroup:rw); as a user start with: systemd-run --user --scope -p Delegate=yes flexmarl ...; "
    "or accept limits of single processes by sandbox.accept=[rlimits]"
)
FILTER = "use a kernel with CONFIG_SECCOMP_FILTER, and Debian's bubblewrap as it is"

TRYING = """
found = {}
def attempt(guarantee, what, through):
    try:
        if through():
            found.setdefault(guarantee, []).append(what)
    except (OSError, ValueError):
        pass
"""
"""Begins both lists of attempts: what got through, by guarantee."""
ATTEMPTS = (
    TRYING
    + """
import ctypes, errno, json, os, socket
def reads(path):
    with open(path, "rb") as file:
        return bool(file.read(16))
def writes(path):
    with open(path, "wb") as file:
        return file.write(b"x") == 1
def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(1)
        one.connect(address)
    return True
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(number, *arguments) >= 0
ARM = os.uname().machine == "aarch64"
for path in (SECRET, "/etc/passwd", "/etc/shadow", "/root/.bashrc", "/sys/fs/cgroup"):
    attempt("filesystem", "read " + path, lambda: reads(path))
attempt("disk", "write into /dev", lambda: writes("/dev/flexmarl-probe"))
for path in ("/usr/flexmarl-probe", "/flexmarl-probe", "/driver.py", "/proc/sys/kernel/core_pattern"):
    attempt("filesystem", "write " + path, lambda: writes(path))
attempt("filesystem", "read the environment of process 1", lambda: reads("/proc/1/environ"))
attempt("network", "connect to this machine", lambda: connects(socket.AF_INET, ("127.0.0.1", PORT)))
attempt("network", "connect to an abstract socket", lambda: connects(socket.AF_UNIX, "\\0" + ABSTRACT))
attempt("network", "see an interface", lambda: {name for _, name in socket.if_nameindex()} - {"lo"})
attempt("processes", "see process %d" % PID, lambda: os.path.exists("/proc/%d/status" % PID))
attempt("processes", "see many processes", lambda: len([one for one in os.listdir("/proc") if one.isdigit()]) > 8)
attempt("syscalls", "make a user namespace", lambda: call(97 if ARM else 272, 0x10000000))
attempt("syscalls", "trace", lambda: call(117 if ARM else 101, 0, 0, 0, 0))
attempt("syscalls", "open a ring", lambda: call(425, 1, ctypes.create_string_buffer(120)))
attempt("syscalls", "read keys", lambda: call(219 if ARM else 250, 0, -3, 1))
attempt("syscalls", "open a netlink socket", lambda: socket.socket(16, socket.SOCK_RAW, 0))
try:
    for folder in ("/box", "/tmp", "/dev/shm"):
        written = 0
        try:
            with open(folder + "/probe", "wb", buffering=0) as file:
                for _ in range(64):
                    written += file.write(bytes(1 << 20))
        except OSError:
            pass
        if written > 8 << 20:
            found.setdefault("disk", []).append("write %d MiB into %s" % (written >> 20, folder))
        if os.path.exists(folder + "/probe"):
            os.unlink(folder + "/probe")
finally:
    print(json.dumps(found))
"""
)
FORKS = """
import os, time
children = 0
try:
    while children < 64:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        children += 1
except OSError:
    pass
print(children)
"""
FILLS = """
import os, time
for _ in range(6):
    if os.fork() == 0:
        held = bytearray(24 << 20)
        time.sleep(3)
        os._exit(0)
codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(6)]
print(codes.count(0))
"""
FLOODS = "import os\nfor _ in range(64): os.write(1, b'x' * 65536)"

REMOTE_ATTEMPTS = (
    TRYING
    + """
import json, socket
def reads(path, text):
    with open(path) as file:
        return text in file.read(4096)
def connects(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(2)
        one.connect(address)
    return True
attempt("filesystem", "read a file of this machine", lambda: reads(SECRET, TOKEN))
attempt("network", "connect to this machine", lambda: connects(socket.AF_INET, ("127.0.0.1", PORT)))
attempt("network", "connect to an abstract socket of this machine", lambda: connects(socket.AF_UNIX, "\\0" + ABSTRACT))
for address in BEYOND:
    attempt("network", "connect to " + address, lambda: connects(socket.AF_INET, (address, 443)))
attempt("processes", "see process %d of this machine" % PID, lambda: reads("/proc/%d/stat" % PID, STAT))
print(json.dumps(found))
"""
)
"""Attempts from a box of a service at what its guarantees mean here: this machine, and the world."""
BEYOND = ("1.1.1.1", "8.8.8.8")
"""Addresses of the internet that answer anybody."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One guarantee of a sandbox, as it was tried."""

    name: str
    held: bool
    found: str
    """A sentence on what it means, or on what got through."""
    remedy: str = ""
    """Advice, if it was not held."""


async def probed(sandbox: Sandbox, *, accepted: Sequence[str] = ()) -> list[Guarantee]:
    """Tries every guarantee, in half a second. `accepted`: weaker ones that are good enough, e.g. `rlimits`."""
    with _surroundings() as known:
        try:
            through = await _attempts(sandbox, SMALL, _named(known) + ATTEMPTS)
        except EpisodeError as error:
            return _none(str(error))
    if "rlimits" in accepted:
        through["memory"] = through["pids"] = None
    return [_tried(name, through.get(name)) for name in GUARANTEES]


async def probed_remote(sandbox: Sandbox, settings: RemoteSandbox) -> list[Guarantee]:
    """Tries, in a box of a service, what can be tried of the guarantees that the service promises.

    One that it does not promise is not held, unless the settings accept that it is missing.
    """
    with _surroundings() as known:
        try:
            through = await _remote_attempts(sandbox, _named(known) + REMOTE_ATTEMPTS)
        except EpisodeError as error:
            return [Guarantee(name, False, str(error), f"check {_checked_keys(settings)}") for name in GUARANTEES]
    return [_promised(name, through.get(name), settings) for name in GUARANTEES]


def _promised(name: str, through: str | None, settings: RemoteSandbox) -> Guarantee:
    """A guarantee of a service, after it was tried."""
    reason = settings.unpromised.get(name)
    if reason is not None and name in settings.accept:
        return Guarantee(name, True, f"missing, and accepted: {reason}")
    if reason is not None:
        every = ", ".join(settings.unpromised)
        return Guarantee(name, False, reason, f"use sandbox.type=bubblewrap, or accept it: sandbox.accept=[{every}]")
    if through:
        return Guarantee(name, False, f"got through: {through}", "use a service that isolates its boxes, or bubblewrap")
    return Guarantee(name, True, "held by the service")


def _checked_keys(settings: RemoteSandbox) -> str:
    """The settings by which a service is reached."""
    if settings.type == "sandbox_fusion":
        return f"that the server of sandbox.url={settings.url} runs, and sandbox.patience_s={settings.patience_s:g}"
    return f"the variable sandbox.key_env={settings.key_env}, and sandbox.template={settings.template}"


@contextmanager
def _surroundings() -> Iterator[dict[str, Any]]:
    """Things of this machine that no box may reach, by the names that attempts have for them."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory(prefix="flexmarl-") as folder:
        secret = Path(folder) / "secret"
        secret.write_text(f"nobody may read this: {secrets.token_hex(8)}")
        os.chmod(folder, 0o755)
        abstract = f"flexmarl-probe-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as hidden:
            hidden.bind(f"\0{abstract}")
            hidden.listen()
            yield {
                "SECRET": str(secret),
                "TOKEN": secret.read_text(),
                "PORT": listener.getsockname()[1],
                "ABSTRACT": abstract,
                "PID": os.getpid(),
                "STAT": _start_of(os.getpid()),
                "BEYOND": BEYOND,
            }


def _start_of(pid: int) -> str:
    """The start of a process as its status has it: that of one with the same id on another machine differs."""
    return f" {Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]} "


def _named(known: Mapping[str, Any]) -> str:
    """Names and their values, as Python."""
    return "".join(f"{name} = {value!r}\n" for name, value in known.items())


async def _attempts(sandbox: Sandbox, small: Limits, attempts: str) -> dict[str, str | None]:
    """The attempts that got through, by guarantee."""
    through: dict[str, str | None] = {}
    async with sandbox.open({}, small) as box:
        outcome = await box.run(attempts, timeout_s=PROBE_S)
        try:
            found: dict[str, Any] = json.loads(outcome.stdout)
        except ValueError:
            raise EpisodeError(f"the probe failed in its box: {outcome.stderr[-300:] or outcome.ended}") from None
        through |= {name: ", ".join(what) for name, what in found.items()}
        flood = await box.run(FLOODS, timeout_s=PROBE_S)
        if len(flood.stdout) > MIB or not flood.dropped_bytes:
            through["output"] = f"{len(flood.stdout)} bytes were kept"
    async with sandbox.open({}, small) as box:
        forks = await box.run(FORKS, timeout_s=PROBE_S)
        if forks.ended is Ended.EXITED and forks.stdout.strip().isdigit() and int(forks.stdout) > small.pids:
            through["pids"] = f"{forks.stdout.strip()} processes were started, with a limit of {small.pids}"
    async with sandbox.open({}, small) as box:
        fills = await box.run(FILLS, timeout_s=PROBE_S)
        if fills.ended is Ended.EXITED and fills.stdout.strip() == "6":
            through["memory"] = "144 MiB in 6 processes, with a limit of 96 MiB"
    return through


def _none(reason: str) -> list[Guarantee]:
    """All guarantees but those that a reason leaves, because no box can be opened."""
    if "limit the memory" in reason or "control group" in reason:
        return [Guarantee(name, False, reason, GROUPS) for name in ("memory", "pids")]
    remedy = next((remedy for part, remedy in REMEDIES.items() if part in reason), ANY)
    if "seccomp" in reason.lower():
        return [Guarantee("syscalls", False, reason, FILTER)]
    return [Guarantee(name, False, reason, remedy) for name in GUARANTEES]


def _tried(name: str, through: str | None) -> Guarantee:
    if not through:
        return Guarantee(name, True, GUARANTEES[name])
    remedy = {"memory": GROUPS, "pids": GROUPS, "syscalls": FILTER}.get(name, ANY)
    return Guarantee(name, False, f"got through: {through}", remedy)


async def _remote_attempts(sandbox: Sandbox, attempts: str) -> dict[str, str | None]:
    """The attempts from a box of a service that got through, by guarantee."""
    async with sandbox.open({}) as box:
        outcome = await box.run(attempts, timeout_s=PROBE_S)
        try:
            found: dict[str, Any] = json.loads(outcome.stdout)
        except ValueError:
            raise EpisodeError(f"the probe failed in its box: {outcome.stderr[-300:] or outcome.ended}") from None
        through: dict[str, str | None] = {name: ", ".join(what) for name, what in found.items()}
        flood = await box.run(FLOODS, timeout_s=PROBE_S)
        if len(flood.stdout) + flood.dropped_bytes != 4 * MIB or not flood.dropped_bytes:
            through["output"] = f"{len(flood.stdout)} bytes of output were kept of 4 MiB"
    return through


def check_guarantees(guarantees: Sequence[Guarantee], why: str, *, where: str = "this machine") -> None:
    """Raises ConfigError that names each guarantee that is missing, and what would help.

    `why`: who needs them. `where`: who cannot give them.
    """
    missing: dict[tuple[str, str], list[str]] = {}
    for one in guarantees:
        if not one.held:
            missing.setdefault((one.found, one.remedy), []).append(one.name)
    lines = [
        f"sandbox: {why}, and {where} cannot guarantee {', '.join(names)}: {found}; {remedy}"
        for (found, remedy), names in missing.items()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def probe_now(sandbox: Sandbox, settings: AnySandbox | None = None) -> list[Guarantee]:
    """Tries the guarantees on an event loop of its own: the caller may be in one, as in a notebook.

    `settings`: those of the sandbox; None: bubblewrap's defaults.
    """
    settings = settings or SandboxSettings()
    if isinstance(settings, SandboxSettings):
        trial = probed(sandbox, accepted=settings.accept)
    else:
        trial = probed_remote(sandbox, settings)
    with ThreadPoolExecutor(1, thread_name_prefix="flexmarl-probe") as thread:
        return thread.submit(asyncio.run, trial).result()
