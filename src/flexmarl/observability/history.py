"""Decides what a journal says about the commands and the processes of a run.

| event               | fields                   | meaning                                                         |
|---------------------|--------------------------|-----------------------------------------------------------------|
| `process_started`   | `process`, `pid`, `node` | a process runs; under a name that was lost, it is a replacement |
| `worker_lost`       | `process`, `because`     | it died, and nobody had stopped it                              |
| `instance_lost`     | `instance`, `because`    | the pool gave up the instance of process `engine/{instance}`    |
| `instance_replaced` | `instance`, `replaces`   | another instance serves in place of one that was lost           |
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class History:
    """The commands and the processes of a run."""

    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, `pid` and `node` of each process of the last command that was not lost."""
    lost: int = 0
    """How often a process was lost, in all commands."""
    replaced: int = 0
    """How many of them had a successor."""
    earlier_s: float = 0.0
    """Seconds that all commands before the last one took."""
    missing: set[str] = field(default_factory=set)
    """Lost, and not replaced so far."""


def history_of(entries: Iterable[Mapping[str, Any]]) -> History:
    """Reads a journal as `read_run` yields it."""
    history, command, latest = History(), 1, 0.0
    for entry in entries:
        if entry["command"] != command:
            command = entry["command"]
            history.processes, history.missing, history.earlier_s = {}, set(), latest
        match entry["event"]:
            case "process_started":
                history.processes[entry["process"]] = {"pid": entry["pid"], "node": entry["node"]}
                _replace(history, entry["process"])
            case "worker_lost":
                _lose(history, entry["process"])
            case "instance_lost":
                _lose(history, f"engine/{entry['instance']}")
            case "instance_replaced":
                _replace(history, f"engine/{entry['replaces']}")
        latest = max(latest, entry["t"])
    return history


def _lose(history: History, process: str) -> None:
    """One loss may be told twice: by the cluster, whose process it was, and by the pool, whose instance it was."""
    history.lost += process not in history.missing
    history.missing.add(process)
    history.processes.pop(process, None)


def _replace(history: History, process: str) -> None:
    history.replaced += process in history.missing
    history.missing.discard(process)
