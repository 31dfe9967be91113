"""Residents of simulated runs: modelled devices in virtual time; nothing is computed.

engine/{policy}/{n}     a cost model; its answers come from a responder, or from a recorded run
trainer/{policy}        a cost model, with one number for weights
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.errors import EngineError, TrainingError
from flexmarl.events.hub import Events
from flexmarl.inference.interface import WeightedEngine
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.simulator.costs import CostSettings
from flexmarl.simulator.cpu_share import CpuShare
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup, ModelledTrainer
from flexmarl.simulator.replies import Responder
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup
from flexmarl.training.rows import RowReader

NODE = "simulated"
"""Where all residents are if there is one node; of several, the first is `simulated-0`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledResidents:
    """What each modelled process holds."""

    costs: Callable[[PolicyName], CostSettings]
    """Of a policy's devices."""
    objects: ObjectStore
    rows: RowReader
    host: CpuShare
    respond: Responder
    spare: int
    """Replacements that may live beside those that they replace."""
    nodes: int = 1

    def cluster(self, residents: int, events: Events) -> AbstractAsyncContextManager[Cluster]:
        """Nodes with room for all of them on each: what a lost one had may start on another."""
        names = [NODE] if self.nodes == 1 else [f"{NODE}-{n}" for n in range(self.nodes)]
        return inproc_cluster(dict.fromkeys(names, residents + self.spare), events=events)

    def engine(self, policy: PolicyName, instance: InstanceId) -> ResidentSpec[WeightedEngine]:
        """One inference instance, which may be moved to another policy."""
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
            contract=WeightedEngine,
            make=make,
            error=EngineError,
        )

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """The trainer of a policy."""
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
        """Only replacements take their time to start."""
        return self.costs(policy).engine.start_s

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """All of them: who shares devices with whom is the residency's business."""
        return {policy: ModelledProcessGroup(cast(ModelledTrainer, trainer)) for policy, trainer in trainers.items()}
