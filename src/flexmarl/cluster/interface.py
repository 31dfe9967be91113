"""Interface of a cluster: residents, and a typed event when one is lost.

A resident is one object that lives outside the controller: an engine replica, a trainer, a rollout worker, the store's
service, and later a rank of a place, a sandbox pool. The controller has one handle of each.

    spec = ResidentSpec(name=WorkerId.trainer("solver"), kind=ResidentKind.TRAINER, contract=Trainer, make=make_trainer)
    (resident,) = await cluster.spawn([spec])
    await resident.remote.publish(version)      # a method of `Trainer`, wherever the trainer lives
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from flexmarl.errors import ConfigError, FlexmarlError, WorkerError
from flexmarl.events.event import Events
from flexmarl.records import WorkerId

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResidentKind(StrEnum):
    """The part that a resident has in the run."""

    ENGINE = "engine"
    TRAINER = "trainer"
    RANK = "rank"
    """Trains policies in turns, on one place."""
    ROLLOUT = "rollout"
    """Plays episodes."""
    STORE = "store"
    """Reads and writes the store's file for residents on other nodes."""
    NODE = "node"
    """Looks after the run's files and processes on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One machine of a cluster."""

    name: str
    """Unique in the cluster."""
    id: str
    """Unique for all time: a machine that comes back has another one."""
    address: str
    """Address in the network."""
    cpus: int
    """Residents that fit on it, as each takes one."""
    devices: int
    """Accelerators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentSpec(Generic[T_co]):
    """Describes one resident to start."""

    name: WorkerId
    """Unique while it lives. It is also the resident's row on the timeline."""
    kind: ResidentKind
    contract: type
    """The Protocol of the hosted object. Its methods, all of them async, can be called from the controller."""
    make: Callable[[], T_co]
    """Makes the hosted object. Picklable; called once where the resident lives, after its threads are set."""
    error: type[FlexmarlError] = WorkerError
    """Raised by calls when the resident is lost."""
    advice: str = ""
    """The end of that error's text: what the user can do."""
    devices: int = 0
    """Accelerators of each rank, which sees them as `cuda:0` and up; 0 means that it computes on the CPU."""
    threads: int = 1
    """CPU threads of one torch operation in its process."""
    ranks: int = 1
    """Processes that all run every call at the same time; rank 0 answers."""
    node: str | None = None
    """Name of the node that it must run on; None lets the cluster choose."""
    group: str = ""
    """Residents that are spawned in one call and name the same group run on one node; without one, on any."""
    takes_turns: bool = False
    """True if it gives its devices up for a resident of the other pool, and gets them back: engines and ranks of the
    mode `colocated`. An engine and a rank then share one room of the cluster (placement.py)."""
    python: Path | None = None
    """Interpreter of its processes; None means the controller's."""
    in_controller: bool = False
    """True if it is an object of the controller's process in every cluster: it computes nothing, so that a process of
    its own would cost more than it does. It takes no room on a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlace:
    """The machine and the process of a resident."""

    node: str
    """Address of the machine."""
    pid: int


class Resident(Protocol[T_co]):
    """The controller's handle of one live resident. Used from one event loop."""

    @property
    def name(self) -> WorkerId:
        """The name in its spec."""
        ...

    @property
    def place(self) -> ResidentPlace:
        """The node and the process that it lives in."""
        ...

    @property
    def remote(self) -> T_co:
        """The hosted object, called by its contract. Any number of calls may run at once.

        If it is in another process, arguments and results are copied, and an exception keeps its type if it can be
        pickled. If the resident is lost, calls raise the spec's `error`. Cancelling a call ends the wait, not the work.
        """
        ...

    async def stop(self) -> None:
        """Ends it at once; calls under way raise the spec's `error`. That is no loss. Calling it twice is allowed."""
        ...


class Address(Protocol):
    """Reaches one resident by its name from any process of the run, also from another node. It can be pickled."""

    async def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the hosted object.

        Raises the method's own error, or WorkerError if the resident does not answer: it is lost, or is being started
        anew. Then nobody knows whether the work was done.
        """
        ...


class Cluster(Protocol):
    """The residents of one run. A context manager opens it and, at the end of its block, calls `close`.

    It emits `WorkerLost` once for every resident that ended without having been stopped, as soon as that is known. A
    resident that dies before its hosted object is made is no loss: `spawn` raises the error.
    """

    @property
    def events(self) -> Events:
        """Where it emits them."""
        ...

    @property
    def nodes(self) -> Sequence[ClusterNode]:
        """The live machines, the controller's first and then by name."""
        ...

    @property
    def crosses(self) -> bool:
        """True if residents live in other processes, so that every call is copied and takes a crossing."""
        ...

    @property
    def has_processes(self) -> bool:
        """True if each resident has a process of its own, real or modelled, which can be lost."""
        ...

    async def spawn(self, specs: Sequence[ResidentSpec[T]]) -> list[Resident[T]]:
        """Starts residents at the same time; returns when all their hosted objects are made.

        Raises ConfigError if there is no room for them or a live resident has one of their names, or the first error
        of a `make`. Then none of them is left.
        """
        ...

    def has_room(self, specs: Sequence[ResidentSpec[Any]], *, without: Collection[WorkerId] = ()) -> bool:
        """True if `spawn` would find room for all of `specs` now, if the residents of `without` had been stopped.

        Those of `specs` that have been spawned already, by their names, need no more room.
        """
        ...

    async def close(self) -> None:
        """Ends every resident, and everything that was started for them. Calling it twice is allowed."""
        ...


def require_one_process(spec: ResidentSpec[Any], *, nodes: Sequence[str], own_python: bool = False) -> None:
    """Raises ConfigError unless a spec asks for one rank, no node outside `nodes`, and the controller's interpreter.

    With `own_python`, any interpreter is right.
    """
    if spec.ranks != 1:
        raise ConfigError(f"{spec.name}: ranks is {spec.ranks}; residents of this cluster have one rank, use ranks=1")
    if spec.node is not None and spec.node not in nodes:
        raise ConfigError(f"{spec.name}: node is '{spec.node}', this cluster has {', '.join(nodes)}; use one of these")
    if spec.python is not None and not own_python:
        raise ConfigError(
            f"{spec.name}: python is {spec.python}; residents of this cluster run on the controller's interpreter"
        )


def require_new_names(specs: Sequence[ResidentSpec[Any]], *, taken: Iterable[str]) -> None:
    """Raises ConfigError if two of `specs` have one name, or one has a name of `taken`: those of live residents."""
    names = set(taken)
    for spec in specs:
        if spec.name in names:
            raise ConfigError(
                f"{spec.name}: a resident with this name lives already; stop it first, or give the new one another name"
            )
        names.add(spec.name)
