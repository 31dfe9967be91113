"""Boxes on bubblewrap (Linux, 0.8 or newer), as root and as a user: namespaces, filtered calls, a control group.

sh: enters the group ──► setpriv: root becomes nobody ──► bwrap, with an empty environment ──► driver.py

Root is given up before bwrap starts: uid 65534 of a namespace that root makes is root outside. bwrap itself starts with
an empty environment, because /proc/1/environ in the box is its own.
"""

import asyncio
import errno
import inspect
import os
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexmarl.errors import EpisodeError
from flexmarl.sandbox import driver
from flexmarl.sandbox.backends.cgroups import BoxGroup, Cgroups
from flexmarl.sandbox.backends.open_box import OpenBox, Output
from flexmarl.sandbox.backends.seccomp import filter_of
from flexmarl.sandbox.interface import NOBODY, Limits
from flexmarl.sandbox.settings import SandboxSettings

ENTER = 'for f in $1; do echo 0 > "$f" || exit 97; done; shift; unset PWD OLDPWD; exec "$@"'
"""Enters the control groups whose files are the first argument, then runs the rest."""
TIED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders that are links into /usr on most systems."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/box",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
START_S = 20.0
"""Longest time in which a box starts."""


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """The Sandbox on bubblewrap. It can be pickled: another process opens its own boxes."""

    settings: SandboxSettings = field(default_factory=SandboxSettings)

    @asynccontextmanager
    async def open(
        self,
        files: Mapping[str, str | bytes] = {},
        limits: Limits | None = None,
        *,
        relay: Path | None = None,
        reads: Sequence[Path] = (),
    ) -> AsyncIterator[OpenBox]:
        """Opens a box: about 60 ms. See `Sandbox`."""
        limits = limits or self.settings.limits
        async with AsyncExitStack() as undone:
            group = self._group(limits)
            if group:
                undone.push_async_callback(lambda: asyncio.shield(group.remove()))
            try:
                process, ours, outputs = await self._started(limits, group, undone, relay, reads)
            except OSError as error:
                raise EpisodeError(f"the sandbox cannot start a box: {_remedied(error)}") from error
            undone.pop_all()
        box = OpenBox(process, ours, outputs, group)
        try:
            await box.begin(self._held(limits, group), START_S)
            for name, content in files.items():
                await box.write(name, content.encode() if isinstance(content, str) else content)
            yield box
        finally:
            await asyncio.shield(box.end())

    async def _started(
        self, limits: Limits, group: BoxGroup | None, undone: AsyncExitStack, relay: Path | None, reads: Sequence[Path]
    ) -> tuple[asyncio.subprocess.Process, socket.socket, tuple[Output, Output]]:
        """The process of a box, our end of its channel, and its outputs; `undone` closes these if it fails."""
        with ExitStack() as its_own:
            outputs = Output(limits.output_bytes, undone, its_own), Output(limits.output_bytes, undone, its_own)
            ours, theirs = socket.socketpair()
            undone.callback(ours.close)
            its_own.callback(theirs.close)
            ours.setblocking(False)
            passed = [theirs.fileno()]
            for content in (filter_of(), inspect.getsource(driver).encode()):
                passed.append(_in_memory(content))
                its_own.callback(os.close, passed[-1])
            process = await asyncio.create_subprocess_exec(
                *self._command(limits, group, passed, relay, reads),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=outputs[0].theirs,
                stderr=outputs[1].theirs,
                pass_fds=passed,
                env={},
                cwd="/",
                start_new_session=True,
            )
            return process, ours, outputs

    def _group(self, limits: Limits) -> BoxGroup | None:
        found = cgroups_here()
        if isinstance(found, Cgroups):
            try:
                return found.group(limits)
            except OSError as error:
                raise EpisodeError(f"the sandbox cannot make a control group: {_remedied(error)}") from error
        if "rlimits" in self.settings.accept:
            return None
        raise EpisodeError(f"the sandbox cannot limit the memory of a box: {found}; see `flexmarl sandbox probe`")

    def _held(self, limits: Limits, group: BoxGroup | None) -> Mapping[str, int]:
        """Limits of each process in the box."""
        held = {"RLIMIT_CPU": limits.cpu_s, "RLIMIT_FSIZE": limits.disk_bytes, "RLIMIT_CORE": 0, "RLIMIT_NOFILE": 512}
        if group is None:
            held |= {"RLIMIT_AS": limits.memory_bytes, "RLIMIT_NPROC": limits.pids}
        return held

    def _command(
        self, limits: Limits, group: BoxGroup | None, passed: list[int], relay: Path | None, reads: Sequence[Path]
    ) -> list[str]:
        channel, calls, program = map(str, passed)
        python = python_of(self.settings)
        size = str(limits.disk_bytes)
        command = ["/bin/sh", "-c", ENTER, "sh", " ".join(group.entries if group else [])]
        if os.geteuid() == 0:
            command += [_needed("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        command += [_needed("bwrap"), "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net"]
        command += ["--unshare-uts", "--unshare-cgroup-try", "--disable-userns", "--hostname", "box"]
        command += ["--cap-drop", "ALL"]
        command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--die-with-parent", "--new-session", "--clearenv"]
        for name, value in ENVIRONMENT.items():
            command += ["--setenv", name, value]
        command += ["--ro-bind", "/usr", "/usr"]
        for tied in TIED:
            if os.path.islink(tied):
                command += ["--symlink", os.readlink(tied), tied]
            elif os.path.isdir(tied):
                command += ["--ro-bind", tied, tied]
        if not (prefix := Path(python).parent.parent).is_relative_to("/usr"):
            if Path.home().is_relative_to(prefix):
                at = f"sandbox.python is {self.settings.python!r}"
                raise EpisodeError(f"{at}, and a box would read all of {prefix}; use e.g. /usr/bin/python3")
            command += ["--ro-bind", str(prefix), str(prefix)]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for folder in ("/tmp", "/dev/shm", "/box"):
            command += ["--size", size, "--tmpfs", folder]
        command += ["--perms", "0444", "--ro-bind-data", program, "/driver.py"]
        for path in map(str, reads):
            command += ["--ro-bind", path, path]
        if relay is not None:
            command += ["--bind", str(relay), "/run/relay.sock"]
        command += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", calls, "--chdir", "/box"]
        return [*command, python, "-I", "-B", "/driver.py", channel]


_CGROUPS: list[Cgroups | str] = []


def cgroups_here() -> Cgroups | str:
    """The control groups of this process, found once; a text says why there are none."""
    if not _CGROUPS:
        _CGROUPS.append(Cgroups.here())
    return _CGROUPS[0]


def python_of(settings: SandboxSettings) -> str:
    """The interpreter of a box, without links."""
    if settings.python != "auto":
        return os.path.realpath(settings.python)
    here = ("/usr/bin/python3", "/usr/local/bin/python3", os.path.join(sys.base_prefix, "bin", "python3"))
    return os.path.realpath(next((one for one in here if os.path.exists(one)), sys.executable))


def _needed(program: str) -> str:
    """The path of a program. Raises EpisodeError that names the package."""
    if (found := shutil.which(program)) is None:
        package = {"bwrap": "bubblewrap", "setpriv": "util-linux"}[program]
        raise EpisodeError(f"the sandbox needs {program}: apt-get install {package}")
    return found


def _remedied(error: OSError) -> str:
    return f"{error}; raise the limit by `ulimit -n`" if error.errno == errno.EMFILE else str(error)


def _in_memory(data: bytes) -> int:
    """A descriptor of a file that has no name, at its begin."""
    descriptor: Any = os.memfd_create("flexmarl")
    os.write(descriptor, data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
