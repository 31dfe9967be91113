"""The live parts of a run, made in the world that its settings ask for."""

import pkgutil
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.cluster.interface import Cluster, WorkerPlace
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import PolicyName
from flexmarl.training.interface import Trainer
from flexmarl.training.rows import AccumulateRows


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What holds weights, devices or experience."""

    objects: ObjectStore
    store: ExperienceStore
    pool: InferencePool
    trainers: Mapping[PolicyName, Trainer]
    accumulate: Mapping[PolicyName, AccumulateRows] = field(default_factory=dict)
    """For trainers that read their rows where they run; for the others the session does."""
    cluster: Cluster | None = None
    """Whose workers may die; None where everything is in this process."""
    places: Mapping[str, WorkerPlace] = field(default_factory=dict)
    """Where each process of the run is, by name."""


WORLDS: Mapping[str, str] = {
    "inline": "flexmarl.assemble.inline_world:inline_world",
    "ray": "flexmarl.assemble.ray_world:ray_world",
}
"""Who opens each `cluster.backend`; imported only then, so that one without the other's libraries works."""


def open_world(blueprint: Blueprint, store: ExperienceStore) -> AbstractAsyncContextManager[World]:
    """Makes engines and trainers around a store; leaving the block ends them, and closes the store."""
    return pkgutil.resolve_name(WORLDS[blueprint.settings.cluster.backend])(blueprint, store)
