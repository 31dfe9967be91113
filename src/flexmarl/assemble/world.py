"""The live parts of a run, made in the world that its settings ask for."""

import gc
import pkgutil
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.cluster.interface import Cluster, Worker, WorkerPlace
from flexmarl.cluster.own_folder import keep_compiled_code
from flexmarl.errors import ConfigError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import PolicyName
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import Residency
from flexmarl.training.rows import AccumulateRows


@dataclass(slots=True)
class Processes:
    """Every process that the run has had, by name."""

    places: dict[str, WorkerPlace] = field(default_factory=dict)
    on_started: Callable[[str, WorkerPlace], None] = lambda name, place: None
    """Told of every one that is added."""

    def add(self, worker: Worker) -> None:
        """A worker runs now."""
        self.places[worker.name] = worker.place
        self.on_started(worker.name, worker.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What holds weights, devices or experience."""

    objects: ObjectStore
    store: ExperienceStore
    pool: InferencePool
    trainers: Mapping[PolicyName, Trainer]
    accumulate: Mapping[PolicyName, AccumulateRows] = field(default_factory=dict)
    """For trainers that read their rows where they run; for the others the session does."""
    residency: Residency | None = None
    """Who is on training devices, where they change hands."""
    cluster: Cluster | None = None
    """Whose workers may die; None where everything is in this process."""
    processes: Processes = field(default_factory=Processes)
    """Its workers; empty where everything is in this process."""


def settle_memory() -> None:
    """Leaves what has been loaded out of every later garbage collection.

    A full one would walk all that torch and transformers loaded: 0.1 s in which nothing is dispatched.
    """
    gc.collect()
    gc.freeze()


WORLDS: Mapping[str, str] = {
    "inline": "flexmarl.assemble.inline_world:inline_world",
    "ray": "flexmarl.assemble.ray_world:ray_world",
    "simulated": "flexmarl.assemble.simulated_world:simulated_world",
}
"""Who opens each `cluster.backend`; imported only then, so that one without the other's libraries works."""


def open_world(blueprint: Blueprint, store: ExperienceStore, path: Path | None) -> AbstractAsyncContextManager[World]:
    """Makes engines and trainers around a store; leaving the block ends them, and closes the store.

    `path` is the store's file, if it has one. Raises ConfigError if the world needs a package that is not installed.
    """
    backend = blueprint.settings.cluster.backend
    if backend != "simulated":
        keep_compiled_code()  # Here, and in the workers that this process starts: they have its environment.
    try:
        world = pkgutil.resolve_name(WORLDS[backend])
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cluster.backend is '{backend}', which needs the package '{error.name}', and that is not installed: pip "
            f"install {error.name}, or use cluster.backend=inline"
        ) from error
    return world(blueprint, store, path and path.absolute())  # Workers may have another working directory.
