"""What tests of a real Ray share."""

import os
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from flexmarl.cluster.settings import ClusterSettings

# By default Ray runs its workers at niceness 15: beside other tests they would stand still. Private Rays do the same.
os.environ |= {"RAY_worker_niceness": "0"}

JOINING = {"nodes": "roomy", "shared_nodes": "nodes", "somebodys_ray": "nodes"}
"""Fixtures of tests that join a Ray, and which process runs them: one has the nodes that may be killed."""


def joins(item: pytest.Item) -> str | None:
    """The process of a test that joins a Ray."""
    fixtures = getattr(item, "fixturenames", ())
    return next((process for fixture, process in JOINING.items() if fixture in fixtures), None)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Puts those tests first, and in processes of their own, that join a Ray: one that had a private Ray cannot.

    So nodes are started once, too. Of the others those of one file share a process, and so the run that they compare
    with.
    """
    for item in items:
        if item.get_closest_marker("ray") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(joins(item) or item.path.stem))
    yield
    items.sort(key=lambda item: not joins(item))


@pytest.fixture
def short_root() -> Iterator[Path]:
    """A folder for leases; pytest's own have paths that are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def somebodys_ray() -> Iterator[str]:
    """Address of a Ray with two CPUs that is not ours."""
    theirs = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield str(theirs.address)
    theirs.shutdown()


OTHERS = ("left", "right")
"""The nodes beside the head, as every test finds them."""


class Nodes:
    """A Ray that is not ours: three nodes of this machine, `head`, `left` and `right`."""

    def __init__(self, *, cpus: int) -> None:
        self._cpus = cpus
        self._ray = Cluster(initialize_head=True, head_node_args=self._node("head", include_dashboard=False))
        self._others = {name: self._ray.add_node(**self._node(name)) for name in OTHERS}

    @property
    def address(self) -> str:
        return str(self._ray.address)

    def settings(self, **more: Any) -> ClusterSettings:
        """Settings that join it."""
        return ClusterSettings(backend="ray", address=self.address, **more)

    def add(self, name: str) -> None:
        """Starts one more node."""
        self._others[name] = self._ray.add_node(**self._node(name))

    def kill(self, name: str) -> None:
        """Ends a node as a power cut would."""
        self._ray.remove_node(self._others.pop(name), allow_graceful=False)

    def restore(self) -> None:
        """Starts the nodes that were killed, and kills those that were added. Ray knows of it then."""
        for name in self._others.keys() - set(OTHERS):
            self.kill(name)
        for name in OTHERS:
            if name not in self._others:
                self.add(name)
        self._ray.wait_for_nodes(timeout=60)

    def close(self) -> None:
        self._ray.shutdown()

    def _node(self, name: str, **more: Any) -> dict[str, Any]:
        return {"num_cpus": self._cpus, "node_name": name, "object_store_memory": 100 * 2**20, **more}


@pytest.fixture(scope="session")
def shared_nodes() -> Iterator[Nodes]:
    """Three nodes that the tests leave as they were."""
    nodes = Nodes(cpus=3)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def roomy_nodes() -> Iterator[Nodes]:
    """Three nodes, two of which have room for what was on all."""
    nodes = Nodes(cpus=6)
    yield nodes
    nodes.close()


@pytest.fixture
def nodes(roomy_nodes: Nodes) -> Nodes:
    """Three nodes for one test, which may kill and add some."""
    roomy_nodes.restore()
    return roomy_nodes
