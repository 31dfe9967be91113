"""Residents and objects of simulated runs: modelled devices in virtual time; nothing is computed.

engine/{policy}/{n}     a cost model; its answers come from a responder, or from a recorded run
trainer/{policy}        a cost model, with one number for weights
objects                 a dictionary whose transfers take modelled time
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

from flexmarl.analysis.costs import CostSettings
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.errors import EngineError, TrainingError
from flexmarl.events.event import Events
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectMeta, ObjectStore, RunCopy, TensorTree
from flexmarl.objects.settings import Verify
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.simulator.decoding import CpuShare
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup, ModelledTrainer
from flexmarl.simulator.replies import Responder
from flexmarl.training.interface import RowReader, Trainer
from flexmarl.training.residency import ProcessGroup


async def at_once(copy: Callable[[], Checksum]) -> Checksum:
    """Copies in the caller's own time."""
    return copy()


class SimulatedObjectStore:
    """`ObjectStore` in virtual time. By default transfers take none: publishing and loading have costs of their own."""

    def __init__(
        self,
        held: ObjectStore,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        bytes_of: Callable[[ObjectKey], int] | None = None,
    ) -> None:
        """`held` holds the objects, and takes no time.

        `bytes_of` gives the modelled size of an object, since simulated weights are a number or two. By default an
        object has its real size.
        """
        self._held = held
        self._latency_s, self._bytes_per_s, self._bytes_of = latency_s, bytes_per_s, bytes_of

    async def set(self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full") -> ObjectMeta:
        """Stores a copy at once, then waits for the transfer. Raises ValueError if the key is taken."""
        meta = await self._held.set(key, tree, verify=verify)
        await self._transfer(key, tree)
        return meta

    async def get(self, key: ObjectKey) -> TensorTree:
        """Waits for the transfer, then returns the stored copy."""
        tree = await self._held.get(key)
        await self._transfer(key, tree)
        return tree

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = at_once
    ) -> Checksum:
        """Waits for the transfer, then copies at once: a thread would take real time."""
        await self._transfer(key, tree)
        return await self._held.get_into(key, tree, verify=verify, run=run)

    async def take(self, key: ObjectKey) -> TensorTree:
        """Waits for the transfer, then takes the stored copy."""
        await self._transfer(key, await self._held.get(key))
        return await self._held.take(key)

    async def release(self, key: ObjectKey) -> None:
        """Drops the object at once."""
        await self._held.release(key)

    async def _transfer(self, key: ObjectKey, tree: TensorTree) -> None:
        own = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
        num_bytes = self._bytes_of(key) if self._bytes_of else own
        seconds = self._latency_s + num_bytes / self._bytes_per_s
        if seconds:
            await asyncio.sleep(seconds)


NODE = "simulated"
"""Name of the only node. Several nodes are called `simulated-0`, `simulated-1` and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledResidents:
    """Makes the engines and trainers of a simulated run, and the cluster that they live in."""

    costs: Callable[[PolicyName], CostSettings]
    """Gives the costs of a policy's devices."""
    objects: ObjectStore
    rows: RowReader
    host: CpuShare
    respond: Responder
    spare: int
    """Number of replacements and grown instances for which every node has extra room."""
    nodes: int = 1

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Makes nodes that each have room for all residents, so that those of a lost node can start on another."""
        names = [NODE] if self.nodes == 1 else [f"{NODE}-{n}" for n in range(self.nodes)]
        return inproc_cluster(dict.fromkeys(names, residents + self.spare), events=events)

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[InferenceEngine]:
        """Specifies one inference instance, which may be moved to another policy."""
        make = partial(
            ModelledEngine,
            self.costs(policy).engine,
            self.respond,
            policy=policy,
            objects=self.objects,
            host=self.host,
            costs_of=lambda other: self.costs(other).engine,
        )
        return ResidentSpec(
            name=WorkerId.engine(instance),
            kind=ResidentKind.ENGINE,
            contract=WeightedEngine,  # the widest: `capabilities` says which of its methods may be called
            make=make,
            error=EngineError,
        )

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Specifies the trainer of a policy."""
        return ResidentSpec(
            name=WorkerId.trainer(policy),
            kind=ResidentKind.TRAINER,
            contract=Trainer,
            make=partial(
                ModelledTrainer, policy, self.costs(policy).trainer, self.objects, host=self.host, rows=self.rows
            ),
            error=TrainingError,
        )

    def replacement_s(self, policy: PolicyName) -> float:
        """Returns the seconds that a replacement takes to start. The first instances start at once."""
        return self.costs(policy).engine.start_s

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns a process group for every trainer. The residency decides which of them share devices."""
        return {policy: ModelledProcessGroup(cast(ModelledTrainer, trainer)) for policy, trainer in trainers.items()}
