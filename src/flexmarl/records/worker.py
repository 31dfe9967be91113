"""What becomes known about the processes of a run."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """A worker's process died, and nobody had stopped it."""

    name: str
    """`engine/solver/0`, `trainer/solver`."""
    node: str
    pid: int
    because: str
