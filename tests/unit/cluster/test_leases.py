"""What a run holds on this machine ends with it, however it ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flexmarl.cluster.leases import RunLeases, leases_root
from flexmarl.cluster.remains import abandoned, live_processes, read_leases, release, writers

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


def test_leaving_the_block_ends_and_removes_everything(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with RunLeases("quickstart", root=tmp_path / "root") as leases:
        (leases.folder / "ray").mkdir()
        shared = leases.shared_memory()
        shared.mkdir()
        (shared / "weights").write_bytes(b"0")
        leases.add_processes([sleeper.pid])
        warden = leases._warden.pid
    assert sleeper.wait() == -signal.SIGKILL
    assert not any(left.exists() for left in (shared, leases.folder))
    assert not psutil.pid_exists(warden)
    leases.close()


def test_the_warden_of_a_killed_controller_ends_and_removes_everything(doomed: Any) -> None:
    doomed.controller.kill()
    doomed.warden.wait()
    assert doomed.controller.wait() == -signal.SIGKILL
    assert gone(doomed.worker)
    assert not doomed.shared.exists()
    assert not doomed.folder.exists()


def test_the_warden_waits_for_the_end_of_a_pipe_that_the_controller_holds_and_is_no_child_of_it(doomed: Any) -> None:
    assert os.readlink(f"/proc/{doomed.warden.pid}/fd/0").startswith("pipe:")
    assert doomed.warden.ppid() != doomed.controller.pid


def test_a_kill_of_the_controllers_group_does_not_reach_the_warden(doomed: Any) -> None:
    assert os.getpgid(doomed.warden.pid) != os.getpgid(doomed.controller.pid)
    assert os.getsid(doomed.warden.pid) != os.getsid(doomed.controller.pid)


def test_a_live_run_is_not_abandoned_and_a_dead_one_is(doomed: Any, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert list(abandoned(root)) == []
    doomed.warden.kill()
    doomed.controller.kill()
    doomed.controller.wait()
    assert [read_leases(folder).run for folder in abandoned(root)] == ["doomed"]
    assert live_processes(read_leases(doomed.folder)) == [doomed.worker], "witness: nobody has cleaned"
    for folder in abandoned(root):
        release(folder)
    assert gone(doomed.worker)
    assert not doomed.shared.exists()
    assert list(root.iterdir()) == []


def test_a_recycled_pid_is_not_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with RunLeases("rebooted", root=tmp_path) as leases:
        leases.add_processes([sleeper.pid])
        record = leases.folder / "leases.json"
        started = psutil.Process(sleeper.pid).create_time()
        record.write_text(record.read_text().replace(str(started), str(started - 60)))
        assert live_processes(read_leases(leases.folder)) == []
        release(leases.folder)
        assert sleeper.poll() is None


def test_what_writes_into_the_folder_ends_though_nobody_noted_it(tmp_path: Path) -> None:
    with RunLeases("half started", root=tmp_path) as leases, (leases.folder / "log").open("w") as log:
        unnoted = subprocess.Popen(SLEEP, stdout=log)
        assert [writer.pid for writer in writers(leases.folder)] == [unnoted.pid]
    assert unnoted.wait() == -signal.SIGKILL


@pytest.mark.parametrize("length", range(1, 40))
def test_the_folder_is_short_enough_for_the_sockets_in_it(length: int) -> None:
    run = leases_root(Path("/" + length * "t")) / "k3x9q2ab"
    session = "session_2026-11-20_13-20-00_164152_4194304"
    assert len(str(run / "ray" / session / "sockets" / "plasma_store.1")) <= 107


def gone(process: psutil.Process) -> bool:
    """Ended; a zombie is, and waits for a parent that is dead too."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
