"""Timed engine on the wall clock: the answers of simulated engines, after their modelled time, in a real run.

    policies.NAME.engine: {type: timed}      times and answers are those of section `simulation`

Nothing is computed, so hundreds fit into one process, and what a run of them shows are the real times of all else:
dispatch, tools, moves of instances, training, publications.
"""

import asyncio
from dataclasses import replace
from typing import ClassVar, Literal

from flexmarl.errors import EngineError
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.objects.interface import Checksum, ObjectKey, checksum, names_checksum
from flexmarl.records import GenerationRequest, IntArray, PolicyName
from flexmarl.settings import Settings
from flexmarl.simulator.modelled_engine import ALL_CAPABILITIES, ModelledEngine
from flexmarl.simulator.settings import EngineModel


class TimedSettings(Settings):
    """Answers of `simulation.replies` after the times of `simulation.costs`, in real time: for trying out schedules."""

    factory: ClassVar[str] = "flexmarl.simulator.timed_engine:make_engine"
    computes: ClassVar[bool] = False
    is_timed: ClassVar[bool] = True
    takes_over: ClassVar[bool] = True

    type: Literal["timed"] = "timed"


class TimedEngine(ModelledEngine):
    """A `WeightedEngine` on the real clock. It reads the weights that it loads, serves none of them, and frees them."""

    def __init__(self, parts: EngineParts) -> None:
        """Needs `policy`, `store`, `modelled`, `verify` and `version` of the parts."""
        if parts.modelled is None:
            raise EngineError("a timed engine needs `modelled` in its parts")
        self._model_of_policy, self._verify = parts.modelled, parts.verify
        super().__init__(
            self._model_of(parts.policy).costs,
            self._reply,
            policy=parts.policy,
            objects=parts.store,
            version=parts.version,
            costs_of=lambda policy: self._model_of(policy).costs,
        )

    async def capabilities(self) -> EngineCapabilities:
        """Returns all but adapters: it knows no base whose checksum belongs to that of an adapter."""
        return replace(ALL_CAPABILITIES, adapters=False)

    async def fetch(self, key: ObjectKey) -> Checksum:
        """Reads the weights from the run's object store. Returns the checksum of the bytes that were read."""
        assert self._objects is not None
        tree = await self._objects.get(key)
        return await asyncio.to_thread(checksum if self._verify == "full" else names_checksum, tree)

    def _reply(self, request: GenerationRequest) -> IntArray:
        return self._model_of(request.policy).respond(request)

    def _model_of(self, policy: PolicyName) -> EngineModel:
        return self._model_of_policy(policy)


def make_engine(settings: TimedSettings, parts: EngineParts) -> TimedEngine:
    """The factory that `TimedSettings.factory` names."""
    return TimedEngine(parts)
