"""Engine in a worker's process: its answers gather until the controller asks for them, and cross in batches.

submit --> one reader per batch --> done ---.
abort  --> engine                           +--> collect: all that is there, with the load
           a lost engine     --> failure ---'
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flexmarl.cluster.device_thread import DeviceThread
from flexmarl.errors import EngineError, boundary
from flexmarl.inference.engines import EngineParts, EngineSettings, make_engine
from flexmarl.inference.interface import WeightedEngine
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
from flexmarl.records import EngineUse, Generation, GenerationRequest, PolicyName, Version


@dataclass(frozen=True, slots=True)
class Collected:
    """What one `collect` brings."""

    generations: tuple[Generation, ...]
    """In completion order, each exactly once."""
    use: EngineUse
    """The load when it was sent."""


class EngineHost:
    """What a worker hosts for one instance; its other half is the RemoteEngine that calls it."""

    def __init__(self, engine: WeightedEngine, *, on_close: Callable[[], None] = lambda: None) -> None:
        """The engine is the host's own from here on; `on_close` frees what was made for it."""
        self._engine, self._on_close = engine, on_close
        self._readers: set[asyncio.Task[None]] = set()
        self._done: list[Generation] = []
        self._failure: EngineError | None = None
        self._news = asyncio.Event()

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Begins these requests; their answers are collected."""
        reader = asyncio.create_task(self._read(requests), name="engine-host-reader")
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)

    async def collect(self) -> Collected:
        """Waits for a generation, then brings all that are there. Raises EngineError when the engine is lost."""
        await self._news.wait()
        if self._failure is not None and not self._done:
            raise self._failure
        use = await self._engine.usage()
        done, self._done = self._done, []
        if self._failure is None:
            self._news.clear()
        return Collected(tuple(done), use)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests; their answers are collected like any other."""
        await self._engine.abort(request_ids)

    async def load_weights(self, policy: PolicyName, version: Version, key: ObjectKey) -> Checksum:
        """As the engine does."""
        with boundary(EngineError, f"loading '{key}' into the engine of '{policy}'"):
            return await self._engine.load_weights(policy, version, key)

    async def sleep(self) -> None:
        """As the engine does."""
        with boundary(EngineError, "falling asleep"):
            await self._engine.sleep()

    async def wake(self) -> None:
        """As the engine does."""
        with boundary(EngineError, "waking up"):
            await self._engine.wake()

    async def close(self) -> None:
        """Aborts what runs, whose answers can still be collected, and frees the device."""
        await self._engine.close()
        await asyncio.gather(*self._readers)
        self._on_close()

    async def _read(self, requests: Sequence[GenerationRequest]) -> None:
        left = len(requests)
        try:
            with boundary(EngineError, "generating"):
                async for generation in self._engine.generate(requests):
                    self._done.append(generation)
                    self._news.set()
                    left -= 1
                if left:
                    raise EngineError(f"the engine left {left} of {len(requests)} requests without an answer")
        except EngineError as error:
            self._failure = error
            self._news.set()


def host_engine(
    settings: EngineSettings,
    *,
    policy: PolicyName,
    make_model: Callable[[], Any],
    make_decode: Callable[[], Callable[[Sequence[int]], str]],
    make_store: Callable[[], ObjectStore],
    device: str = "cpu",
    deterministic: bool = False,
) -> EngineHost:
    """Makes an engine and its host, where it is called; with its arguments bound it is a `WorkerSpec.make`.

    Raises EngineError, or what the arguments raise of ours.
    """
    with boundary(EngineError, f"policies.{policy}.engine: making an engine on {device}"):
        decode, store, thread = make_decode(), make_store(), DeviceThread(f"engine-{policy}")
        parts = EngineParts(
            policy=policy,
            make_model=make_model,
            decode=decode,
            store=store,
            thread=thread,
            device=device,
            deterministic=deterministic,
        )
        # Who needs weights of its own implements the whole of WeightedEngine; a frozen one has no host of its own.
        engine: Any = make_engine(settings, parts)
        return EngineHost(engine, on_close=thread.close)
