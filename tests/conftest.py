"""What all tests share: one torch thread, one limit of time, and one small run per process."""

import faulthandler
import gc
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# Before anything of transformers is imported: a hub name that slips into a test must fail, with network or without.
os.environ["HF_HUB_OFFLINE"] = "1"
# What tests start has one thread too, where other tests run at the same time. Examples that ask for two get them; these
# sleep while they wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tests.small_run import write_team

# In the background of a shell Ctrl-C is ignored, and tests that press it would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The models of the tests are tiny, and threads that wait for each other cost minutes.
torch.set_num_threads(1)

# On a busy machine an example takes as long as it takes.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


# What is imported stays, and need not be searched for garbage again and again.
gc.disable()


def pytest_collection_finish() -> None:
    """Collects garbage again, but not among the tests and all that they import."""
    gc.freeze()
    gc.enable()


# The only limit of time on the clock that tests have. No test comes near it, on however busy a machine.
HANG_S = 900


class Hang(AssertionError):
    """A test that does not end."""


@pytest.fixture(autouse=True)
def no_endless_test() -> Iterator[None]:
    """A hang is a failure that shows what every thread did."""

    def hangs(*_: object) -> None:
        faulthandler.dump_traceback()
        raise Hang(f"the test hangs: it took more than {HANG_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


BEGIN_UNTIL = float(os.environ.get("FLEXMARL_TESTS_BEGIN_UNTIL", "inf"))
"""Seconds since 1970 after which no test begins; those that are left are skipped, and say so."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > BEGIN_UNTIL:
        pytest.skip("no time is left for it: see FLEXMARL_TESTS_BEGIN_UNTIL")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a pytest that gives a test no name which xdist could change: groups are then forgotten without a word."""
    if config.getoption("dist", "no") == "loadgroup" and not hasattr(pytest.Item, "_nodeid"):
        raise pytest.UsageError(f"pytest-xdist has no groups under pytest {pytest.__version__}: use pytest<9.2")


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a small run, in a folder with all that it needs; nobody writes there."""
    return write_team(tmp_path_factory.mktemp("small_run"))


STRANGER = 65534


@dataclass(frozen=True)
class Stranger:
    """Another user of this machine, who acts in a folder where everyone may write, as /tmp."""

    folder: Path

    def does(self, script: str, **names: object) -> None:
        """Runs a shell script as that user, in that folder, with these variables."""
        variables = {name: str(value) for name, value in names.items()}
        subprocess.run(
            ["sh", "-eu", "-c", script],
            user=STRANGER,
            group=STRANGER,
            extra_groups=[],
            cwd=self.folder,
            env=variables,
            check=True,
        )


@pytest.fixture
def stranger() -> Iterator[Stranger]:
    """Skips where we are not root: nobody else can act as two users."""
    if os.getuid() != 0:
        pytest.skip("to act as a second user takes root")
    with tempfile.TemporaryDirectory(prefix="fx", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Stranger(Path(name))


def everything_in(folder: Path) -> dict[str, tuple[object, ...]]:
    """What lies in a folder: kind, mode, owner, time of the last change, content; to see that nothing was touched."""
    return {
        str(path): (status.st_mode, status.st_uid, status.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *sorted(folder.rglob("*"))]
        if (status := path.lstat())
    }
