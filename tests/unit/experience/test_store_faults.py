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
from flexmarl.experience.backends import store_file
from flexmarl.experience.backends.durable import DurableStore
from flexmarl.experience.backends.reader import read_store
from flexmarl.testing.experience import AGENTS, COLUMNS, SHARED, SOLVER, partial, sample
from tests.unit.experience.acknowledging import a_row, tokens

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
        assert Path(f"{path}-wal").stat().st_size, "it was killed with rows that were not merged in"
        next_group = max(acknowledged) + 5
    assert_holds(path, acknowledged)


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
    asyncio.run(new_store(tmp_path / "disk" / "experience.sqlite").close())
    said = run_shell(
        f"mount --bind {tmp_path}/disk {tmp_path}/disk; mount -o remount,ro,bind {tmp_path}/disk; "
        f"{sys.executable} {HERE}/read_only.py {tmp_path}/disk/experience.sqlite",
        mounts=True,
    )
    assert said.count("must be an existing folder and writable") == 3
    assert "Table(columns=('count(*)',), rows=((0,),))" in said


def test_a_transaction_that_was_cut_off_is_as_if_it_had_not_been(tmp_path: Path):
    path, live = tmp_path / "experience.sqlite", tmp_path / "live" / "experience.sqlite"

    async def life() -> int:
        store = new_store(path)
        await store.put(SOLVER, [a_row(group) for group in range(20)])
        intact = wal_of(path).stat().st_size
        await store.put(SOLVER, [a_row(20)])
        copy_as_it_is(path, live)
        await store.close()
        return intact

    intact = asyncio.run(life())
    for size in random.Random(7).sample(range(intact, wal_of(live).stat().st_size), 5):
        torn = tmp_path / str(size) / "experience.sqlite"
        copy_as_it_is(live, torn)
        os.truncate(wal_of(torn), size)
        assert_holds(torn, set(range(20)), exactly=True)


def test_a_page_that_was_torn_while_it_was_merged_in_comes_from_the_wal_again(tmp_path: Path):
    path, torn = tmp_path / "experience.sqlite", tmp_path / "torn" / "experience.sqlite"

    async def life() -> None:
        store = new_store(path)
        await store.put(SOLVER, [a_row(group) for group in range(20)])
        merging = sqlite3.connect(path)
        merging.execute("PRAGMA wal_checkpoint(PASSIVE)")
        copy_as_it_is(path, torn)
        merging.close()
        await store.close()

    asyncio.run(life())
    size = torn.stat().st_size
    assert size > 20 * tokens(0).nbytes, "the rows have been merged in"
    os.truncate(torn, size - store_file.PAGE_BYTES // 2)
    with torn.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        file.write(os.urandom(1000))
    assert_holds(torn, set(range(20)), exactly=True)


@pytest.mark.parametrize("where", ["head", "middle", "end"])
def test_a_damaged_file_says_how_to_go_on(tmp_path: Path, where: str):
    path = tmp_path / "experience.sqlite"
    asyncio.run(filled(path, 50))
    size = path.stat().st_size
    with path.open("r+b") as file:
        if where == "end":
            file.truncate(size - 3 * store_file.PAGE_BYTES)
        else:
            file.seek(0 if where == "head" else size // 2 // store_file.PAGE_BYTES * store_file.PAGE_BYTES)
            file.write(random.Random(3).randbytes(store_file.PAGE_BYTES))
    words = "no SQLite file" if where == "head" else "the file is damaged.*\\.recover.*--resume"
    with pytest.raises(StoreError, match=f"{path}: .*{words}"):
        DurableStore.open(path)


def test_a_file_that_is_no_store_is_named(tmp_path: Path):
    text, other, empty = (tmp_path / name for name in ("notes.txt", "other.sqlite", "empty.sqlite"))
    text.write_text("no database" * 999)
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE mine (x)")
    db.close()
    empty.touch()
    for path, words in ((text, "no SQLite file"), (other, "no experience store"), (empty, "no experience store")):
        for opens in (DurableStore.open, DurableStore.join, lambda path: read_store(path).__enter__()):
            with pytest.raises(StoreError, match=f"{path}.*{words}"):
                opens(path)
    with pytest.raises(StoreError, match=r"no experience store at .*nowhere.*`store.type: sqlite` makes one"):
        DurableStore.open(tmp_path / "nowhere")


def test_a_store_of_another_layout_is_named(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    asyncio.run(new_store(path).close())
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match=r"layout 99 of the experience store, this flexmarl reads 1"):
        DurableStore.open(path)


def test_a_new_store_never_takes_the_place_of_an_old_one(tmp_path: Path):
    path = tmp_path / "experience.sqlite"
    asyncio.run(filled(path, 3))
    with pytest.raises(StoreError, match=r"exists; go on with it \(`--resume`\), or choose another run folder"):
        new_store(path)
    assert_holds(path, {0, 1, 2})
    shutil.copy(path, f"{path}-wal")
    path.unlink()
    with pytest.raises(StoreError, match=r"experience.sqlite-wal exist without .*: put that file back"):
        new_store(path)


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


def test_a_network_file_system_is_named_in_errors_of_locks():
    hint = store_file.network_hint(Path("/shared/run"), {"/": "ext4", "/shared": "nfs4", "/share": "ext4"})
    assert hint == "; /shared is a network file system (nfs4): put the run folder on a local disk"
    assert store_file.network_hint(Path("/home/run"), {"/": "ext4", "/shared": "nfs4"}) == ""


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


def new_store(path: Path) -> DurableStore:
    path.parent.mkdir(exist_ok=True)
    return DurableStore.create(path, agents=AGENTS, columns=COLUMNS)


async def filled(path: Path, num_rows: int) -> None:
    store = new_store(path)
    await store.put(SOLVER, [a_row(group) for group in range(num_rows)])
    await store.close()


def assert_holds(path: Path, groups: set[int], *, exactly: bool = False) -> None:
    """Opens it as a resumed run does, and reads back what was acknowledged."""

    async def life() -> None:
        store = DurableStore.open(path)
        rows = await store.get([sample(group) for group in sorted(groups)])
        for group, row in zip(sorted(groups), rows, strict=True):
            assert (row.values["text"], row.values["tensor"].tolist()) == (f"row {group}", tokens(group).tolist())
        ((count,),) = (await store.query("SELECT count(*) FROM solver")).rows
        assert count == len(groups) if exactly else count >= len(groups)
        await store.close()

    asyncio.run(life())


def wal_of(path: Path) -> Path:
    return Path(f"{path}-wal")


def copy_as_it_is(path: Path, to: Path) -> None:
    """What a machine that stops now would leave on its disk."""
    to.parent.mkdir()
    shutil.copy(path, to)
    shutil.copy(wal_of(path), wal_of(to))


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
