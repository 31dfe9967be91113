"""Blocks on files: memory that is written again and again, and the locks that keep writers and readers apart.

    {family}-{layout}-{id}.block       a block. It has this name alone: it is free
    weights%2Fsolver%2F3.object        a hard link to a block: the object that is in it

    16 bytes: lengths of index and key | index (JSON) | key | tensors, from a multiple of 4 KiB on

writer: takes the exclusive lock of a free block, or makes a new one; writes; links the object's name; unlocks
reader: takes the shared lock; sees that the name still leads to this block, and that the key is its own; reads; unlocks
taker:  takes the exclusive lock of an object's block, and its name away; works on the tensors; links the next name

Nobody takes a block that has a link, so what a reader has locked is whole. The kernel unlocks the files of a process
that dies, so nothing is counted. A file with an object's name that is no link, as from another node, is read alike.
Memory that was written or read before costs a fraction of new memory, so that each process keeps its blocks mapped.
"""

import errno
import fcntl
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch

from flexmarl.cluster.spill import reserve
from flexmarl.cluster.torch_device import LockedPages
from flexmarl.errors import ObjectError
from flexmarl.objects.tensors import Layout, separate, views

KEPT = 2
"""Blocks of one family and layout that stay: one is served while the next version is written to the other."""
PAGE = 4096
MOST_LOOKS, LOOK_S = 30_000, 0.002
"""Looks at an object that somebody has locked to write, and the seconds between two of them."""
_WORTH_LOCKING = 1 << 20
"""Bytes of tensors."""
_LENGTH_BYTES = 8
_HELD = frozenset({errno.EWOULDBLOCK, errno.EACCES})


class Header:
    """The bytes of a block before its tensors: an object's key and layout."""

    def __init__(self, key: str, layout: Layout) -> None:
        self.key, self.layout = key, layout
        index, name = _index_of(layout), key.encode("utf-8", "surrogatepass")
        lengths = b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") for part in (index, name))
        self.data = lengths + index + name
        self.begin = _begin(len(self.data))
        """The byte at which the tensors begin."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole block."""
        return self.begin + self.layout.num_bytes

    @property
    def family(self) -> str:
        """The key without its last part, hashed: the objects that follow one another in the same blocks."""
        prefix = self.key.rpartition("/")[0]
        return blake2b(prefix.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    @property
    def shape(self) -> str:
        """The layout and its place in the block, hashed. The gaps between tensors are zero in all such blocks."""
        return blake2b(_index_of(self.layout) + self.begin.to_bytes(8, "little"), digest_size=8).hexdigest()

    @classmethod
    def read(cls, block: mmap.mmap) -> "Header":
        """The header of an object that was read from its block."""
        start = 2 * _LENGTH_BYTES
        index, name = (int.from_bytes(block[at : at + _LENGTH_BYTES], "little") for at in (0, _LENGTH_BYTES))
        key = block[start + index : start + index + name].decode("utf-8", "surrogatepass")
        return cls(key, _layout_of(block[start : start + index]))


@lru_cache(maxsize=16)
def _index_of(layout: Layout) -> bytes:
    return json.dumps(layout.as_plain(), separators=(",", ":")).encode("utf-8", "surrogatepass")


@lru_cache(maxsize=16)
def _layout_of(index: bytes) -> Layout:
    return Layout.from_plain(json.loads(index))


def _begin(header_bytes: int) -> int:
    return -(-header_bytes // PAGE) * PAGE


def identity(status: os.stat_result) -> tuple[int, int]:
    """The device and the number of a file. Files in memory and on disk may have the same number."""
    return status.st_dev, status.st_ino


class Block:
    """An open block. One thread at a time has it."""

    def __init__(self, path: Path, flags: int = 0) -> None:
        """Opens the file. Raises FileNotFoundError, or FileExistsError if it must be new (`os.O_EXCL`)."""
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        self._map: mmap.mmap | None = None
        self._tensors: tuple[int, Layout, dict[str, torch.Tensor]] | None = None
        self._locked: LockedPages | None = None

    def __del__(self) -> None:
        """Closes the file, which unlocks it unless a map of it is in use."""
        if hasattr(self, "file"):
            os.close(self.file)

    @property
    def map(self) -> mmap.mmap:
        """The whole block, mapped once."""
        if self._map is None:
            self._map = mmap.mmap(self.file, 0)
        return self._map

    @property
    def links(self) -> int:
        """Names of the file: 1 if the block is free, 0 if it was removed."""
        return os.fstat(self.file).st_nlink

    @property
    def identity(self) -> tuple[int, int]:
        """The file's device and number, by which it is known whatever its names."""
        return identity(os.fstat(self.file))

    def is_at(self, path: Path) -> bool:
        """True if the path leads to this file."""
        try:
            return identity(path.stat()) == self.identity
        except FileNotFoundError:
            return False

    def forget_map(self) -> None:
        """Leaves the map to those who have it. The file stays locked as long as they do."""
        self._map = self._tensors = self._locked = None

    def used(self) -> None:
        """Makes this moment the time of its last use: what went unread for longest leaves memory first (spill.py)."""
        os.utime(self.file)

    def lock_to_read(self, path: Path) -> bool:
        """Takes the shared lock, once no writer has the block; False if the path leads to it no more.

        Raises ObjectError after a minute.
        """
        for _ in range(MOST_LOOKS):
            if self._lock(fcntl.LOCK_SH):
                return True
            if not self.is_at(path):
                return False
            threading.Event().wait(LOOK_S)
        raise ObjectError(f"'{path}' cannot be read: a process has written to it for {MOST_LOOKS * LOOK_S:g} s")

    def lock_to_write(self) -> bool:
        """Takes the exclusive lock, unless someone holds a lock."""
        return self._lock(fcntl.LOCK_EX)

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self.file, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _HELD:
                raise
            return False
        return True

    def unlock(self) -> None:
        """Releases the lock."""
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def reserve(self, num_bytes: int) -> None:
        """Makes sure of the memory: without it, a write to the map would kill the process. Raises OSError."""
        if os.fstat(self.file).st_size != num_bytes:
            reserve(self.file, num_bytes)

    def tensors_beside(self, tree: Mapping[str, torch.Tensor], header: Header) -> dict[str, torch.Tensor]:
        """As `tensors`, to be copied from or to those of `tree`: at the full rate also if these are on CUDA."""
        if header.layout.num_bytes >= _WORTH_LOCKING and self._locked is None:
            device = next((tensor.device for tensor in tree.values() if tensor.device.type == "cuda"), None)
            self._locked = None if device is None else LockedPages(self.map, device)
        return self.tensors(header)

    def tensors(self, header: Header) -> dict[str, torch.Tensor]:
        """Views of the tensors, made once for each layout."""
        made = self._tensors
        if made is None or made[0] != header.begin or made[1] != header.layout:
            made = self._tensors = header.begin, header.layout, views(header.layout, self.map, header.begin)
        return made[2]


class Blocks:
    """The blocks of one folder, and those of them that this process keeps mapped."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._kept: dict[tuple[int, int], Block] = {}
        """By identity. Who uses one takes it out."""
        self._lent: WeakKeyDictionary[mmap.mmap, tuple[Block, Header]] = WeakKeyDictionary()
        """Blocks that were taken, by the map that their tensors are in. It goes with the last of these, and with it the
        lock."""
        self._lock = threading.Lock()

    @contextmanager
    def write(self, header: Header) -> Iterator[Block]:
        """Gives a block to the caller alone, its memory reserved and its header written.

        Raises OSError without room, FileNotFoundError without the folder.
        """
        block = self._take(header)
        try:
            try:
                block.reserve(header.num_bytes)
            except OSError:
                block.path.unlink()
                raise
            block.map[: len(header.data)] = header.data
            yield block
            block.used()
        finally:
            block.unlock()
            self._keep(block)

    @contextmanager
    def write_at(self, path: Path, header: Header) -> Iterator[Block]:
        """Gives a new file at the path to the caller, to be written as a block is. It goes if the context fails.

        Raises OSError without room.
        """
        made = Block(path, os.O_CREAT | os.O_EXCL)
        try:
            made.reserve(header.num_bytes)
            made.map[: len(header.data)] = header.data
            yield made
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    @contextmanager
    def read(self, path: Path, key: str) -> Iterator[tuple[Block, Header]]:
        """Locks the object for the caller, who may read it until the context ends. Raises FileNotFoundError."""
        block = self._locked(path, key, self._open)
        try:
            yield block, Header.read(block.map)
        finally:
            block.unlock()
            if block.links > 1:  # A file that is no block will not be written again.
                self._keep(block)

    def hold(self, path: Path, key: str) -> tuple[mmap.mmap, Header]:
        """A private map of the object, locked as long as it lives. Raises FileNotFoundError."""
        block = self._locked(path, key, Block)
        private = mmap.mmap(block.file, 0, access=mmap.ACCESS_COPY)  # It has the file open, hence the lock.
        return private, Header.read(private)

    def take(self, path: Path, key: str) -> dict[str, torch.Tensor] | None:
        """Takes the object's name, and its block for the caller alone as long as one of these tensors lives.

        None, and nothing has changed, if others read the object or it is in no block. Raises FileNotFoundError.
        """
        with self._lock:  # What was given back, and of which somebody still has tensors, is locked by this process.
            for lent, (block, before) in list(self._lent.items()):
                if block.is_at(path) and Header.read(lent).key == key:
                    path.unlink()
                    return separate(before.layout, lent, before.begin)
        block = self._open(path)
        if not block.lock_to_write():
            self._keep(block)
            return None
        header = Header.read(block.map)
        names = self._names(f"{header.family}-{header.shape}-")
        own = next((self._root / name for name in names if block.is_at(self._root / name)), None)
        if own is None or header.key != key or not block.is_at(path):
            block.unlock()
            return None
        path.unlink()
        block.path = own
        tree, lent = separate(header.layout, block.map, header.begin), block.map
        block.forget_map()
        with self._lock:
            self._lent[lent] = block, header
        return tree

    def give_back(self, header: Header, tree: Mapping[str, torch.Tensor], link: Callable[[Path], None]) -> bool:
        """Makes an object of a block that was taken, if the tree is exactly its tensors and it is no object yet.

        `link` names the object. It can be read once these tensors are gone: the block stays locked until then.
        """
        with self._lock:
            for lent, (block, before) in list(self._lent.items()):
                fits = before.begin == header.begin and before.layout == header.layout and block.links == 1
                if fits and _is_in(lent, before, tree):
                    lent[: len(header.data)] = header.data
                    link(block.path)
                    block.used()
                    return True
        return False

    def remove_free(self) -> None:
        """Removes every free block of the folder."""
        for name in self._names(""):
            if (block := self._free(name)) is not None:
                self._remove(block)

    def _locked(self, path: Path, key: str, opened: Callable[[Path], Block]) -> Block:
        while True:
            block = opened(path)
            if not block.lock_to_read(path):
                continue
            try:
                if identity(os.stat(path)) == block.identity:
                    if Header.read(block.map).key != key:
                        raise FileNotFoundError(f"{path} is not the object '{key}'")
                    block.used()
                    return block
            except BaseException:
                block.unlock()
                raise
            block.unlock()

    def _take(self, header: Header) -> Block:
        family, same = f"{header.family}-", f"{header.family}-{header.shape}-"
        names = self._names(family)
        number = sum(name.startswith(same) for name in names)
        taken: Block | None = None
        for name in names:
            if (block := self._free(name)) is None:
                continue
            if name.startswith(same) and taken is None:
                taken = block
            elif not name.startswith(same) or number > KEPT:
                number -= name.startswith(same)
                self._remove(block)
            else:
                block.unlock()
                self._keep(block)
        while taken is None:
            made = Block(self._root / f"{same}{uuid4().hex}.block", os.O_CREAT | os.O_EXCL)
            # Another writer may have seen the new block and taken it first.
            taken = made if made.lock_to_write() and made.links == 1 else None
        return taken

    def _names(self, start: str) -> list[str]:
        names = os.listdir(self._root)
        return sorted(name for name in names if name.startswith(start) and name.endswith(".block"))

    def _free(self, name: str) -> Block | None:
        """The block, locked for the caller alone, if it is free."""
        path = self._root / name
        try:
            if path.stat().st_nlink != 1:
                return None
            block = self._open(path)
        except FileNotFoundError:
            return None
        if block.lock_to_write():
            if block.links == 1:
                block.path = path  # It may have been opened by an object's name.
                return block
            block.unlock()
        self._keep(block)
        return None

    def _remove(self, block: Block) -> None:
        block.path.unlink()
        block.unlock()

    def _open(self, path: Path) -> Block:
        """The kept block that the path leads to, or a new opening of it."""
        known = identity(path.stat())
        with self._lock:
            kept = self._kept.pop(known, None)
        return kept or Block(path)

    def _keep(self, block: Block) -> None:
        """Keeps the block open for its next use, and closes those that were removed."""
        with self._lock:
            self._kept.setdefault(block.identity, block)
            for known in [known for known, kept in self._kept.items() if kept.links == 0]:
                del self._kept[known]


def _is_in(lent: mmap.mmap, header: Header, tree: Mapping[str, torch.Tensor]) -> bool:
    """True if the tree's tensors are those that the header places in this map."""
    places = separate(header.layout, lent, header.begin)
    return all(
        tensor.numel() == 0 or (tensor.data_ptr(), tensor.stride()) == (places[name].data_ptr(), places[name].stride())
        for name, tensor in tree.items()
    )
