"""One instance, as the pool sees it: its engine, what that holds, and who waits for it."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

from flexmarl.errors import EngineError
from flexmarl.inference.engines import FIRST_VERSION
from flexmarl.inference.interface import EngineCapabilities, InferenceEngine, WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey
from flexmarl.records import Generation, Version


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """What every instance must hold."""

    version: Version
    key: ObjectKey
    expected: Checksum | None


@dataclass(slots=True, eq=False)
class Instance:
    """One replica, and the tasks that wait for it."""

    name: str
    engine: InferenceEngine
    capabilities: EngineCapabilities = field(default_factory=EngineCapabilities)
    """Its engine's, once the pool has asked it."""
    version: Version = FIRST_VERSION
    """The newest that it has acknowledged."""
    holds: Weights | None = None
    checksum: Checksum | None = None
    """Its own, of what it holds."""
    loading: asyncio.Future[None] | None = None
    tasks: set[asyncio.Future[None]] = field(default_factory=set)
    """Cancelled when it is lost."""
    running: set[str] = field(default_factory=set)
    """Ids of the requests that it was given and has not answered."""
    hands_over: bool = False
    """Its requests go on elsewhere, as soon as they have ended here."""
    lost: bool = False

    @property
    def weighted(self) -> WeightedEngine:
        """The engine, for a call that its capabilities allow."""
        return cast(WeightedEngine, self.engine)

    def watch(self, task: asyncio.Future[None]) -> None:
        """The task waits for this instance."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def acknowledged(self, answer: Generation) -> None:
        """Returns when the instance has acknowledged the version of its answer (law 10).

        An answer can overtake the acknowledgement of a load. Raises EngineError if there is no such load.
        """
        newest = max(run.version for run in answer.versions)
        if newest > self.version and self.loading is not None:
            await asyncio.wait([self.loading])
        if newest > self.version:
            raise EngineError(f"it answered with version {newest}, but has acknowledged {self.version}")
