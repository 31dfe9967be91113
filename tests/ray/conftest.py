"""What tests of a real Ray share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster


@pytest.fixture
def short_root() -> Iterator[Path]:
    """A folder for leases; pytest's own have paths that are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def somebodys_ray() -> Iterator[str]:
    """Address of a Ray with two CPUs that is not ours."""
    theirs = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield theirs.address
    theirs.shutdown()
