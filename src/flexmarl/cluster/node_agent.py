"""The agent of a run on one node: its leases and processes there, and its files, which other nodes can fetch.

A file is complete when it has its name, and never changes. A node fetches it once, however many of its processes ask:

    process ── fetch ──► its node's agent ── begin_fetch ──► agent at home: which node has it, and is least busy
                                          ── read ─────────► that node's agent, piece by piece
                                          ── end_fetch ────► agent at home

Where both nodes have the file before it (its base), that node's agent is first asked for the difference of each piece.
The sums of the new piece come with it. A piece whose difference does not pay, or comes out otherwise, is read whole.
With one-sided reads (OneSidedMemory), that node's agent offers the file's memory, and pieces are read from there.

Home is the node of the controller. Nodes are known by their ids. This file imports no torch.
"""

import asyncio
import errno
import fcntl
import importlib.metadata
import mmap
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Protocol
from uuid import uuid4
from weakref import WeakValueDictionary

import numpy as np
import psutil

from flexmarl.cluster.file_delta import difference, patch
from flexmarl.cluster.interface import ClusterNode
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.locations import Fetch, Fetched, Locations, Sent, family
from flexmarl.cluster.spill import Spill, reserve
from flexmarl.errors import ObjectError, ObjectSpaceError, WorkerError

PIECE_BYTES = 32 << 20
"""Bytes of a file that cross in one call."""
PIECES_AHEAD = 3
"""Pieces that are asked for before they are needed, so that the way between the nodes is never idle."""
NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})
"""Errors of a file system without room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts about a node that decide whether a run can use it."""

    python: str
    """Version, as in 3.11.7."""
    flexmarl: str
    """Version of the package."""
    missing: tuple[str, ...]
    """Paths that were asked for and are not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A file of one node, offered for one-sided reads."""

    session: str
    """Reaches the memory's process: host:port."""
    address: int
    """Address of the first byte there."""
    num_bytes: int


class OneSidedMemory(Protocol):
    """One node's end of reads in which the source's process takes no part."""

    def offer(self, path: Path, number: int) -> Offer:
        """Offers a complete file until `withdraw`. Raises OSError if it is gone, or cannot be offered.

        `number` is unique in the run. The file's memory is locked for reading, so that nobody writes to it again.
        """
        ...

    def withdraw(self, number: int) -> None:
        """Ends an offer. An unknown one is ignored."""
        ...

    def read(self, offer: Offer, descriptor: int, start: int, num_bytes: int) -> None:
        """Copies the bytes from `start` on, `num_bytes` of them, to the same place of an open file of the offer's size.

        The caller asks for `chunk_bytes` at most. `start` is a multiple of the page size. Blocks. Raises OSError if the
        source cannot be read.
        """
        ...

    @property
    def chunk_bytes(self) -> int:
        """Most bytes of one transfer."""
        ...

    def close(self) -> None:
        """Ends all offers."""
        ...


class NodeFiles(Protocol):
    """The files of a run, for the processes of one node. It can be pickled: each process finds its own node's."""

    @property
    def at_home(self) -> bool:
        """True if this process is on the controller's node."""
        ...

    async def folder(self) -> Path:
        """The node's folder. A file in it is complete when it has its name."""
        ...

    async def announce(self, file: str) -> None:
        """Makes a complete file of this node known to all. Raises FileExistsError if there is one of that name."""
        ...

    async def fetch(self, file: str) -> None:
        """Returns when this node has the file. Raises FileNotFoundError, which lists the files that exist."""
        ...

    async def drop(self, file: str) -> None:
        """Removes a file from all nodes. An unknown one is ignored."""
        ...


class NodeAgent(Protocol):
    """The contract of a node's agent."""

    async def facts(self, paths: Sequence[str]) -> NodeFacts:
        """Reads the facts of the node. `paths` are looked for there."""
        ...

    async def pid(self) -> int:
        """The process of the agent."""
        ...

    async def add_processes(self, pids: Sequence[int]) -> None:
        """Records processes of the node that end with the run, or with this agent."""
        ...

    async def process_ended(self, pid: int, timeout_s: float) -> None:
        """Returns when the process has ended, or after the time."""
        ...

    async def folder(self) -> str:
        """As in `NodeFiles`."""
        ...

    async def announce(self, file: str) -> None:
        """As in `NodeFiles`."""
        ...

    async def fetch(self, file: str) -> None:
        """As in `NodeFiles`."""
        ...

    async def drop(self, file: str) -> None:
        """As in `NodeFiles`."""
        ...

    async def remove(self, file: str) -> None:
        """Removes a file from this node, also if it is being fetched."""
        ...

    async def add_file(self, file: str, node: str, num_bytes: int) -> bool:
        """At home: adds a file that a node has. Returns False if there is one of that name."""
        ...

    async def begin_fetch(self, file: str, node: str, avoid: Sequence[str]) -> Fetch | None:
        """At home: permits a node to fetch a file from a node that is not in `avoid`; None if no other has it."""
        ...

    async def end_fetch(self, file: str, number: int, sent: Sent | None) -> bool:
        """At home: ends a fetch, which failed if nothing was sent. Returns False if the file was dropped meanwhile."""
        ...

    async def difference(self, file: str, base: str, start: int, num_bytes: int) -> bytes:
        """The difference between the same bytes of two files of one size, as `difference` of file_delta.py returns it.

        Raises FileNotFoundError if one of them is gone.
        """
        ...

    async def files(self) -> list[str]:
        """At home: the files that exist."""
        ...

    async def offer(self, file: str, number: int) -> Offer:
        """Offers a file of this node to the fetch of this number. Raises OSError if it is gone or cannot be offered."""
        ...

    async def withdraw(self, number: int) -> None:
        """Ends an offer. An unknown one is ignored."""
        ...

    async def lose(self, node: str) -> None:
        """At home: forgets the files of a lost node, and ends the offers that were made to it."""
        ...

    async def fetches(self, after: int = 0) -> tuple[int, list[Fetched]]:
        """At home: the number of fetches that have ended, and those that came after the first `after`."""
        ...

    async def close(self) -> None:
        """Ends the run's processes on the node and removes its files."""
        ...


class Peers(Protocol):
    """The other agents, as an agent calls them. Calls to a lost one raise WorkerError."""

    def agent(self, node: str) -> NodeAgent:
        """The agent of a node."""
        ...

    async def read(self, node: str, file: str, start: int, num_bytes: int) -> memoryview:
        """Bytes of a file on another node. Raises WorkerError or OSError if they cannot be had."""
        ...


class LocalAgent:
    """The agent of this process's node. Its methods are those of `NodeAgent`."""

    def __init__(
        self,
        node: ClusterNode,
        *,
        home: str,
        leases: RunLeases,
        peers: Peers,
        memory: OneSidedMemory | None = None,
        deltas: bool = False,
        memory_bytes: int | None = None,
    ) -> None:
        """`home` is the node whose agent knows where files are. Makes the folder in shared memory.

        `memory` is for one-sided reads, which all agents of a run have or none; None: `peers` read piece by piece.
        `deltas`: files may come as differences. `memory_bytes`: files beyond so many are on disk; None: none is.
        """
        self._memory, self._deltas = memory, deltas
        self._node, self._home = node, home
        self._leases, self._peers = leases, peers
        self._locations = Locations()
        self.path = leases.shared_memory()
        """The folder of the files."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if memory_bytes is not None:
            Spill.allow(self.path, leases.spilled(), memory_bytes)
        self._spill = Spill.of(self.path)
        self._under_way: MutableMapping[str, asyncio.Lock] = WeakValueDictionary()
        """Files that are being fetched. Whoever wants one of them waits for its lock, and then finds it."""
        self._dropped: set[str] = set()
        """Files that were dropped while they were fetched."""

    async def facts(self, paths: Sequence[str]) -> NodeFacts:
        """Reads the facts of the node."""
        missing = await asyncio.to_thread(lambda: tuple(path for path in paths if not Path(path).exists()))
        version = importlib.metadata.version("flexmarl")
        return NodeFacts(python=platform.python_version(), flexmarl=version, missing=missing)

    async def pid(self) -> int:
        """This process."""
        return os.getpid()

    async def add_processes(self, pids: Sequence[int]) -> None:
        """Records them in the leases of the run on this node."""
        self._leases.add_processes(pids)

    async def process_ended(self, pid: int, timeout_s: float) -> None:
        """Waits for a process of this node."""
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            await asyncio.to_thread(psutil.Process(pid).wait, timeout_s)

    async def folder(self) -> str:
        """The folder of the files."""
        return str(self.path)

    async def announce(self, file: str) -> None:
        """Adds the file at home."""
        if not await self._agent(self._home).add_file(file, self._node.id, (self.path / file).stat().st_size):
            raise FileExistsError(file)

    async def fetch(self, file: str) -> None:
        """Fetches the file, or waits for the fetch that is under way."""
        async with self._under_way.setdefault(file, asyncio.Lock()):
            if not (self.path / file).exists():
                await self._fetch(file)

    async def drop(self, file: str) -> None:
        """Drops the file at home, which removes it from all nodes."""
        if self._node.id != self._home:
            await self._agent(self._home).drop(file)
            return
        for node in self._locations.drop(file):
            with suppress(WorkerError):  # A lost node's files go with it.
                await self._agent(node).remove(file)

    async def remove(self, file: str) -> None:
        """Removes the file's name. Its memory is free when no reader maps it any more."""
        if file in self._under_way:
            self._dropped.add(file)
        if self._spill is None:
            (self.path / file).unlink(missing_ok=True)
        else:
            await asyncio.to_thread(self._spill.remove, file)

    async def add_file(self, file: str, node: str, num_bytes: int) -> bool:
        """Adds it to the locations."""
        return self._locations.add(file, node, num_bytes)

    async def begin_fetch(self, file: str, node: str, avoid: Sequence[str]) -> Fetch | None:
        """Begins it in the locations."""
        return self._locations.begin(file, node, avoid=avoid)

    async def end_fetch(self, file: str, number: int, sent: Sent | None) -> bool:
        """Ends it in the locations."""
        return self._locations.end(file, number, sent)

    async def difference(self, file: str, base: str, start: int, num_bytes: int) -> bytes:
        """Compares the files on a thread: it only reads, so that it may go on after a cancellation."""

        def compared() -> bytes:
            new, old = (_mapped(self.path / name)[start : start + num_bytes] for name in (file, base))
            return difference(old, new) if len(old) == len(new) else b""

        return await asyncio.to_thread(compared)

    async def files(self) -> list[str]:
        """Lists the names in the locations."""
        return self._locations.names

    async def offer(self, file: str, number: int) -> Offer:
        """Offers a file of this node."""
        assert self._memory is not None, "all agents of a run have one-sided reads, or none"
        return self._memory.offer(self.path / file, number)

    async def withdraw(self, number: int) -> None:
        """Ends the offer."""
        if self._memory is not None:
            self._memory.withdraw(number)

    async def lose(self, node: str) -> None:
        """Forgets the node in the locations. It cannot withdraw what it was offered, so this is done for it."""
        for fetch in self._locations.lose(node):
            with suppress(WorkerError):  # The offers of a lost source went with it.
                await self._agent(fetch.source).withdraw(fetch.number)

    async def fetches(self, after: int = 0) -> tuple[int, list[Fetched]]:
        """Asks the locations."""
        return self._locations.fetched(after)

    async def close(self) -> None:
        """Ends the offers and the leases of the run on this node."""
        if self._memory is not None:
            self._memory.close()
        await asyncio.to_thread(self._leases.close)

    def _agent(self, node: str) -> NodeAgent:
        return self if node == self._node.id else self._peers.agent(node)

    async def _fetch(self, file: str) -> None:
        home = self._agent(self._home)
        failed: dict[str, str] = {}
        while fetch := await home.begin_fetch(file, self._node.id, list(failed)):
            sent, failure = Sent(0), "it was not finished"
            spills = self._spill is not None and not await asyncio.to_thread(
                self._spill.make_room, fetch.num_bytes, reusing=blocks_of(file)
            )
            try:
                with self._block_for(file, fetch.num_bytes, spills=spills) as (block, descriptor):
                    try:
                        sent, missing = await self._patch(file, fetch, descriptor)
                        copy = self._copy if self._memory is None else partial(self._read, self._memory)
                        failure = await copy(file, fetch, descriptor, missing)
                    finally:
                        current = await home.end_fetch(file, fetch.number, None if failure else sent)
                    if not current or file in self._dropped:
                        raise FileNotFoundError(f"'{file}' was dropped while it was fetched")
                    if not failure:
                        self._name(block, file)
                        return
                    failed[fetch.source] = failure
            finally:
                self._dropped.discard(file)
        if failed:
            sources = "; ".join(f"from node {node}: {why}" for node, why in failed.items())
            raise ObjectError(f"'{file}' cannot be fetched to node '{self._node.name}': {sources}")
        raise FileNotFoundError(f"no file '{file}'; there are: {await home.files() or 'none'}")

    async def _patch(self, file: str, fetch: Fetch, descriptor: int) -> tuple[Sent, list[int]]:
        """Makes what it can of a file from its base; returns all that will cross, and the pieces that must cross whole.

        A piece that its source does not give, for whatever reason, is among them: reading it says why. The base is not
        locked on either node: if it is dropped and its memory written again meanwhile, the sums are others.
        """
        missing = list(range(0, fetch.num_bytes, PIECE_BYTES))
        base = self._base(fetch)
        if base is None:
            return Sent(fetch.num_bytes), missing
        into = np.frombuffer(mmap.mmap(descriptor, fetch.num_bytes), np.uint8)
        ahead, sent = asyncio.Semaphore(PIECES_AHEAD), Counter[str]()

        async def patch_piece(start: int) -> None:
            async with ahead:
                piece, was = (of[start : start + PIECE_BYTES] for of in (into, base))
                delta = b""
                with suppress(WorkerError, OSError):
                    delta = await self._agent(fetch.source).difference(file, fetch.base, start, len(piece))
                right = bool(delta) and patch(delta, was, piece)
                sent["deltas"] += len(delta)
                sent["patched" if right else "mismatched" if delta else "refused"] += len(piece)
                if right:
                    missing.remove(start)

        async with asyncio.TaskGroup() as pieces:
            for start in list(missing):
                pieces.create_task(patch_piece(start), name=f"fetch {file} from byte {start} as a difference")
        crossing = sent["deltas"] + sent["mismatched"] + sent["refused"]
        return Sent(crossing, by_difference=sent["patched"], mismatched=sent["mismatched"]), missing

    def _base(self, fetch: Fetch) -> np.ndarray | None:
        """The base of a fetch, if its file may come as a difference."""
        if not (self._deltas and fetch.base and fetch.num_bytes):
            return None
        with suppress(FileNotFoundError):
            base = _mapped(self.path / fetch.base)
            return base if len(base) == fetch.num_bytes else None
        return None

    async def _copy(self, file: str, fetch: Fetch, descriptor: int, starts: Sequence[int]) -> str:
        """Copies pieces of a file from its source; returns what failed there, "" if nothing did."""
        ahead = asyncio.Semaphore(PIECES_AHEAD)
        failures: list[Exception] = []

        async def copy_piece(start: int) -> None:
            async with ahead:
                size = min(PIECE_BYTES, fetch.num_bytes - start)
                piece = await self._peers.read(fetch.source, file, start, size)
                os.pwrite(descriptor, piece, start)  # Not on a thread, which would go on after a cancellation.

        try:
            async with asyncio.TaskGroup() as pieces:
                for start in starts:
                    pieces.create_task(copy_piece(start), name=f"fetch {file} from byte {start}")
        except* (WorkerError, OSError) as group:
            failures += group.exceptions
        return f"{type(failures[0]).__name__}: {failures[0]}" if failures else ""

    async def _read(
        self, memory: OneSidedMemory, file: str, fetch: Fetch, descriptor: int, starts: Sequence[int]
    ) -> str:
        """Does as `_copy`, by one-sided reads."""
        if not starts:
            return ""
        source = self._agent(fetch.source)
        try:
            try:
                offer = await source.offer(file, fetch.number)
                if offer.num_bytes != fetch.num_bytes:
                    return f"it has {offer.num_bytes:,} bytes there, not {fetch.num_bytes:,}"
                for start, size in stretches(starts, fetch.num_bytes, memory.chunk_bytes):
                    await ended(partial(memory.read, offer, descriptor, start, size))
            finally:  # Also if the answer to the offer never came.
                with suppress(WorkerError):
                    await source.withdraw(fetch.number)
        except (WorkerError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _name(self, block: Path, file: str) -> None:
        """Gives a complete file its name, by which the processes of this node find it, in memory or on disk."""
        if block.parent == self.path:
            os.link(block, self.path / file)
        else:
            assert self._spill is not None
            self._spill.name(block, file)

    @contextmanager
    def _block_for(self, file: str, num_bytes: int, *, spills: bool) -> Iterator[tuple[Path, int]]:
        """Locks a block for a file to come and opens it: one that held an earlier file of its family, or a new one.

        Memory that was written before costs a fraction of new memory. Readers lock it as they lock any block
        (objects/backends/blocks.py). With `spills`, or where memory is full and files may spill, it is on disk. Raises
        ObjectError if this node has no room for a new one.
        """
        start = blocks_of(file)
        path, descriptor = self.path / f"{start}{uuid4().hex}.block", -1
        for free, one in self._free_blocks(start):
            if descriptor < 0 and os.fstat(one).st_size == num_bytes and not spills:
                path, descriptor = free, os.dup(one)  # It has the same lock.
            else:
                free.unlink()
        try:
            if descriptor < 0 and not spills:
                descriptor = new_file(path)
                if not self._reserved(descriptor, num_bytes):
                    if self._spill is None:
                        raise self._no_room(file, num_bytes, self.path)
                    os.close(descriptor)
                    path.unlink()
                    descriptor = -1
            if descriptor < 0 and self._spill is not None:
                path = self._spill.new_path()
                descriptor = new_file(path)
                if not has_room(descriptor, num_bytes):
                    raise self._no_room(file, num_bytes, path.parent)
            yield path, descriptor
        finally:
            if descriptor >= 0:
                if not self._is_named(file, path, descriptor):  # Nothing came of it.
                    path.unlink(missing_ok=True)
                os.close(descriptor)

    def _is_named(self, file: str, path: Path, descriptor: int) -> bool:
        """True if the block has the file's name, or another one."""
        if path.parent == self.path:
            return os.fstat(descriptor).st_nlink > 1
        named = self.path / file
        return named.is_symlink() and named.readlink() == path

    def _free_blocks(self, start: str) -> Iterator[tuple[Path, int]]:
        """The blocks that no file is in and nobody reads, each opened and locked until the next one is asked for."""
        for path in sorted(self.path.glob(f"{start}*.block")):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink == 1:
                    yield path, descriptor
            except BlockingIOError:
                continue
            finally:
                os.close(descriptor)

    def _reserved(self, descriptor: int, num_bytes: int) -> bool:
        """Reserves memory now, at the cost of free blocks. Returns False if there is none: no source can help that."""
        if has_room(descriptor, num_bytes):
            return True
        for free, _ in self._free_blocks(""):
            free.unlink()
        return has_room(descriptor, num_bytes)

    def _no_room(self, file: str, num_bytes: int, folder: Path) -> ObjectSpaceError:
        room = os.statvfs(folder)
        remedy = (
            "give that machine more shared memory (`mount -o remount,size=16G /dev/shm`), or let some be on disk "
            "(`objects.memory_gib`)"
            if folder == self.path
            else "set TMPDIR on that machine to a folder of a larger disk before Ray starts"
        )
        return ObjectSpaceError(
            f"node '{self._node.name}': fetching '{file}' needs {num_bytes:,} bytes in {folder}, where "
            f"{room.f_bavail * room.f_frsize:,} are free; remove what dead runs left there (`flexmarl clean`), or "
            f"{remedy}"
        )


def blocks_of(file: str) -> str:
    """The beginning of the names of blocks to which files of this family are fetched."""
    return f"fetched-{blake2b(family(file).encode(), digest_size=8).hexdigest()}-"


def new_file(path: Path) -> int:
    """Makes a file of this user alone, opens it and locks it for writing."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def stretches(starts: Sequence[int], end: int, longest: int) -> Iterator[tuple[int, int]]:
    """Joins the pieces at `starts` of a file of `end` bytes to stretches of at most `longest`: (start, bytes) of each.

    >>> list(stretches([0, PIECE_BYTES, 3 * PIECE_BYTES], 3 * PIECE_BYTES + 5, 8 * PIECE_BYTES))
    [(0, 67108864), (100663296, 5)]
    """
    begin = until = 0
    for start in (*sorted(starts), None):
        if start is None or start != until or until - begin + PIECE_BYTES > longest:
            if until > begin:
                yield begin, until - begin
            begin = until = start or 0
        if start is not None:
            until = min(start + PIECE_BYTES, end)


async def ended(work: Callable[[], None]) -> None:
    """Runs work on a thread, and does not return before it has ended: it writes into memory that is used again."""
    working = asyncio.get_running_loop().run_in_executor(None, work)
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:  # Perhaps not the first one.
            cancelled = error
    if cancelled:
        raise cancelled
    working.result()


def _mapped(path: Path) -> np.ndarray:
    """A file that is not empty, in uint8."""
    return np.memmap(path, np.uint8, "r")


def has_room(descriptor: int, num_bytes: int) -> bool:
    """Reserves the memory of an open file; returns False if there is no room. Raises any other OSError."""
    try:
        reserve(descriptor, num_bytes)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        return False
    return True


def agent_of(
    node: ClusterNode,
    *,
    home: str,
    run: str,
    root: Path | None,
    make_peers: Callable[[], Peers],
    make_memory: Callable[[], OneSidedMemory] | None = None,
    deltas: bool = False,
    memory_bytes: int | None = None,
) -> LocalAgent:
    """Makes the agent of the node that this process is on, with leases of its own: the run's folder and its warden.

    `make_memory` is for one-sided reads, if the run has them; the others are as for the agent.
    """
    memory = make_memory() if make_memory else None
    leases, peers = RunLeases(run, root=root), make_peers()
    return LocalAgent(
        node, home=home, leases=leases, peers=peers, memory=memory, deltas=deltas, memory_bytes=memory_bytes
    )
