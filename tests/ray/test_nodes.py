"""Residents, files and objects on three Ray nodes of one machine, each with a folder of its own in shared memory."""

import asyncio
import itertools
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import psutil
import pytest
import ray
import torch

from flexmarl.cluster.backends.ray import RayCluster, ray_cluster
from flexmarl.cluster.backends.ray_nodes import RayFiles, RayPeers
from flexmarl.cluster.backends.ray_session import JoinedRay
from flexmarl.cluster.interface import Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings, NodePool
from flexmarl.errors import ConfigError, WorkerError
from flexmarl.events.run_events import NodeJoined, NodeLost, ObjectFetched
from flexmarl.objects.backends.node import NodeObjectStore
from flexmarl.objects.interface import (
    Checksum,
    ObjectKey,
    ObjectMeta,
    ObjectStore,
    RunCopy,
    TensorTree,
    checksum,
)
from flexmarl.objects.settings import Verify
from flexmarl.records import InstanceId, PolicyName, WorkerId
from flexmarl.testing.cluster import Losses, Probe, Probing, check_cluster, probe, raised
from flexmarl.testing.object_checks import check_object_store, heterogeneous_tree
from tests.ray.conftest import Nodes

pytestmark = pytest.mark.ray


def play(settings: ClusterSettings, root: Path, act: Callable[[RayCluster], Awaitable[None]], **options: Any) -> None:
    """Opens a cluster, acts and closes it; then nothing of it is left on any node, soon after if the node was lost."""

    async def run() -> None:
        with RunLeases("test", root=root) as leases:
            async with ray_cluster(settings, leases=leases, residents=9, **options) as cluster:
                await act(cluster)

    asyncio.run(run())
    until = time.monotonic() + 10
    while left := [*root.iterdir(), *Path("/dev/shm").glob(f"{root.name}-*")]:
        assert time.monotonic() < until, f"these are left: {left}"
        time.sleep(0.1)


def kill(resident: Resident[Any]) -> None:
    os.kill(resident.place.pid, signal.SIGKILL)


def engines(*numbers: int, policy: str = "solver") -> list[ResidentSpec[Any]]:
    """Specifies instances of a policy."""
    names = [WorkerId.engine(InstanceId(PolicyName(policy), number)) for number in numbers]
    return [replace(probe(str(name), NodeProbe), name=name, contract=NodeProbing) for name in names]


class NodeProbing(Probing, Protocol):
    """The contract of a probe that knows its node."""

    async def node_id(self) -> str: ...


class NodeProbe(Probe):
    """A probe that says which node it is on."""

    def node_id(self) -> str:
        """Ray's id of the node."""
        return ray.get_runtime_context().get_node_id()


def test_a_node_elsewhere_keeps_the_laws_of_a_cluster(shared_nodes: Nodes, short_root: Path) -> None:
    settings = shared_nodes.settings(pools={"rollout": NodePool(nodes=["left"])})  # It has room for just three.
    play(settings, short_root, lambda cluster: check_cluster(cluster, kill))


def test_instances_of_a_policy_spread_over_the_nodes_the_same_in_every_run(
    shared_nodes: Nodes, short_root: Path
) -> None:
    seen: list[dict[str, str]] = []

    async def act(cluster: RayCluster) -> None:
        first = await cluster.spawn([*engines(0, 1, 2), *engines(0, 1, policy="writer")])
        seen.append({str(resident.name): resident.place.node for resident in first})
        assert [node.name for node in cluster.nodes] == ["head", "left", "right"]
        for resident in first:
            assert (await resident.remote.echo(1)) == 1
            node = next(node for node in cluster.nodes if node.name == resident.place.node)
            assert await resident.remote.node_id() == node.id, "witness: it runs where the cluster says"
        assert "engine/solver/9 needs 1 CPU" in str(await raised(cluster.spawn(engines(*range(5, 10))), ConfigError))

    for _ in range(2):
        play(shared_nodes.settings(), short_root, act)
    assert seen[0] == seen[1]
    assert [seen[0][f"engine/solver/{number}"] for number in range(3)] == ["head", "left", "right"]
    assert [seen[0][f"engine/writer/{number}"] for number in range(2)] == ["head", "left"]


class HoldsObjects(ObjectStore, Protocol):
    """The contract of a resident that uses the object store of its node."""

    async def filled(self, key: ObjectKey, tree: TensorTree, verify: Verify) -> tuple[TensorTree, Checksum]: ...
    async def close(self) -> None: ...


class ObjectHolder(NodeObjectStore):
    """The store in a resident."""

    async def filled(self, key: ObjectKey, tree: TensorTree, verify: Verify) -> tuple[TensorTree, Checksum]:
        """The caller's tensors with the object in them: what is written here, another process does not see."""
        mine = {name: tensor.clone() for name, tensor in tree.items()}
        return mine, await self.get_into(key, mine, verify=verify)

    async def close(self) -> None:
        """Has nothing to close."""


class SetHereGetThere:
    """A store whose objects are set on one node and got on others in turn. Each is fresh: the keys before it go."""

    keys: ClassVar[set[ObjectKey]] = set()

    def __init__(self, one: HoldsObjects, others: list[HoldsObjects]) -> None:
        self._one, self._others = one, itertools.cycle(others)
        self._fresh = False

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        await self._begin()
        self.keys.add(key)
        return await self._one.set(key, {name: tensor.detach() for name, tensor in tree.items()})

    async def get(self, key: ObjectKey) -> TensorTree:
        await self._begin()
        return await next(self._others).get(key)

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        await self._begin()
        filled, held = await next(self._others).filled(key, tree, verify)
        for name, tensor in tree.items():
            tensor.copy_(filled[name])
        return held

    async def take(self, key: ObjectKey) -> TensorTree:
        await self._begin()
        return await next(self._others).take(key)

    async def release(self, key: ObjectKey) -> None:
        await next(self._others).release(key)

    async def _begin(self) -> None:
        if not self._fresh:
            self._fresh = True
            for key in list(self.keys):
                await self._one.release(key)
            self.keys.clear()


async def holders(cluster: RayCluster, *nodes: str, first: int = 0) -> list[HoldsObjects]:
    """Starts a holder on each of these nodes, numbered from `first` on."""
    files = RayFiles(cluster.nodes[0].id)
    specs: list[ResidentSpec[HoldsObjects]] = [
        ResidentSpec(
            name=WorkerId(f"holder/{first + number}"),
            kind=ResidentKind.ENGINE,
            contract=HoldsObjects,
            make=partial(ObjectHolder, files),
            node=node,
        )
        for number, node in enumerate(nodes)
    ]
    return [resident.remote for resident in await cluster.spawn(specs)]


def test_objects_that_are_set_on_one_node_are_got_on_others_which_fetch_them_once(
    shared_nodes: Nodes, short_root: Path
) -> None:
    key, tree = ObjectKey("weights/solver/1"), {**heterogeneous_tree(), "large": torch.rand(5_000_000)}
    next_key, next_tree = ObjectKey("weights/solver/2"), {**tree, "large": tree["large"].clone()}
    next_tree["large"][::100] += 1
    seen: list[ObjectFetched] = []

    async def act(cluster: RayCluster) -> None:
        cluster.events.listen(ObjectFetched, seen.append)
        one, *others = await holders(cluster, "left", "right", "right")
        await check_object_store(lambda: SetHereGetThere(one, others))
        home = RayPeers().agent(cluster.nodes[0].id)
        before, _ = await home.fetches()
        await one.set(key, {name: tensor.detach() for name, tensor in tree.items()})
        assert {checksum(got) for got in await asyncio.gather(*(other.get(key) for other in others))} == {
            checksum(tree)
        }
        controller = NodeObjectStore(RayFiles(cluster.nodes[0].id))
        assert checksum(await controller.get(key)) == checksum(tree)
        names = {node.id: node.name for node in cluster.nodes}
        _, fetched = await home.fetches(before)
        assert sorted(names[one.node] for one in fetched) == ["head", "right"]
        before, _ = await home.fetches()
        await one.set(next_key, {name: tensor.detach() for name, tensor in next_tree.items()})
        assert checksum(await others[0].get(next_key)) == checksum(next_tree)
        _, (fetch,) = await home.fetches(before)
        assert fetch.sent.by_difference == fetch.fetch.num_bytes
        assert fetch.sent.num_bytes < 0.03 * fetch.fetch.num_bytes, "one number of 100 changed"
        await controller.release(key)
        for holder in (one, *others):
            await raised(holder.get(key), KeyError)

    play(shared_nodes.settings(), short_root, act, deltas=True)
    assert [(event.source, event.node, event.base) for event in seen if event.object == next_key] == [
        ("left", "right", key)
    ]


def test_a_node_that_is_lost_takes_its_residents_with_it_and_gets_no_new_ones(nodes: Nodes, short_root: Path) -> None:
    key = ObjectKey("weights/solver/1")

    async def act(cluster: RayCluster) -> None:
        lost_nodes: asyncio.Queue[NodeLost] = asyncio.Queue()
        cluster.events.listen(NodeLost, lost_nodes.put_nowait)
        losses = Losses(cluster)
        here, left, right = await cluster.spawn(engines(0, 1, 2))
        one, other = await holders(cluster, "left", "right")
        await one.set(key, {"w": torch.ones(3)})
        await other.get(key)
        waiting = asyncio.ensure_future(left.remote.wait())
        await asyncio.to_thread(nodes.kill, "left")
        await raised(waiting, WorkerError)
        lost_node = await lost_nodes.get()  # A call may be told before it that its actor cannot be reached.
        await left.stop()
        (again,) = await cluster.spawn(engines(3))
        assert again.place.node in ("head", "right")
        assert {str(lost.process) for lost in losses.seen} == {"engine/solver/1", "holder/0"}
        assert (lost_node.node, bool(lost_node.because), lost_nodes.empty()) == ("left", True, True)
        assert [node.name for node in cluster.nodes] == ["head", "right"]
        assert [await resident.remote.echo(2) for resident in (here, right, again)] == [2, 2, 2]
        assert (await NodeObjectStore(RayFiles(cluster.nodes[0].id)).get(key))["w"].tolist() == [1, 1, 1]

    play(nodes.settings(), short_root, act)


def test_a_node_that_joins_late_gets_residents_and_objects_that_are_on_disk_elsewhere(
    nodes: Nodes, short_root: Path
) -> None:
    """Each object has 4 MB; with memory for 9 MB, the oldest of three is on the disk of its node."""
    keys = [ObjectKey(f"weights/{policy}/1") for policy in ("solver", "writer", "judge")]
    trees = [{"w": torch.full((1_000_000,), float(number))} for number in range(3)]

    def spilled() -> list[Path]:
        return list(short_root.glob("*/spilled/*.object"))

    async def act(cluster: RayCluster) -> None:
        joined: asyncio.Queue[NodeJoined] = asyncio.Queue()
        lost: asyncio.Queue[NodeLost] = asyncio.Queue()
        cluster.events.listen(NodeJoined, joined.put_nowait)
        cluster.events.listen(NodeLost, lost.put_nowait)
        (one,) = await holders(cluster, "left")
        for key, tree in zip(keys, trees, strict=True):
            await one.set(key, tree)
        assert len(spilled()) == 1, "witness"
        nodes.add("late")  # Ray's own code wants the main thread.
        assert (await joined.get()).refused == ""
        assert [node.name for node in cluster.nodes] == ["head", "left", "right", "late"]
        (late,) = await cluster.spawn([replace(spec, node="late") for spec in engines(0)])
        assert await late.remote.node_id() == next(node.id for node in cluster.nodes if node.name == "late")
        (holder,) = await holders(cluster, "late", first=1)
        for key, tree in zip(keys, trees, strict=True):
            _, held = await holder.filled(key, {"w": torch.zeros(1_000_000)}, "full")
            assert held == checksum(tree)
        await asyncio.to_thread(nodes.kill, "left")
        assert (await lost.get()).node == "left"
        (other,) = await holders(cluster, "right", first=2)
        for key, tree in zip(keys, trees, strict=True):
            _, held = await other.filled(key, {"w": torch.zeros(1_000_000)}, "full")
            assert held == checksum(tree), "the only copies are those of the node that came late"

    play(nodes.settings(), short_root, act, memory_bytes=9_000_000)


def test_a_silent_node_is_lost_and_its_processes_end(shared_nodes: Nodes, short_root: Path) -> None:
    async def act(cluster: RayCluster) -> None:
        here, left = await cluster.spawn(engines(0, 1))
        agent = await RayPeers().agent(next(node.id for node in cluster.nodes if node.name == "left")).pid()
        os.kill(agent, signal.SIGSTOP)
        try:
            because = str(await raised(left.remote.wait(), WorkerError))
        finally:
            os.kill(agent, signal.SIGCONT)
        assert "node 'left' is lost: its agent did not answer for 4 s" in because
        assert await here.remote.echo(1) == 1
        psutil.wait_procs([psutil.Process(left.place.pid)] if psutil.pid_exists(left.place.pid) else [], timeout=10)
        assert not psutil.pid_exists(left.place.pid)

    play(shared_nodes.settings(node_timeout_s=4.0), short_root, act)


def test_without_the_agent_of_the_controllers_node_everything_is_lost(
    shared_nodes: Nodes, short_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, lost, looked = threading.Event(), threading.Event(), threading.Event()

    def finds_ray_well(_: JoinedRay) -> None:
        looks.set()
        lost.wait(60)
        looked.set()

    async def act(cluster: RayCluster) -> None:
        monkeypatch.setattr(JoinedRay, "failure", finds_ray_well)
        residents = await cluster.spawn(engines(0, 1))
        waits = [asyncio.ensure_future(resident.remote.wait()) for resident in residents]
        assert await asyncio.to_thread(looks.wait, 60), "the node is lost while the cluster looks for Ray"
        os.kill(await RayPeers().agent(cluster.nodes[0].id).pid(), signal.SIGKILL)
        for wait in waits:
            assert "node 'head' is lost" in str(await raised(wait, WorkerError))
        lost.set()
        assert await asyncio.to_thread(looked.wait, 60)
        assert "node 'head' of the controller" in str(await raised(cluster.spawn(engines(3)), WorkerError))

    play(shared_nodes.settings(), short_root, act)


def test_a_pool_names_live_nodes(shared_nodes: Nodes, short_root: Path) -> None:
    async def nothing(cluster: RayCluster) -> None: ...

    settings = shared_nodes.settings(pools={"training": NodePool(nodes=["left", "middle"])})
    with pytest.raises(ConfigError, match=r"cluster.pools.training.nodes: .* 'middle'; this Ray has head, left, right"):
        play(settings, short_root, nothing)


def test_a_path_that_a_node_does_not_see_is_named_with_the_node(shared_nodes: Nodes, short_root: Path) -> None:
    async def nothing(cluster: RayCluster) -> None: ...

    settings = shared_nodes.settings(pools={"training": NodePool(nodes=["left"])})
    with pytest.raises(ConfigError, match=r"node 'left' does not see /no/where; use a folder that all nodes share"):
        play(settings, short_root, nothing, visible={"training": [Path("/no/where")], "rollout": [Path("/")]})
    play(settings, short_root, nothing, visible={"training": [short_root]})
