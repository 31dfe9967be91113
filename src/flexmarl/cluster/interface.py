"""What a cluster offers: residents, and a typed event when one is lost.

A resident is one thing that lives outside the controller: an engine replica, a trainer, and later the store's service,
a rollout worker, a node agent, a rank of a place, a sandbox pool. What the controller holds of it is one handle.

    spec = ResidentSpec(name="trainer/solver", kind=ResidentKind.TRAINER, contract=Trainer, make=make_trainer)
    (resident,) = await cluster.spawn([spec])
    await resident.remote.publish(version)      # a method of `Trainer`, wherever the trainer lives
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flexmarl.errors import ConfigError, FlexmarlError, WorkerError
from flexmarl.events.hub import Events

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResidentKind(StrEnum):
    """Which pool of devices a resident belongs to."""

    ENGINE = "engine"
    TRAINER = "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSpec(Generic[T_co]):
    """One resident to start, in whichever processes its cluster has for it."""

    name: str
    """Unique while it lives; also its row on the timeline: `engine/solver/0`, `trainer/solver`."""
    kind: ResidentKind
    contract: type
    """The Protocol of what lives there. Its methods, all of them async, are what can be called from the controller."""
    make: Callable[[], T_co]
    """Picklable. Called once where the resident lives, after its threads are set; returns what lives there."""
    error: type[FlexmarlError] = WorkerError
    """Raised by calls when the resident is lost."""
    advice: str = ""
    """The end of that error: what the user can do."""
    devices: int = 0
    """Accelerators of each rank, which sees them as `cuda:0` and up; 0: it computes on the CPU."""
    threads: int = 1
    """CPU threads of one torch operation there."""
    ranks: int = 1
    """Processes that run every call side by side; rank 0 answers."""
    node: str | None = None
    """Name of the node that it must be on; None: the cluster chooses."""
    python: Path | None = None
    """Interpreter of its processes; None: the controller's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlace:
    """Where a resident lives."""

    node: str
    """Address of the machine."""
    pid: int


class Resident(Protocol[T_co]):
    """The controller's handle of one live resident. Used from one event loop."""

    @property
    def name(self) -> str:
        """As in its spec."""
        ...

    @property
    def place(self) -> ResidentPlace:
        """Where it lives."""
        ...

    @property
    def remote(self) -> T_co:
        """What lives there, called by its contract; any number of calls at once.

        In another process, arguments and results are copied. An exception comes back as itself, as far as it can be
        pickled. If the resident is lost, calls raise the spec's `error`. Cancelling a call ends the wait, not the work.
        """
        ...

    async def stop(self) -> None:
        """Ends it, at once; calls under way raise the spec's `error`. Not a loss. Calling it twice is allowed."""
        ...


class Cluster(Protocol):
    """The residents of one run. An async context manager: after it none is left, whatever happened inside.

    It emits `WorkerLost` once for every resident that ended without having been stopped, as soon as that is known.
    """

    @property
    def events(self) -> Events:
        """Where it emits them."""
        ...

    @property
    def crosses(self) -> bool:
        """Whether residents live in other processes, so that every call is copied and takes a crossing."""
        ...

    @property
    def has_processes(self) -> bool:
        """Whether each resident has a process of its own, real or modelled, which can be lost."""
        ...

    async def spawn(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        """Starts residents side by side; returns when everything that lives in them is made.

        Raises ConfigError if there is no room for them, and the first error of a `make`; then none of them is left.
        """
        ...

    async def close(self) -> None:
        """Ends every resident, and what was started for them. Calling it twice is allowed."""
        ...


def require_one_process(spec: ResidentSpec[Any], *, nodes: Sequence[str]) -> None:
    """Raises ConfigError if a spec asks for more than one process on one of these nodes with this interpreter."""
    if spec.ranks != 1:
        raise ConfigError(f"{spec.name}: ranks is {spec.ranks}; residents of this cluster have one rank, use ranks=1")
    if spec.node is not None and spec.node not in nodes:
        raise ConfigError(f"{spec.name}: node is '{spec.node}', this cluster has {', '.join(nodes)}; use one of these")
    if spec.python is not None:
        raise ConfigError(
            f"{spec.name}: python is {spec.python}; residents of this cluster run on the controller's interpreter"
        )
