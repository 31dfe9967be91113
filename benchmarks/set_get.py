"""Set and Get of weights in shared memory against copying them, against Ray, and from one Ray node to another.

    python benchmarks/set_get.py --json

Large: 1 GiB of float32 tensors, published version after version. The first versions, which find no memory to reuse, are
warm-up. CPU seconds of one thread, by those of copying the same tensors:

    set    `ObjectStore.set`, digest included
    get    into the tensors of a model, with the digest of what the model then holds

Small: 5 000 tensors of 4 kB, set and got as views, digest included, against a private Ray that puts and gets them one
by one, as one dictionary of tensors, and as one of numpy arrays. Seconds of the clock: other processes take part.
Operations: files opened, locked, mapped, linked, listed and removed by one publication (set, get, release).
Nodes: seconds until one Ray node has an object of another, by those of an actor that gets an array of the same size.
Mooncake, if it is installed: the same object, after that, with `cluster.transport: mooncake`.
Deltas: the same for bfloat16 weights of which 1% changed since the version before, and for weights of which all did.
"""

import argparse
import asyncio
import logging
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from common import interleaved_rates, median_ratio, parser, report
from ray.cluster_utils import Cluster

from flexmarl.cluster.backends.mooncake import engine_class
from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.backends.ray_nodes import RayFiles, RayPeers
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.node_agent import NodeAgent
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import ConfigError
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.backends.node import NodeObjectStore
from flexmarl.objects.interface import ObjectKey, weights_key
from flexmarl.objects.settings import Verify
from flexmarl.records import PolicyName, Version

Tree = dict[str, torch.Tensor]

TENSOR_MIB = 16
SMALL_TENSORS = 5000
SMALL_NUMBERS = 1000
ONE_BY_ONE = 500
"""Small tensors that Ray puts and gets one by one; its time is proportional to their number (the table shows that)."""
WANTED = {
    "set_vs_memcpy": 0.45,
    "get_vs_memcpy": 0.45,
    "set_plain_vs_memcpy": 0.9,
    "get_plain_vs_memcpy": 0.9,
    "vs_per_tensor": 100.0,
    "vs_ray_put_dict": 8.0,
    "vs_ray_put_views": 1.5,
    "ray_vs_raw_ray": 0.9,
    "dense_vs_whole": 0.95,
}
WANTED_OF_MOONCAKE = {"mooncake_vs_ray": 3.0}
WANTED_AT_MOST = {"delta_bytes": 0.05}
CHANGED = 0.01
"""Share of the numbers that an update changes which changes little."""


@contextmanager
def folder() -> Iterator[Path]:
    """A new folder in shared memory."""
    memory = Path("/dev/shm")
    made = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None, prefix="flexmarl-bench-"))
    try:
        yield made
    finally:
        shutil.rmtree(made)


class Publisher:
    """One policy's versions in a store of their own, one after the other."""

    def __init__(self, root: Path, source: Tree, *, into: Tree | None = None) -> None:
        """`into` are the tensors of the model that serves the versions."""
        self.store = ShmObjectStore(Path(tempfile.mkdtemp(dir=root)) / "objects")
        self.store.create()
        self._source, self._into = source, into or {}
        self._version = 0

    def _key(self, version: int) -> ObjectKey:
        return weights_key(PolicyName("solver"), Version(version))

    async def set(self, verify: Verify = "full") -> float:
        """CPU seconds of `set`. The version before the last one is released."""
        self._version += 1
        await self.store.release(self._key(self._version - 2))
        began = time.process_time()
        await self.store.set(self._key(self._version), self._source, verify=verify)
        return time.process_time() - began

    async def get(self, verify: Verify = "full") -> float:
        """CPU seconds until the model holds the newest version, and its digest is known."""
        began = time.process_time()
        await self.store.get_into(self._key(self._version), self._into, verify=verify)
        return time.process_time() - began

    async def round_trip(self) -> float:
        """Seconds of the clock for setting a version and getting it as views."""
        self._version += 1
        await self.store.release(self._key(self._version - 2))
        began = time.perf_counter()
        await self.store.set(self._key(self._version), self._source)
        await self.store.get(self._key(self._version))
        return time.perf_counter() - began


def rate(work: Callable[[], Awaitable[float]]) -> float:
    """How often a second the work could be done."""
    return 1 / asyncio.run(_awaited(work))


async def _awaited(work: Callable[[], Awaitable[float]]) -> float:
    return await work()


def large(root: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Rates of copying, setting and getting the large tree."""
    numbers, items = max(1, int(options.gib * 1024 / TENSOR_MIB)), TENSOR_MIB * 2**18
    source = {f"layers.{i:03}.weight": torch.randn(items) for i in range(numbers)}
    model = {name: torch.zeros_like(tensor) for name, tensor in source.items()}

    async def memcpy() -> float:
        began = time.process_time()
        for name, tensor in model.items():
            tensor.copy_(source[name])
        return time.process_time() - began

    publisher = Publisher(root, source, into=model)
    for _ in range(2):
        rate(publisher.set)
    contenders = {
        "memcpy": memcpy,
        "set": publisher.set,
        "get": publisher.get,
        "set, no digest": partial(publisher.set, "names"),
        "get, no digest": partial(publisher.get, "names"),
    }
    return interleaved_rates({name: partial(rate, work) for name, work in contenders.items()}, options.repeats)


def small(root: Path, repeats: int) -> dict[str, list[float]]:
    """Rates of round trips of the small tree, through the store and through a private Ray."""
    tree = {f"layers.{i}.weight": torch.randn(SMALL_NUMBERS) for i in range(SMALL_TENSORS)}
    arrays = {name: tensor.numpy() for name, tensor in tree.items()}

    def by_ray(values: list[Any]) -> float:
        began = time.perf_counter()
        ray.get([ray.put(value) for value in values])
        return 1 / (time.perf_counter() - began)

    publisher = Publisher(root, tree)
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        return interleaved_rates(
            {
                "ours, small": partial(rate, publisher.round_trip),
                "Ray, half of them one by one": partial(by_ray, list(tree.values())[: ONE_BY_ONE // 2]),
                "Ray, one by one": partial(by_ray, list(tree.values())[:ONE_BY_ONE]),
                "Ray, dict of tensors": partial(by_ray, [tree]),
                "Ray, dict of arrays": partial(by_ray, [arrays]),
            },
            repeats,
        )
    finally:
        ray.shutdown()


COUNTED = ("open", "fcntl.flock", "mmap.__new__", "os.link", "os.remove", "os.rename", "os.listdir", "os.scandir")
"""Python's names of what a store does with files (audit events)."""


def operations(root: Path, number: int) -> int:
    """Operations of one publication of `number` tensors, once others came before it."""
    tree = {f"layers.{i}.weight": torch.randn(8) for i in range(number)}
    publisher = Publisher(root, tree, into={name: torch.zeros(8) for name in tree})
    for _ in range(3):
        rate(publisher.set)
        rate(publisher.get)
    seen: list[str] = []
    watching = True

    def count(event: str, arguments: Any) -> None:
        if watching and event in COUNTED:
            seen.append(event)

    async def publication() -> float:
        return await publisher.set() + await publisher.get()

    sys.addaudithook(count)
    rate(publication)
    watching = False
    return len(seen)


class RawRay:
    """An actor that puts an array, or gets one."""

    def put(self, num_bytes: int) -> list[Any]:
        """A reference in a list, so that Ray does not resolve it."""
        return [ray.put(np.ones(num_bytes // 4, np.float32))]

    def get(self, refs: list[Any]) -> None:
        """Returns when this node has the array."""
        ray.get(refs)


def sparse_update(weights: torch.Tensor) -> None:
    """Changes the last bit of some numbers, here and there."""
    positions = torch.randint(len(weights), (int(len(weights) * CHANGED),))
    weights.view(torch.int16)[positions] ^= 1


def dense_update(weights: torch.Tensor) -> None:
    """Changes the last bit of all numbers."""
    weights.view(torch.int16).bitwise_xor_(1)


class Versions:
    """A policy's versions, fetched one after the other. Both nodes keep the version before the newest."""

    def __init__(self, store: NodeObjectStore, agent: NodeAgent, policy: str, num_bytes: int) -> None:
        """`agent` is that of the node that fetches."""
        self._store, self._agent, self._policy = store, agent, policy
        self._weights = torch.randn(num_bytes // 2, dtype=torch.bfloat16)
        self._version = 0

    async def fetch(self, update: Callable[[torch.Tensor], None]) -> float:
        """Seconds until the other node has the next version."""
        update(self._weights)
        self._version += 1
        await self._store.set(self._key(self._version), {"w": self._weights})
        took = await seconds(self._agent.fetch(ShmObjectStore.file_name(self._key(self._version))))
        await self._store.release(self._key(self._version - 1))
        return took

    def _key(self, version: int) -> ObjectKey:
        return weights_key(PolicyName(self._policy), Version(version))


async def between_nodes(address: str, num_bytes: int, repeats: int) -> tuple[dict[str, list[float]], float]:
    """Bytes per second from node `head` to node `other`, through the store and through Ray alone, in turn.

    Also returns the bytes that crossed for an update that changed little, by the bytes of the weights.
    """
    settings = ClusterSettings(backend="ray", address=address)
    rates: dict[str, list[float]] = {name: [] for name in ("fetch", "raw Ray", "delta, 1%", "delta, all changed")}
    tree = {"w": torch.ones(num_bytes // 4)}
    actor: Any = ray.remote(num_cpus=0)(RawRay)
    with tempfile.TemporaryDirectory(prefix="fx") as leased, RunLeases("set_get", root=Path(leased)) as leases:
        async with ray_cluster(settings, leases=leases, residents=1, deltas=True) as cluster:
            ids = {node.name: node.id for node in cluster.nodes}
            store, agent = NodeObjectStore(RayFiles(ids["head"])), RayPeers().agent(ids["other"])
            sender, receiver = [
                actor.options(label_selector={"ray.io/node-id": ids[node]}).remote() for node in ("head", "other")
            ]
            little, much = (Versions(store, agent, policy, num_bytes) for policy in ("little", "much"))
            for repeat in range(repeats + 2):
                key = ObjectKey(f"weights/solver/{repeat}")
                await store.set(key, tree)
                refs = await sender.put.remote(num_bytes)
                ours = await seconds(agent.fetch(ShmObjectStore.file_name(key)))
                theirs = await seconds(receiver.get.remote(refs))
                await store.release(key)
                del refs
                sparse, dense = await little.fetch(sparse_update), await much.fetch(dense_update)
                if repeat > 1:  # By then there is memory to write to again.
                    for rate_of, took in zip(rates.values(), (ours, theirs, sparse, dense), strict=True):
                        rate_of.append(num_bytes / took)
            _, fetches = await RayPeers().agent(ids["head"]).fetches()
    by_difference = [one for one in fetches if one.sent.by_difference]
    return rates, max(one.sent.num_bytes / one.fetch.num_bytes for one in by_difference)


async def by_mooncake(address: str, num_bytes: int, repeats: int) -> list[float]:
    """Bytes per second from node `head` to node `other`, through the store and Mooncake."""
    settings, rates = ClusterSettings(backend="ray", address=address, transport="mooncake"), list[float]()
    tree = {"w": torch.ones(num_bytes // 4)}
    with tempfile.TemporaryDirectory(prefix="fx") as leased, RunLeases("mooncake", root=Path(leased)) as leases:
        async with ray_cluster(settings, leases=leases, residents=1) as cluster:
            ids = {node.name: node.id for node in cluster.nodes}
            store, agent = NodeObjectStore(RayFiles(ids["head"])), RayPeers().agent(ids["other"])
            for repeat in range(repeats + 2):
                key = ObjectKey(f"weights/solver/{repeat}")
                await store.set(key, tree)
                took = await seconds(agent.fetch(ShmObjectStore.file_name(key)))
                await store.release(key)
                if repeat > 1:
                    rates.append(num_bytes / took)
    return rates


def mooncake_is_there() -> bool:
    """True if it is installed."""
    try:
        engine_class()
    except ConfigError:
        return False
    return True


async def seconds(call: Awaitable[object]) -> float:
    """Seconds of the clock until the call returns."""
    began = time.perf_counter()
    await call
    return time.perf_counter() - began


def nodes(mib: int, repeats: int) -> tuple[dict[str, list[float]], float]:
    """The same on two Ray nodes of this machine."""
    node: dict[str, Any] = {"num_cpus": 2, "object_store_memory": max(4 * mib, 100) * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "node_name": "head", "include_dashboard": False})
    try:
        cluster.add_node(node_name="other", **node)
        rates, delta_bytes = asyncio.run(between_nodes(str(cluster.address), mib * 2**20, repeats))
        if mooncake_is_there():
            rates["Mooncake"] = asyncio.run(by_mooncake(str(cluster.address), mib * 2**20, repeats))
        return rates, delta_bytes
    finally:
        cluster.shutdown()


def main() -> None:
    """Runs the benchmark."""
    parts = parser(__doc__.splitlines()[0] if __doc__ else None)
    parts.set_defaults(threads=1)
    parts.add_argument("--gib", type=float, default=1.0, help="size of the large tree in GiB (default 1)")
    parts.add_argument("--fetch-mib", type=int, default=256, help="size of the object between nodes (default 256)")
    options = parts.parse_args()
    torch.set_num_threads(options.threads)
    with folder() as root:
        bulk, trips = large(root, options), small(root, options.repeats)
        counted = {f"operations_{number}": float(operations(root, number)) for number in (10, 10000)}
    moved, delta_bytes = nodes(options.fetch_mib, options.repeats)
    figures = {
        "set_vs_memcpy": median_ratio(bulk, "set", "memcpy"),
        "get_vs_memcpy": median_ratio(bulk, "get", "memcpy"),
        "set_plain_vs_memcpy": median_ratio(bulk, "set, no digest", "memcpy"),
        "get_plain_vs_memcpy": median_ratio(bulk, "get, no digest", "memcpy"),
        "vs_per_tensor": median_ratio(trips, "ours, small", "Ray, one by one") * SMALL_TENSORS / ONE_BY_ONE,
        "vs_ray_put_dict": median_ratio(trips, "ours, small", "Ray, dict of tensors"),
        "vs_ray_put_views": median_ratio(trips, "ours, small", "Ray, dict of arrays"),
        **counted,
        "ray_vs_raw_ray": median_ratio(moved, "fetch", "raw Ray"),
        "delta_bytes": delta_bytes,
        "delta_vs_whole": median_ratio(moved, "delta, 1%", "fetch"),
        "dense_vs_whole": median_ratio(moved, "delta, all changed", "fetch"),
    }
    wanted = dict(WANTED)
    if "Mooncake" in moved:
        figures["mooncake_vs_ray"] = median_ratio(moved, "Mooncake", "fetch")
        wanted |= WANTED_OF_MOONCAKE
    rows = [(name, f"{1e3 / statistics.median(of):.1f}") for name, of in (bulk | trips).items()]
    rows += [(name, f"{options.fetch_mib * 2**20 * 1e3 / statistics.median(of):.1f}") for name, of in moved.items()]
    title = (
        f"{options.gib:g} GiB; {SMALL_TENSORS} tensors of {SMALL_NUMBERS} numbers; {options.fetch_mib} MiB to a node"
    )
    report(title, ("what", "ms"), rows, figures, as_json=options.json, wanted=wanted, wanted_at_most=WANTED_AT_MOST)


if __name__ == "__main__":
    main()
