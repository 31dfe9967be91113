"""Sandboxes for the tests, and who runs them: this user, and a plain one if this user is root."""

import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from flexmarl.sandbox.backends.bubblewrap import Bubblewrap
from flexmarl.sandbox.backends.cgroups import Cgroups
from flexmarl.sandbox.probe import probe_now

PLAIN = 65534


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without bubblewrap, tests of boxes say so; those of its absence run."""
    if shutil.which("bwrap") is None:
        for item in items:
            if "sandbox" in item.path.parts and not item.get_closest_marker("without_bwrap"):
                item.add_marker(pytest.mark.skip(reason="bubblewrap is not installed: apt-get install bubblewrap"))


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    """The sandbox of this machine. Tests of boxes are skipped where none can be opened: no run would begin here."""
    missing = [one for one in probe_now(Bubblewrap()) if not one.held]
    assert not [one for one in missing if one.found.startswith("got through")]
    if missing:
        pytest.skip(f"this machine cannot guarantee {missing[0].name}: {missing[0].found}")
    return Bubblewrap()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that boxes, which are nobody's, can get into."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.stat().st_mode & 0o001 == 0:
            folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


def remains() -> list[str]:
    """Boxes and groups of this process that are still there."""
    processes = [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
    left = [f"process {one.pid} {one.name()}" for one in processes if one.name() in ("bwrap", "sh", "setpriv")]
    groups = Cgroups.here()
    if isinstance(groups, Cgroups):
        left += [str(one) for folder in groups.folders for one in folder.glob(f"{groups.name}-*")]
    return left


@contextmanager
def delegated() -> Iterator[list[Path]]:
    """Control groups that a plain user may manage: the files by which a process enters them. Root makes them."""
    groups = Cgroups.here()
    assert isinstance(groups, Cgroups), groups
    folders = [folder / f"delegated-{os.getpid()}" for folder in groups.folders]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        for one in (folder, *folder.iterdir()):
            if one.is_dir() or one.name == "cgroup.procs":
                os.chown(one, PLAIN, PLAIN)
    try:
        yield [folder / "cgroup.procs" for folder in folders]
    finally:
        for folder in folders:
            for _ in range(500):  # What has ended leaves its group a little later.
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.01)
            assert not folder.exists()


def as_plain_user(work: Callable[[], object]) -> object:
    """What `work` returns, as JSON, in a fork of this process that is a plain user, in groups of its own."""
    reading, writing = os.pipe()
    with delegated() as entries:
        child = os.fork()
        if child == 0:
            try:
                for entry in entries:
                    entry.write_text("0")
                os.setgroups([])
                os.setresgid(PLAIN, PLAIN, PLAIN)
                os.setresuid(PLAIN, PLAIN, PLAIN)
                tempfile.tempdir = "/tmp"  # Root's own may be closed to others.
                os.write(writing, json.dumps(work()).encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc(file=sys.stderr)
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            answer = answers.read()
        assert os.waitpid(child, 0)[1] == 0, "the plain user failed; see above"
    return json.loads(answer)
