"""Engine of type `faulty`: the embedded one, which breaks where a file of its setting `faults` says so.

A run lists this file under `code`, so that the processes of its engines know the type. Each file is one fault, named by
the point at which it strikes; the first process that reaches the point takes it: `dies_in_move` becomes
`dies_in_move.4711`, the witness.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal

from flexmarl.inference.backends.embedded.engine import EmbeddedEngine, make_engine
from flexmarl.inference.interface import EngineCapabilities, EngineParts
from flexmarl.inference.settings import EmbeddedSettings, engine
from flexmarl.objects.interface import Checksum
from flexmarl.records import EngineUse, Generation, GenerationRequest, PolicyName, Version

LOADS = {
    "dies_in_move": (True, signal.SIGKILL),
    "stops_in_move": (True, signal.SIGSTOP),
    "dies_in_publish": (False, signal.SIGKILL),
    "stops_in_publish": (False, signal.SIGSTOP),
}
"""Faults of a load: whether it is that of a move, and the signal that the process sends itself."""
DIES_S = 0.01
"""Seconds after an abort at which `dies_after_abort` strikes: about when its requests continue elsewhere."""


class FaultyEngine:
    """A `WeightedEngine` that breaks on demand."""

    def __init__(self, engine: EmbeddedEngine, policy: PolicyName, faults: Path) -> None:
        self._engine, self._policy, self._faults = engine, policy, faults

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        async for generation in self._engine.generate(requests):
            garbage = self._strikes("garbage")
            yield replace(generation, request_id="of nobody") if garbage else generation

    async def abort(self, request_ids: Sequence[str]) -> None:
        if self._strikes("stops_in_abort"):
            os.kill(os.getpid(), signal.SIGSTOP)
        await self._engine.abort(request_ids)
        if self._strikes("dies_after_abort"):
            asyncio.get_running_loop().call_later(DIES_S, os.kill, os.getpid(), signal.SIGKILL)

    async def load_weights(self, policy: PolicyName, version: Version) -> Checksum:
        moves, self._policy = policy != self._policy, policy
        for fault, (in_moves, sent) in LOADS.items():
            if moves is in_moves and self._strikes(fault):
                os.kill(os.getpid(), sent)
        held = await self._engine.load_weights(policy, version)
        return Checksum("of other weights") if self._strikes("wrong_checksum") else held

    async def usage(self) -> EngineUse:
        return await self._engine.usage()

    async def capabilities(self) -> EngineCapabilities:
        return await self._engine.capabilities()

    async def sleep(self) -> None:
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()

    async def close(self) -> None:
        await self._engine.close()

    def _strikes(self, fault: str) -> bool:
        with suppress(FileNotFoundError):
            (self._faults / fault).rename(self._faults / f"{fault}.{os.getpid()}")
            return True
        return False


def make_faulty(settings: "FaultySettings", parts: EngineParts) -> FaultyEngine:
    """The factory of `faulty`."""
    return FaultyEngine(make_engine(settings, parts), parts.policy, settings.faults)


@engine
class FaultySettings(EmbeddedSettings):
    """The embedded engine, with a folder of faults."""

    factory: ClassVar = staticmethod(make_faulty)  # pyright: ignore[reportAssignmentType]
    type: Literal["faulty"] = "faulty"  # pyright: ignore[reportIncompatibleVariableOverride]
    faults: Path
