"""Sandboxes of a service that processes of this machine have open: recorded, so that `flexmarl clean` can end them.

    {temp}/flexmarl-{uid}-sandboxes/ix3k9q2.json
        {"pid": 4711, "started": 1764123456.5, "key_env": "E2B_API_KEY", "domain": ""}

A record is named by the sandbox's id, and goes when the sandbox has ended. It holds no key. Where its process is dead,
the sandbox was left behind.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flexmarl.cluster.own_folder import own_folder
from flexmarl.cluster.remains import SAME_START_S, started_at

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""The form of a sandbox's id: it names a file."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class LeasedSandbox:
    """One sandbox, with the process that opened it and the account that it is of."""

    sandbox_id: str
    pid: int
    started: float
    key_env: str
    """Environment variable that holds the account's key."""
    domain: str = ""
    """Domain of the service; empty: the service's own."""

    @classmethod
    def of_this_process(cls, sandbox_id: str, key_env: str, domain: str) -> "LeasedSandbox":
        """A sandbox that this process has opened. Raises ValueError if its id has another form than E2B's."""
        if not ID.fullmatch(sandbox_id):
            raise ValueError(f"{sandbox_id[:40]!r} is no id of a sandbox")
        return cls(sandbox_id, os.getpid(), started_at(os.getpid()) or 0.0, key_env, domain)

    @property
    def left_behind(self) -> bool:
        """True if its process has ended."""
        now = started_at(self.pid)
        return now is None or abs(now - self.started) >= SAME_START_S

    def record(self, root: Path | None = None) -> None:
        """Writes it down. Raises OSError if that is impossible, ConfigError if the folder is not this user's alone."""
        path = own_folder(root or records_root()) / f"{self.sandbox_id}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)

    def forget(self, root: Path | None = None) -> None:
        """Removes its record. Calling it twice is allowed."""
        ((root or records_root()) / f"{self.sandbox_id}.json").unlink(missing_ok=True)


def records_root(temp: Path | None = None) -> Path:
    """The folder of the records of this user."""
    return (temp or Path(tempfile.gettempdir())) / f"flexmarl-{os.getuid()}-sandboxes"


def left_sandboxes(root: Path | None = None) -> Iterator[LeasedSandbox]:
    """The sandboxes that dead processes left. Raises ConfigError if the folder is not this user's alone."""
    root = root or records_root()
    if not os.path.lexists(root):
        return
    for path in sorted(own_folder(root).glob("*.json")):
        leased = _read(path)
        if leased is not None and leased.left_behind:
            yield leased


def _read(path: Path) -> LeasedSandbox | None:
    """A record; None if it is none, or is gone."""
    try:
        leased = LeasedSandbox(**json.loads(path.read_text()))
        sound = (
            leased.sandbox_id == path.stem
            and ID.fullmatch(leased.sandbox_id)
            and VARIABLE.fullmatch(leased.key_env)
            and isinstance(leased.domain, str)
            and leased.pid > 0
            and leased.started >= 0
        )
    except (OSError, TypeError, ValueError):
        return None
    return leased if sound else None
