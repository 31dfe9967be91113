"""Decides what a journal says about the commands and the processes of a run.

| event             | fields                    | meaning                                                           |
|-------------------|---------------------------|-------------------------------------------------------------------|
| `run_started`     |                           | a command begins; its clock starts at about 0                     |
| `process_started` | `process`, `pid`, `node`  | a process runs; under a name that was lost, it is a replacement   |
| `process_lost`    | `process`, `because`      | it died, and nobody had stopped it                                |
| `instance_lost`   | `instance`, `because`     | the pool gave up the instance of process `engine/{instance}`      |
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexmarl.observability.journal import START


@dataclass(slots=True, kw_only=True)
class History:
    """The commands and the processes of a run."""

    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, `pid` and `node` of each process of the last command; the newest where one was replaced."""
    lost: int = 0
    """How often a process was lost, in all commands."""
    replaced: int = 0
    """How many of them were started again."""
    earlier_s: float = 0.0
    """Seconds that all commands before the last one took."""
    missing: set[str] = field(default_factory=set)
    """Lost, and not replaced so far."""


def history_of(entries: Iterable[Mapping[str, Any]]) -> History:
    """Reads a journal whose entries are on one clock."""
    history, latest = History(), 0.0
    for entry in entries:
        match entry["event"]:
            case event if event == START:
                history.processes, history.missing, history.earlier_s = {}, set(), latest
            case "process_started":
                history.processes[entry["process"]] = {"pid": entry["pid"], "node": entry["node"]}
                history.replaced += entry["process"] in history.missing
                history.missing.discard(entry["process"])
            case "process_lost":
                _lose(history, entry["process"])
            case "instance_lost":
                _lose(history, f"engine/{entry['instance']}")
        latest = entry["t"]
    return history


def _lose(history: History, process: str) -> None:
    """One loss may be told twice: by the cluster, whose process it was, and by the pool, whose instance it was."""
    history.lost += process not in history.missing
    history.missing.add(process)
