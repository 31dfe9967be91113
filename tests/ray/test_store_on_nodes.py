"""The experience store from another Ray node: through `store/0`, beside the file."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from flexmarl.assemble.residents import STORE
from flexmarl.assemble.world import Processes, kept_alive
from flexmarl.cluster.backends.ray import RayAddress, ray_cluster
from flexmarl.cluster.interface import ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.experience.backends.remote import LANES, RemoteStore, StoreHost, StoreService
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.interface import Column, ExperienceStore
from flexmarl.records import AgentName, WorkerId
from flexmarl.testing.experience import AGENTS, CHECKS, COLUMNS, SOLVER, check_experience_store, sample
from flexmarl.testing.experience import partial as row
from tests.ray.conftest import Nodes

pytestmark = pytest.mark.ray


class OpensFiles(StoreService, Protocol):
    """The contract of `store/0` for many stores, one after another."""

    async def open(self, path: Path) -> None: ...


class ManyFiles(StoreHost):
    """Serves the store that it was told last."""

    def __init__(self) -> None:
        self._store: Any = None

    async def open(self, path: Path) -> None:
        await self.close()
        self._store = DurableStore.join(path)

    async def close(self) -> None:
        if self._store is not None:
            await self._store.close()


class UsesStores(ExperienceStore, Protocol):
    """The contract of a process that uses many stores, one after another."""

    async def begin(self) -> None: ...
    async def end(self) -> None: ...


class StoreUser:
    """Reaches the store's service from its node; `begin` makes a new store of it."""

    def __init__(self) -> None:
        self._store = RemoteStore(RayAddress(STORE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def begin(self) -> None:
        self._store = RemoteStore(RayAddress(STORE))

    async def end(self) -> None:
        await self._store.close()


class FromThere:
    """A store whose rows are read and written by a process of another node, and which the controller owns."""

    def __init__(
        self, path: Path, there: UsesStores, service: Any, agents: Sequence[AgentName], columns: Sequence[Column]
    ) -> None:
        self._path, self._there, self._service = path, there, service
        self._owner = DurableStore.create(path, agents=agents, columns=columns)
        self._opened, self._opening = False, asyncio.Lock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._begin()
            return await getattr(self._there if name in LANES else self._owner, name)(*args, **kwargs)

        return call

    async def close(self) -> None:
        await self._begin()
        await self._there.end()
        await self._owner.close()

    async def _begin(self) -> None:
        async with self._opening:
            if not self._opened:
                await self._service.open(self._path)
                await self._there.begin()
                self._opened = True


def user(node: str) -> ResidentSpec[UsesStores]:
    """A process of a node that reaches the store's service."""
    return ResidentSpec(
        name=WorkerId("rollout", number=0),
        kind=ResidentKind.ROLLOUT,
        contract=UsesStores,
        make=StoreUser,
        node=node,
    )


def test_the_suite_of_experience_stores_holds_between_two_nodes(
    shared_nodes: Nodes, short_root: Path, tmp_path: Path
) -> None:
    async def run() -> None:
        service = ResidentSpec(name=STORE, kind=ResidentKind.STORE, contract=OpensFiles, make=ManyFiles, node="head")
        with RunLeases("test", root=short_root) as leases:
            async with ray_cluster(shared_nodes.settings(), leases=leases, residents=2) as cluster:
                (here,), (there,) = await cluster.spawn([service]), await cluster.spawn([user("left")])
                assert (here.place.node, there.place.node) == ("head", "left")
                paths = (tmp_path / f"{number}.sqlite" for number in itertools.count())
                await check_experience_store(
                    lambda agents, columns: FromThere(next(paths), there.remote, here.remote, agents, columns)
                )
                assert next(paths).stem == str(len(CHECKS)), "witness: every check had a store"

    asyncio.run(run())


def test_a_service_that_is_killed_is_started_anew_and_every_row_is_there_once(
    shared_nodes: Nodes, short_root: Path, tmp_path: Path
) -> None:
    path = tmp_path / "experience.sqlite"

    async def run() -> None:
        owner = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        spec = ResidentSpec(
            name=STORE,
            kind=ResidentKind.STORE,
            contract=StoreService,
            make=partial(StoreHost.join, path),
            node="head",
        )
        processes = Processes()
        with RunLeases("test", root=short_root) as leases:
            async with (
                ray_cluster(shared_nodes.settings(), leases=leases, residents=2) as cluster,
                kept_alive(cluster, [spec], processes),
            ):
                (there,) = await cluster.spawn([user("left")])
                first = processes.places[STORE].pid

                async def put(group: int) -> None:
                    await there.remote.put(SOLVER, [row(sample(group), text=f"prompt {group}")])

                writing = [asyncio.create_task(put(group)) for group in range(200)]
                await writing[20]
                os.kill(first, signal.SIGKILL)
                await asyncio.gather(*writing)
                assert processes.places[STORE].pid != first, "witness: it was started anew"
                found = await there.remote.get([sample(group) for group in range(200)])
                assert [one.values["text"] for one in found] == [f"prompt {group}" for group in range(200)]
        await owner.close()

    asyncio.run(run())
