"""Engines of real runs that compute nothing, on the wall clock: they answer as simulated engines do.

    policies.NAME.engine: {type: timed}                  times and answers are those of section `simulation`
    policies.NAME.engine: {type: scripted, name: ...}    a registered responder answers, at once

Hundreds fit into one process, and what a run of them shows are the real times of all else: dispatch, tools, programs at
the gateway, moves of instances, training, publications.
"""

import asyncio
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import Field, field_validator

from flexmarl.analysis.costs import EngineCosts
from flexmarl.errors import ConfigError, EngineError
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.objects.interface import Checksum, ObjectKey, checksum, names_checksum
from flexmarl.records import GenerationRequest, IntArray, PolicyName
from flexmarl.settings import Settings
from flexmarl.simulator.modelled_engine import ALL_CAPABILITIES, ModelledEngine
from flexmarl.simulator.replies import SCRIPTS, spoken_by
from flexmarl.simulator.settings import EngineModel


class TimedSettings(Settings):
    """Answers of `simulation.replies` after the times of `simulation.costs`, in real time: for trying out schedules."""

    factory: ClassVar[str] = "flexmarl.simulator.timed_engine:make_engine"
    computes: ClassVar[bool] = False
    is_timed: ClassVar[bool] = True
    takes_over: ClassVar[bool] = True

    type: Literal["timed"] = "timed"


class ScriptedSettings(Settings):
    """Answers by a function that a file under `code` registers with `@responder(name)`: for trying out agents."""

    factory: ClassVar[str] = "flexmarl.simulator.timed_engine:make_scripted_engine"
    computes: ClassVar[bool] = False

    type: Literal["scripted"] = "scripted"
    name: str
    """Its name there. It gets the prompt as text, and random numbers of the call's seed."""
    scramble: bool = False
    """Spell its words in a random one of their tokenisations, as a model may."""
    token_s: float = Field(default=0.0, ge=0)
    """Seconds per token."""
    reads: int | None = Field(default=None, ge=1)
    """Most tokens of the prompt's end that it gets; null: all. Decoding a long prompt takes milliseconds."""

    @field_validator("name")
    @classmethod
    def _is_registered(cls, name: str) -> str:
        try:
            _ = SCRIPTS[name]
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return name


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


def make_scripted_engine(settings: ScriptedSettings, parts: EngineParts) -> TimedEngine:
    """The factory that `ScriptedSettings.factory` names."""
    costs = EngineCosts(slots=1 << 20, decode_s=settings.token_s, decode_request_s=0.0, move_s=0.0, start_s=0.0)
    spoken = spoken_by(settings.name, parts.renderer, scramble=settings.scramble, reads=settings.reads)
    model = EngineModel(costs, spoken)
    return TimedEngine(replace(parts, modelled=lambda policy: model))
