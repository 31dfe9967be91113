"""What tests of a real Ray share."""

import faulthandler
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

# Far above what any test takes on a busy machine.
HANG_S = 400


@pytest.fixture(autouse=True)
def no_endless_test() -> Iterator[None]:
    """A hang is a failure that shows what every thread did."""

    def hangs(*_: object) -> None:
        faulthandler.dump_traceback()
        raise AssertionError(f"the test hangs: it took more than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


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
