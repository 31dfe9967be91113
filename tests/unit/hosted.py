"""Residents whose every call crosses, in this process: what crosses is copied, and takes its time."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from flexmarl.cluster.inproc import InprocResident, inproc_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.errors import EngineError, TrainingError
from flexmarl.inference.interface import WeightedEngine
from flexmarl.records import WorkerId
from flexmarl.training.interface import Trainer

RESUME = "go on from the last checkpoint with --resume"


def engine_spec(make: Callable[[], Any], number: int = 0) -> ResidentSpec[WeightedEngine]:
    name = WorkerId("engine", "solver", number)
    return ResidentSpec(name=name, kind=ResidentKind.ENGINE, contract=WeightedEngine, make=make, error=EngineError)


def trainer_spec(make: Callable[[], Any], policy: str = "solver") -> ResidentSpec[Trainer]:
    name = WorkerId.trainer(policy)
    return ResidentSpec(
        name=name, kind=ResidentKind.TRAINER, contract=Trainer, make=make, error=TrainingError, advice=RESUME
    )


@asynccontextmanager
async def resident_of(spec: ResidentSpec[Any], *, latency_s: float = 0.0) -> AsyncIterator[InprocResident[Any]]:
    """One resident; each crossing takes two latencies."""
    async with inproc_cluster(crosses=True, latency_s=latency_s) as cluster:
        (resident,) = await cluster.spawn([spec])
        assert isinstance(resident, InprocResident)
        yield resident
