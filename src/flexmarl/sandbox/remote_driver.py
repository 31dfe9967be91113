"""The program inside a remote kernel: it answers requests with the functions of driver.py. It imports nothing of
flexmarl.

A request has a nonce. One that is sent again, because its answer got lost on the way, is not run again: its reply is
kept. The reply is shown as a kernel shows the value of a cell, as one line of JSON.
"""

import binascii
import contextlib
import io
import json
import os
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import Any


class Shown:
    """A reply; its repr is JSON."""

    def __init__(self, reply: dict) -> None:
        self.text = json.dumps(reply)

    def __repr__(self) -> str:
        return self.text


class Kernel:
    """The session of one box in a kernel."""

    def __init__(self, driver: Any, root: str, limits: dict, output_bytes: int, files: str = "") -> None:
        """`driver`: the module driver.py. `root`: the working folder. `files`: where its first files are packed."""
        self.driver, self.output_bytes = driver, output_bytes
        self.root = driver.ROOT = os.path.abspath(os.path.expanduser(root))
        os.makedirs(self.root, exist_ok=True)
        if files:
            unpack(driver, files)
        os.chdir(self.root)
        sys.path.insert(0, self.root)
        self.session = {"__name__": "__main__", "__builtins__": __builtins__}
        self.last: tuple[str, Shown] | None = None
        if "RLIMIT_DATA" in limits:
            limits = {**limits, "RLIMIT_DATA": limits["RLIMIT_DATA"] + data_bytes()}
        for name, most in limits.items():
            hard = resource.getrlimit(getattr(resource, name))[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(getattr(resource, name), (most, most))

    def answer(self, nonce: str, request: str, pack: str = "", most: int = 0) -> Shown:
        """The reply to a request in JSON. `pack`: file for the box's files, packed, of at most `most` bytes."""
        print(nonce, flush=True)  # The request has begun.
        if self.last is None or self.last[0] != nonce:
            self.last = nonce, Shown({**self._reply(json.loads(request)), "nonce": nonce})
            if pack:
                packed(self.root, pack, most)
        return self.last[1]

    def _reply(self, request: dict) -> dict:
        """The reply, with what was printed. `interrupted`: a signal from outside ended it, not its time."""
        struck: list[int] = []

        def strike(number: int, frame: object) -> None:
            struck.append(number)
            raise self.driver.Interrupted

        before = signal.signal(signal.SIGINT, strike)
        try:
            with outputs() as (out, err):
                try:
                    reply = self.driver.answer(request, self.session)
                except self.driver.Interrupted:
                    reply = {}
            kept = [beginning(file, self.output_bytes) for file in (out, err)]
        finally:
            signal.signal(signal.SIGINT, before)
        reply |= {"stdout": kept[0][0], "stderr": kept[1][0], "dropped": kept[0][1] + kept[1][1]}
        return {**reply, "interrupted": True} if struck else reply


@contextlib.contextmanager
def outputs() -> Iterator[tuple[Any, Any]]:
    """Sends both outputs into files for the length of a block, those of commands too."""
    with contextlib.ExitStack() as stack:
        files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # `beginning` closes them.
        streams = sys.stdout, sys.stderr
        for number, file in zip((1, 2), files, strict=True):
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        raw = [io.FileIO(number, "w", closefd=False) for number in (1, 2)]
        ours = [
            io.TextIOWrapper(io.BufferedWriter(one), "utf-8", "backslashreplace", write_through=True) for one in raw
        ]
        sys.stdout, sys.stderr = ours
        try:
            yield files[0], files[1]
        finally:
            for one in ours:
                with contextlib.suppress(OSError, ValueError):
                    one.flush()
            sys.stdout, sys.stderr = streams


def beginning(file: Any, most: int) -> tuple[str, int]:
    """The first bytes of a file as text, and how many more there are. Closes the file."""
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        return file.read(most).decode("utf-8", "backslashreplace"), max(0, size - most)


def data_bytes() -> int:
    """Private memory that the kernel has by itself."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return int(lines["VmData"].split()[0]) * 1024


def unpack(driver: Any, path: str) -> None:
    """Writes packed files below the root."""
    with open(path) as file:
        for name, (mode, data) in json.load(file).items():
            driver.write_file(name, binascii.a2b_base64(data))
            os.chmod(os.path.join(driver.ROOT, name), mode & 0o777 | 0o600)


def packed(root: str, path: str, most: int) -> None:
    """Packs the regular files below the root into JSON; `null` if they have more bytes than `most`."""
    found: dict[str, list] | None = {}
    size = 0
    for folder, _, names in os.walk(root):
        for name in names:
            full = os.path.join(folder, name)
            status = os.lstat(full)
            if found is None or not stat.S_ISREG(status.st_mode):
                continue
            size += status.st_size
            if size > most:
                found = None
                continue
            with contextlib.suppress(OSError), open(full, "rb") as file:
                data = binascii.b2a_base64(file.read(), newline=False).decode()
                found[os.path.relpath(full, root)] = [stat.S_IMODE(status.st_mode), data]
    with open(path, "w") as file:
        json.dump(found, file)
