"""Cluster of the simulated world: workers are objects of this process, on nodes that are names."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexmarl.cluster.hosting import Host, answer, request
from flexmarl.cluster.interface import Worker, WorkerPlace, WorkerSpec
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.records import WorkerLost

FIRST_PID = 1000
"""Pids are only told apart."""


class SimulatedWorker:
    """Hosts its object here; what is asked through `call` crosses as bytes, as it does on its way to a process."""

    def __init__(self, spec: WorkerSpec, place: WorkerPlace, on_end: Callable[["SimulatedWorker", str], None]) -> None:
        """`on_end` is told once of its end, and why it died; nothing says why it was stopped."""
        self.spec, self.place = spec, place
        self._on_end = on_end
        self._host = _OpenHost()
        self._work: dict[asyncio.Task[bytes], None] = {}
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        """As in its WorkerSpec."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """Neither stopped nor dead."""
        return not self._ended.done()

    @property
    def hosted(self) -> Any:
        """The object itself, for who simulates: its faults, and calls that need not be copied."""
        return self._host.hosted

    async def make(self) -> None:
        """Makes the hosted object, which may share what it simulates with others: `make` is not copied."""
        self._host.hold_object(self.spec.make())

    async def call(self, method: str, *args: Any) -> Any:
        """As every worker does."""
        if not self._ended.done():
            work = asyncio.create_task(self._host.call(request(method, *args)), name=f"{self.name}.{method}")
            self._work[work] = None
            work.add_done_callback(self._work.pop)
            await asyncio.wait((work, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._ended.done():
                return answer(work.result(), whose=self.name)
        raise WorkerError(f"{self.name} {self._ended.result()}")

    async def stop(self) -> None:
        """Ends it."""
        self._end("was stopped", "")

    def die(self, because: str = "was killed") -> None:
        """A fault: ends it as a crash would. What it was doing is not finished, and the loss is told."""
        self._end(f"died: {because}", because)

    def _end(self, how: str, because: str) -> None:
        if not self._ended.done():
            self._ended.set_result(how)
            for work in list(self._work):
                work.cancel()
            self._on_end(self, because)


class SimulatedCluster:
    """`Cluster` of so many workers on each node, where starting takes time and each worker is a pid of its own.

    async with SimulatedCluster({"node-0": 8}, start_s=30.0) as cluster:
        (worker,) = await cluster.spawn([spec])
        cluster.kill(worker.name, "its node lost power")
    """

    def __init__(self, nodes: Mapping[str, int], *, start_s: float = 0.0) -> None:
        """`nodes`: room for workers on each."""
        self.on_lost: Callable[[WorkerLost], None] = lambda lost: None
        self.workers: list[SimulatedWorker] = []
        """All that were made, in order, ended ones included."""
        self._free = dict(nodes)
        self._start_s = start_s
        self._pids = itertools.count(FIRST_PID)

    async def __aenter__(self) -> "SimulatedCluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def spawn(self, specs: Sequence[WorkerSpec]) -> list[Worker]:
        """Each on the node with most room."""
        if len(specs) > (free := sum(self._free.values())):
            raise ConfigError(f"the cluster has room for {free} more workers, got {len(specs)}; give it more nodes")
        workers = [SimulatedWorker(spec, self._place(), self._ended) for spec in specs]
        self.workers.extend(workers)
        try:
            await asyncio.sleep(self._start_s)
            for worker in workers:
                await worker.make()
        except BaseException:
            for worker in workers:
                await worker.stop()
            raise
        return list(workers)

    async def close(self) -> None:
        """Stops every worker."""
        for worker in self.workers:
            await worker.stop()

    def kill(self, name: str, because: str = "was killed") -> None:
        """A fault: the live worker of this name dies. Raises KeyError if there is none."""
        live = {worker.name: worker for worker in self.workers if worker.alive}
        live[name].die(because)

    def _place(self) -> WorkerPlace:
        node = max(self._free, key=lambda name: self._free[name])
        self._free[node] -= 1
        return WorkerPlace(node=node, pid=next(self._pids))

    def _ended(self, worker: SimulatedWorker, because: str) -> None:
        place = worker.place
        self._free[place.node] += 1
        if because:
            self.on_lost(WorkerLost(name=worker.name, node=place.node, pid=place.pid, because=because))


class _OpenHost(Host):
    """A host that is given its object, and shows it."""

    hosted: Any = None

    def hold_object(self, hosted: Any) -> None:
        self.hosted = self._hosted = hosted
