"""What a cluster offers: processes that hold one object each, and a typed event when one dies."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from flexmarl.records import WorkerLost


class WorkerRole(StrEnum):
    """Which pool of devices a worker belongs to."""

    ENGINE = "engine"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One process to start."""

    name: str
    """Unique while it lives; also its row on the timeline: `engine/solver/0`, `trainer/solver`."""
    role: WorkerRole
    make: Callable[[], Any]
    """Picklable; called once in the worker's process, after its threads are set. Its result is the hosted object."""
    device: str = "cpu"
    """`cpu`, or `cuda`: then it has one accelerator to itself, which it sees as `cuda:0`."""
    threads: int = 1
    """CPU threads of one torch operation there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker runs."""

    node: str
    """Address of the machine."""
    pid: int


class Worker(Protocol):
    """One live process, seen from the controller. Called from one event loop, any number of calls at once."""

    @property
    def name(self) -> str:
        """As in its WorkerSpec."""
        ...

    @property
    def place(self) -> WorkerPlace:
        """Where it runs."""
        ...

    async def call(self, method: str, *args: Any) -> Any:
        """Awaits `method(*args)`, which may be async, on the hosted object; arguments and result are copied across.

        An exception of the method comes back as itself, as far as it can be pickled. Raises WorkerError if the process
        is gone or goes meanwhile. Cancelling the call stops the wait, not the work.
        """
        ...

    async def stop(self) -> None:
        """Ends the process, at once; calls under way raise WorkerError. Not a loss. Calling it twice is no error."""
        ...


class Cluster(Protocol):
    """The processes of one run. An async context manager: after it nothing is left, whatever happened inside."""

    on_lost: Callable[[WorkerLost], None]
    """Told once of every worker that died without having been stopped, as soon as that is known."""

    async def spawn(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Starts workers side by side, and returns when each one's object is made.

        Raises ConfigError if there is no room for them, and the first error of a `make`; then none of them is left.
        """
        ...

    async def close(self) -> None:
        """Ends every worker, and what was started for them; calling it twice is no error."""
        ...
