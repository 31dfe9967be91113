"""Faults of the durable store, each with a witness: nothing acknowledged is lost, and errors say what to do."""

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexmarl.errors import StoreError
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.store_file import copy_file, read_store, restore_file
from flexmarl.testing.experience import AGENTS, COLUMNS, SHARED, SOLVER, partial, sample
from tests.unit.experience.acknowledging import a_row
from tests.unit.experience.files import assert_holds, copy_as_it_is, new_store, wal_of

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
FORKS_AND_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]
needs_mounts = pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run([*FORKS_AND_MOUNTS, "true"], capture_output=True).returncode != 0,
    reason="this system lets no user mount a small disk of their own",
)


def test_a_killed_run_loses_no_acknowledged_row(tmp_path: Path):
    path, kills, next_group = tmp_path / "experience.sqlite", random.Random(5), 0
    acknowledged: set[int] = set()
    for how in ("create", "open", "open"):
        with writing(how, path, next_group) as child:
            acknowledged |= {int(next(child.stdout)) for _ in range(kills.randint(1, 60))}
            child.send_signal(signal.SIGKILL)
            acknowledged |= {int(line) for line in child.stdout if line.endswith("\n")}
        assert child.returncode == -signal.SIGKILL
        assert wal_of(path).stat().st_size, "it was killed with rows that were not merged in"
        next_group = max(acknowledged) + 5
    with read_store(path) as reader:
        ((there,),) = reader.query("SELECT count(*) FROM solver").rows
    assert there >= len(acknowledged)
    assert wal_of(path).stat().st_size, "reading left the files as they were"
    assert_holds(path, acknowledged)


def test_a_copy_that_was_made_while_a_process_wrote_replaces_the_store_when_that_is_killed_and_gone(tmp_path: Path):
    path, copy = tmp_path / "experience.sqlite", tmp_path / "copy.sqlite"
    with writing("create", path, 0) as child:
        acknowledged = {int(next(child.stdout)) for _ in range(50)}
        copy_file(path, copy)
        later = {int(next(child.stdout)) for _ in range(50)}
        with pytest.raises(StoreError, match=f"in use by process {child.pid}"):
            restore_file(path, copy)
        child.send_signal(signal.SIGKILL)
    for left in (path, wal_of(path)):
        left.unlink()
    Path(f"{path}-shm").unlink()
    restore_file(path, copy)
    assert_holds(path, acknowledged)
    with read_store(path) as reader:
        ((there,),) = reader.query("SELECT count(*) FROM solver").rows
    assert there < len(acknowledged | later) + 50, "the copy is of the moment at which it was begun, and not of the end"
    with pytest.raises(StoreError, match="exists"):
        restore_file(path, copy)


def test_two_processes_that_write_at_once_lose_no_row(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> set[int]:
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS)
        with writing("join", path, 100_000) as child:
            theirs = {int(next(child.stdout))}
            for group in range(100):
                await store.put(SOLVER, [a_row(group)])
            theirs |= {int(next(child.stdout)) for _ in range(20)}
            child.kill()
            theirs |= {int(line) for line in child.stdout if line.endswith("\n")}
        await store.put(SOLVER, [a_row(100)])
        await store.close()
        return theirs

    theirs = asyncio.run(life())
    assert len(theirs) > 20
    assert_holds(path, {*range(101), *theirs})


def test_a_second_owner_is_told_who_the_first_is_until_that_one_is_killed(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    with writing("create", path, 0) as child:
        next(child.stdout)
        for second in (lambda: DurableStore.open(path), lambda: new_store(path)):
            with pytest.raises(StoreError, match=rf"in use by process {child.pid}: wait .* or end it \(kill"):
                second()
        child.kill()
    asyncio.run(DurableStore.open(path).close())


@pytest.mark.parametrize("what", ["limit", pytest.param("room", marks=needs_mounts)])
def test_a_full_disk_is_an_error_and_with_room_it_goes_on(tmp_path: Path, what: str):
    small_disk = f"mount -t tmpfs -o size=6m none {tmp_path}; " if what == "room" else ""
    said = run_shell(f"{small_disk}{sys.executable} {HERE}/full_disk.py {what} {tmp_path}", mounts=what == "room")
    assert f"putting rows into table 'solver': {tmp_path}/experience.sqlite: it cannot grow" in said
    assert "MB free in" in said
    assert "Make room, or set `store.budget_gb`" in said
    assert ("disk is full" if what == "room" else "disk I/O error") in said
    assert ("free when refused: 0\n" in said) is (what == "room")
    assert "and 20 more" in said


@needs_mounts
def test_a_folder_that_cannot_be_written_is_named_and_still_read(tmp_path: Path):
    path = tmp_path / "disk" / "experience.sqlite"

    async def life() -> None:
        store = new_store(path)
        await store.put(SOLVER, [a_row(0)])
        copy_as_it_is(path, tmp_path / "disk" / "killed" / "experience.sqlite")
        await store.close()

    asyncio.run(life())
    said = run_shell(
        f"mount --bind {tmp_path}/disk {tmp_path}/disk; mount -o remount,ro,bind {tmp_path}/disk; "
        f"{sys.executable} {HERE}/read_only.py {path}",
        mounts=True,
    )
    assert said.count("must be an existing folder and writable") == 3
    assert "Table(columns=('count(*)',), rows=((1,),))" in said
    assert "its newest rows in experience.sqlite-wal cannot be read here; copy both files into a folder of" in said


def test_a_lock_that_another_process_holds_is_an_error_after_a_while_and_then_it_goes_on(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        store = DurableStore.create(path, agents=AGENTS, columns=COLUMNS, lock_wait_s=0.05)
        await store.put(SOLVER, [a_row(0)])
        with locked(path):
            with pytest.raises(StoreError, match=r"putting rows .* another process holds the write lock: .*fuser"):
                await store.put(SOLVER, [a_row(1)])
            assert len(await store.get([sample(0)])) == 1, "readers do not wait for it"
        await store.put(SOLVER, [a_row(2)])
        await store.close()

    asyncio.run(life())
    assert_holds(path, {0, 2}, exactly=True)


def test_the_loop_goes_on_while_a_commit_waits(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        store = new_store(path)
        with locked(path):
            putting = asyncio.create_task(store.put(SOLVER, [a_row(0)]))
            for _ in range(20):
                assert await store.counts(SHARED) == {}
            assert not putting.done(), "it cannot have been acknowledged"
        await putting
        await store.close()

    asyncio.run(life())
    assert_holds(path, {0})


@pytest.mark.slow
def test_a_hundred_thousand_acknowledged_rows_are_all_there(tmp_path: Path):
    path = tmp_path / "experience.sqlite"

    async def life() -> None:
        store = new_store(path)

        async def put_some(first: int) -> None:
            for start in range(first, 100_000, 8 * 250):
                await store.put(SOLVER, [partial(sample(group), int=group) for group in range(start, start + 250)])

        await asyncio.gather(*(put_some(250 * part) for part in range(8)))
        await store.close()

    asyncio.run(life())
    with read_store(path) as reader:
        assert reader.query("SELECT count(*), sum(int), count(DISTINCT group_id) FROM solver").rows == (
            (100_000, sum(range(100_000)), 100_000),
        )


@contextmanager
def locked(path: Path) -> Iterator[None]:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.close()


@contextmanager
def writing(how: str, path: Path, first: int) -> Iterator[subprocess.Popen[str]]:
    """A process that puts rows and prints their groups; it is gone when the block ends."""
    command = [sys.executable, HERE / "acknowledging.py", how, path, str(first)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as child:
        try:
            yield child
        finally:
            child.kill()


def run_shell(command: str, *, mounts: bool) -> str:
    ran = subprocess.run(
        [*(FORKS_AND_MOUNTS if mounts else []), "sh", "-ec", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
