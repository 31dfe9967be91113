"""Residents of simulated runs: modelled devices in virtual time; nothing is computed.

engine/{policy}/{n}     a cost model; its answers come from a responder, or from a recorded run
trainer/{policy}        a cost model, with one number for weights
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import cast

from flexmarl.analysis.costs import CostSettings
from flexmarl.cluster.inproc import inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.errors import EngineError, TrainingError
from flexmarl.events.hub import Events
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.objects.interface import ObjectStore
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.simulator.cpu_share import CpuShare
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup, ModelledTrainer
from flexmarl.simulator.replies import Responder
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup
from flexmarl.training.row_reader import RowReader

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
    """Number of replacements for which every node has extra room."""
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
