"""SQLite files that hold an experience store: making, checking, owning and reading one, and what its errors mean.

experience.sqlite          the tables; `layout` says which agents and columns they have
experience.sqlite-wal      the newest transactions, until they are merged: acknowledged rows, so never delete it
experience.sqlite-shm      index of the -wal file
experience.sqlite.owner    process id of the run that owns the store; locked as long as that process lives

`copy_file` makes a copy, in one file, while a run writes; `restore_file` puts it in place of a store that is gone.

`read_store` opens a file for reading only, while a run writes to it or after the run ended in any way.
"""

import fcntl
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Self
from urllib.parse import quote

import psutil

from flexmarl.errors import StoreError, StoreInUse, boundary
from flexmarl.experience.interface import Column, ColumnKind, Row, Table
from flexmarl.experience.schema import quote as quote_name
from flexmarl.experience.transactions import Tables, connect, query, transaction
from flexmarl.records import AgentName

APPLICATION_ID = int.from_bytes(b"flxm")
LAYOUT_VERSION = 4
PAGE_BYTES = 16384
"""A usual tensor takes two kilobytes: seven of them fill a page, while a page of 8192 bytes wastes a quarter. Larger
pages cost puts of one row more than they save."""
WAL_PAGES = 2000
"""Merge the -wal file at 32 MB: a merge costs a sync of its own, and a page that is written often is merged once.
A higher limit is no better: overwriting the file is faster than letting it grow."""
MERGE_BYTES = 8_000_000
"""Merge the -wal file on another thread after so many bytes of payloads: the writer need not merge those pages itself
when the file reaches 32 MB. A smaller number would sync the file more often for the same pages."""
LOCK_WAIT_S = 30.0
"""Other processes hold the write lock for one commit, which takes milliseconds; half a minute means that one hangs."""
COPY_PAGES = 256
"""Pages that are copied at a time, 4 MB; between two times, other threads of the process run."""
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "fuse.sshfs", "fuse.s3fs"}
)


def connect_file(path: Path, *, wait_s: float = LOCK_WAIT_S, mode: str = "rw") -> sqlite3.Connection:
    """Opens a connection whose commits are on the disk when they return; `mode` is the mode of an SQLite URI."""
    db = connect(f"file:{quote(str(path.resolve()))}?mode={mode}", wait_s=wait_s)
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {WAL_PAGES * PAGE_BYTES}")
    return db


def merge(db: sqlite3.Connection) -> None:
    """Merges as much of the -wal file as possible while others read and write. This makes no row more durable."""
    with suppress(sqlite3.Error):  # The writer gets its own error when the disk is full.
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def make_file(path: Path, tables: Tables) -> None:
    """Makes a new store at `path`. The file gets its name when it is complete: a kill before that leaves no store."""
    new = Path(f"{path}.new")
    with explained(path, "making the experience store"):
        for left in (new, Path(f"{new}-wal"), Path(f"{new}-shm")):
            left.unlink(missing_ok=True)
        db = connect_file(new, mode="rwc")
        try:
            db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            db.execute("PRAGMA journal_mode = WAL")
            with transaction(db):
                db.execute("CREATE TABLE layout (agents TEXT NOT NULL, columns TEXT NOT NULL)")
                columns = [[column.name, column.kind.value] for column in tables.columns.values()]
                db.execute("INSERT INTO layout VALUES (?, ?)", (json.dumps(tables.agents), json.dumps(columns)))
                tables.lay_out(db)
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {LAYOUT_VERSION}")
        finally:
            db.close()  # merges the -wal file in and removes it
        new.rename(path)
        _sync(path.parent)


def copy_file(path: Path, to: Path) -> None:
    """Copies a store as it is now into a new file, without its -wal file, while other connections write.

    The copy is not flushed to the disk. Raises sqlite3.Error and OSError; then there may be half a file.
    """
    with closing(connect_file(path)) as store, closing(sqlite3.connect(to, isolation_level=None)) as copy:
        copy.execute("PRAGMA journal_mode = OFF")
        copy.execute("PRAGMA synchronous = OFF")
        with transaction(store, "BEGIN"):
            store.execute("SELECT before_group FROM pruned").fetchone()  # From here on it reads one state of the store:
            store.backup(copy, pages=COPY_PAGES)  # else every write of others would begin the copy anew.


def restore_file(path: Path, copy: Path) -> None:
    """Puts a copy in place of a store that is gone. Raises StoreInUse if a run owns it, StoreError if it is there."""
    owner, new = Ownership.of(path), Path(f"{path}.new")
    try:
        refuse_file(path)
        with explained(path, f"restoring the experience store from {copy}"):
            shutil.copyfile(copy, new)
            _sync(new)
            new.rename(path)
            _sync(path.parent)
    finally:
        owner.give_up()


def read_layout(path: Path, db: sqlite3.Connection) -> Tables:
    """Reads which tables the file has. Raises StoreError if it holds no experience store, or another layout version."""
    with explained(path, "reading the layout of the experience store"):
        (application,), (version,) = (
            db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
        )
        if application != APPLICATION_ID:
            raise StoreError(
                f"{path} is an SQLite file, but holds no experience store; name another file, or move this one away"
            )
        if version != LAYOUT_VERSION:
            raise StoreError(
                f"{path} has layout {version} of the experience store, this flexmarl reads {LAYOUT_VERSION}; "
                f"use the flexmarl that made it, or move it away"
            )
        agents, columns = db.execute("SELECT agents, columns FROM layout").fetchone()
        return Tables(
            [AgentName(agent) for agent in json.loads(agents)],
            [Column(name, ColumnKind(kind)) for name, kind in json.loads(columns)],
        )


def check_file(path: Path, db: sqlite3.Connection) -> None:
    """Reads the whole file. Raises StoreError if pages are torn or missing."""
    with explained(path, "checking the experience store"):
        found = [line for (line,) in db.execute("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            raise StoreError(f"checking the experience store: {path}: {DAMAGED} ({'; '.join(found)})")


def require_file(path: Path) -> None:
    """Raises StoreError if there is no file at `path`."""
    if not path.is_file():
        raise StoreError(f"there is no experience store at {path}; a run with `store.type: sqlite` makes one")


def refuse_file(path: Path) -> None:
    """Raises StoreError if a store, or the -wal or -shm file of one, is already at `path`."""
    if path.exists():
        raise StoreError(f"{path} exists; go on with it (`--resume`), or choose another run folder")
    left = [f"{path}{ending}" for ending in ("-wal", "-shm") if Path(f"{path}{ending}").exists()]
    if left:
        raise StoreError(f"{', '.join(left)} exist without {path}: put that file back, or move these away")


class Ownership:
    """The right to run on a store. One process holds it at a time; the system frees it when that process ends."""

    def __init__(self, lock: IO[str]) -> None:
        self._lock = lock

    @classmethod
    def of(cls, path: Path) -> Self:
        """Takes the ownership of the store at `path`. Raises StoreInUse with the owner's process id if it is taken."""
        owner = Path(f"{path}.owner")
        with explained(path, "taking ownership of the experience store"):
            lock = owner.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            pid = lock.read().strip() or "unknown"
            lock.close()
            raise StoreInUse(
                f"{path} is in use by process {pid}: wait until that run ends, or end it (kill {pid}); "
                f"to read it during the run, use `flexmarl store`"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return cls(lock)

    def give_up(self) -> None:
        """Ends the ownership. Calling it twice is allowed."""
        self._lock.close()


DAMAGED = (
    "the file is damaged. Keep a copy; `sqlite3 FILE .recover` gets out what is readable. To go on, move it away "
    "with its -wal and -shm files and use `--resume`: a run resumes from its checkpoint, with the store's copy in it "
    "(`checkpoint.store`) or a new, empty store"
)


@contextmanager
def explained(path: Path, doing: str) -> Iterator[None]:
    """Turns SQLite's and the system's errors inside the block into a StoreError that says what to do."""
    with boundary(StoreError, doing):
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{doing}: {path}: {_meaning(error, path)} ({error})") from error


def _meaning(error: sqlite3.Error | OSError, path: Path) -> str:
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    folder = path.parent
    if primary == sqlite3.SQLITE_CORRUPT:
        return DAMAGED
    if primary == sqlite3.SQLITE_NOTADB:
        return "this is no SQLite file; name the store of a run (`experience.sqlite` in its folder), or move this away"
    if primary == sqlite3.SQLITE_BUSY:
        return f"another process holds the write lock: find it with `fuser {path}` and end it{_hint(path)}"
    if primary == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_WRITE:
        return (
            f"it cannot grow: {_free(folder)} free in {folder}, and the process may have a limit of file size "
            f"(ulimit -f). Make room, or set `store.budget_gb`; what was acknowledged is safe"
        )
    if not os.access(folder, os.W_OK) or primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return f"it cannot be written: {folder} must be an existing folder and writable, with its files"
    if primary == sqlite3.SQLITE_IOERR:
        return f"the disk does not take or give data; what was acknowledged is safe if the disk is{_hint(path)}"
    return "SQLite refused"


def _sync(path: Path) -> None:
    """Syncs a file, or a folder: a new file name is durable only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.1f} MB"
    except OSError:
        return "an unknown space"


def network_hint(path: Path, file_systems: Mapping[str, str]) -> str:
    """Advice if `path` is on a network file system, where SQLite cannot rely on locks and shared memory; else empty.

    `file_systems` maps mount points to their types.

    >>> network_hint(Path("/home/ann/runs/7"), {"/": "ext4", "/home": "nfs4"})
    '; /home is a network file system (nfs4): put the run folder on a local disk'
    """
    mount = max((mount for mount in file_systems if path.is_relative_to(mount)), key=len, default="")
    if file_systems.get(mount) not in NETWORK_FILE_SYSTEMS:
        return ""
    return f"; {mount} is a network file system ({file_systems[mount]}): put the run folder on a local disk"


def _hint(path: Path) -> str:
    return network_hint(path.resolve(), {disk.mountpoint: disk.fstype for disk in psutil.disk_partitions(all=True)})


ROWS_AT_ONCE = 256
"""Rows that are decoded together. This bounds the memory of an export of any size."""


class StoreReader:
    """Reads a store from any process. All calls block, but none waits for the run that writes."""

    def __init__(self, path: Path, db: sqlite3.Connection, tables: Tables) -> None:
        self._path = path
        self._db = db
        self._tables = tables

    @property
    def agents(self) -> tuple[AgentName, ...]:
        """Names of the agents; each has a table of that name."""
        return self._tables.agents

    @property
    def columns(self) -> tuple[Column, ...]:
        """Data columns of every agent's table."""
        return tuple(self._tables.columns.values())

    def query(self, sql: str) -> Table:
        """Runs one SELECT; `payload(column)` shows a string, list or tensor as text or JSON.

        >>> reader.query("SELECT sample_id, payload(text), reward FROM solver LIMIT 2")  # doctest: +SKIP
        """
        with explained(self._path, "querying the experience store"):
            return query(self._db, sql)

    def rows(self, agent: AgentName) -> Iterator[Row]:
        """Yields all rows of an agent's table as they are now, decoded, in claim order."""
        with explained(self._path, f"reading table {agent!r}"), transaction(self._db, "BEGIN"):
            ids = self._tables.ids(self._db, agent)
            for first in range(0, len(ids), ROWS_AT_ONCE):
                yield from self._tables.get(self._db, ids[first : first + ROWS_AT_ONCE])

    def episode(self, group: int, index: int, attempt: int) -> list[Row]:
        """Returns the rows of one episode, of all agents, as they are now, in the order of its calls."""
        which = f"group_id = {group:d} AND episode_index = {index:d} AND attempt = {attempt:d}"
        tables = " UNION ALL ".join(
            f"SELECT sample_id, hop FROM {name} WHERE {which}" for name in map(quote_name, self.agents)
        )
        with explained(self._path, f"reading episode {index} of group {group}"), transaction(self._db, "BEGIN"):
            found = self._db.execute(f"{tables} ORDER BY hop").fetchall()
            return self._tables.get(self._db, [sample_id for sample_id, _ in found])


@contextmanager
def read_store(path: Path) -> Iterator[StoreReader]:
    """Opens the store for reading, for the length of the block.

    This also works after kill -9, and all acknowledged rows are there. The folder must then be writable, because
    SQLite writes an index of the -wal file. In a read-only folder, only a store that was closed can be read.
    """
    require_file(path)
    mode = "ro" if os.access(path.parent, os.W_OK) else _mode_without_writing(path)
    with explained(path, "opening the experience store"):
        db = connect_file(path, mode=mode)
    try:
        yield StoreReader(path, db, read_layout(path, db))
    finally:
        db.close()


def _mode_without_writing(path: Path) -> str:
    wal = Path(f"{path}-wal")
    if wal.exists() and wal.stat().st_size:
        raise StoreError(
            f"{path} was not closed and {path.parent} cannot be written, so its newest rows in {wal.name} cannot be "
            f"read here; copy both files into a folder of yours and read them there"
        )
    return "ro&immutable=1"
