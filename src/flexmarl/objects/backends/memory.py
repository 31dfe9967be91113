"""Object stores on memory: a dictionary of one process, and files in shared memory that all processes of a machine map.

    /dev/shm/flexmarl-{run}/weights%2Fsolver%2F3.object

    8 bytes: length of the index | index (JSON) | block: one contiguous buffer per dtype

A file gets its name only when it is complete, so a reader never sees half an object, and a writer that dies leaves only
a `.partial` file behind. Nothing is registered anywhere: removing the folder removes everything.
"""

import asyncio
import errno
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote, unquote
from uuid import uuid4

import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.errors import ObjectError
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectMeta, TensorTree, checksum
from flexmarl.objects.tensors import ALIGNMENT, Layout, bytes_of, copy_in, layout_of, part_sums, views, whole_digest


class InlineObjectStore:
    """Object store for the inline world: `set` stores a copy, and `get` returns that copy."""

    def __init__(self, thread: DeviceThread | None = None) -> None:
        """Copies and checksums are made on `thread`, so that the event loop stays free; without it, at once."""
        self._thread = thread
        self._objects: dict[ObjectKey, dict[str, torch.Tensor]] = {}

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """Stores a copy. Raises ValueError if the key is taken."""
        if key in self._objects:
            raise ValueError(f"object '{key}' is already set; keys name immutable objects")
        copy, digest = await self._thread.run(_copied, tree) if self._thread else _copied(tree)
        if key in self._objects:
            raise ValueError(f"object '{key}' was set twice at a time; keys name immutable objects")
        self._objects[key] = copy
        return ObjectMeta(key, sum(t.numel() * t.element_size() for t in copy.values()), digest)

    async def get(self, key: ObjectKey) -> TensorTree:
        """The stored copy. Raises KeyError if there is none."""
        if key not in self._objects:
            raise KeyError(f"no object '{key}'; there are: {sorted(self._objects) or 'none'}")
        return self._objects[key]

    async def release(self, key: ObjectKey) -> None:
        """Drops the object, if there is one."""
        self._objects.pop(key, None)


def _copied(tree: TensorTree) -> tuple[dict[str, torch.Tensor], Checksum]:
    copy = {name: tensor.detach().clone() for name, tensor in tree.items()}
    return copy, checksum(copy)


_LENGTH_BYTES = 8
_LONGEST_NAME = 200
"""Bytes. File systems allow 255. A longer name is cut, and the digest of its key keeps it distinct."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


class ShmObjectStore:
    """One run's objects in one folder. Every process makes its own store with the same `root`; a store can be pickled.

    The process that owns the run calls `create`, and removes the folder when all other processes have ended. `set`
    copies on a thread, so that the event loop stays free. `get` maps the file, whose pages are loaded when they are
    read. A reader's changes to its tensors are seen by that reader alone. A released object stays valid for readers
    that have mapped it.
    """

    def __init__(self, root: Path) -> None:
        """`root` is a folder in memory, `/dev/shm/...`; on a disk it works too, at the disk's speed."""
        self._root = root

    def create(self) -> None:
        """Makes the folder, for this user alone. Raises ObjectError if there is one of that name."""
        try:
            self._root.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            owner = self._root.lstat().st_uid
            raise ObjectError(
                f"'{self._root}' is there already, made by user {owner}; remove it, or begin again for another name"
            ) from None

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """Stores a copy. Raises ValueError if the key is taken, ObjectError if there is no room or no folder."""
        return await asyncio.to_thread(self._set, key, tree)

    async def get(self, key: ObjectKey) -> TensorTree:
        """Views of this process's own map of the object. Raises KeyError, which lists the keys that exist."""
        try:
            descriptor = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise KeyError(f"no object '{key}' in {self._root}; there are: {self._keys() or 'none'}") from None
        try:
            block = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        length = int.from_bytes(block[:_LENGTH_BYTES], "little")
        layout = Layout.from_plain(json.loads(block[_LENGTH_BYTES : _LENGTH_BYTES + length]))
        return views(layout, block, _begin(length))

    async def release(self, key: ObjectKey) -> None:
        """Removes the object's name. Its memory is free when no reader maps it any more."""
        self._path(key).unlink(missing_ok=True)

    def _set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        layout = layout_of(tree)
        index = json.dumps(layout.as_plain(), separators=(",", ":")).encode()
        begin = _begin(len(index))
        with self._file(key, begin + layout.num_bytes) as block:
            block[:_LENGTH_BYTES] = len(index).to_bytes(_LENGTH_BYTES, "little")
            block[_LENGTH_BYTES : _LENGTH_BYTES + len(index)] = index
            copy_in(tree, views(layout, block, begin))
            # Sums of the whole block at once: the gaps between tensors are 0, because the file is new.
            sums = part_sums(bytes_of(block, begin, layout.num_bytes), 0)
            return ObjectMeta(key, layout.num_bytes, Checksum(whole_digest(layout, sums)))

    @contextmanager
    def _file(self, key: ObjectKey, num_bytes: int) -> Iterator[mmap.mmap]:
        """Opens a new file to write to. It gets its name if the block succeeds, and is removed if it fails."""
        partial = self._root / f"{uuid4().hex}.partial"
        try:
            descriptor = os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise ObjectError(
                f"setting '{key}': there is no folder {self._root}; its run has ended, or has not created it yet"
            ) from None
        try:
            try:
                self._reserve(descriptor, num_bytes, key)
                block = mmap.mmap(descriptor, num_bytes)
            finally:
                os.close(descriptor)
            yield block
            try:
                os.link(partial, self._path(key))
            except FileExistsError:
                raise ValueError(f"object '{key}' is already set; keys name immutable objects") from None
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, descriptor: int, num_bytes: int, key: ObjectKey) -> None:
        """Reserves the memory now: if there were none later, writing to the map would kill the process (SIGBUS)."""
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise ObjectError(
                f"setting '{key}' needs {num_bytes:,} bytes in {self._root}, where {_free_bytes(self._root):,} are "
                "free; remove what dead runs left there (`flexmarl clean`), give the machine more shared memory "
                "(`mount -o remount,size=16G /dev/shm`; in a container `--shm-size=16g`), or train a smaller model"
            ) from error

    def has(self, key: ObjectKey) -> bool:
        """True if the object is in the folder."""
        return self._path(key).exists()

    @staticmethod
    def file_name(key: ObjectKey) -> str:
        """A different name for each key: percent-encoded, so that no key is a path, and cut if too long for a name."""
        name = quote(key, safe="", errors="surrogatepass")
        if len(name) <= _LONGEST_NAME:
            return f"{name}.object"
        digest = blake2b(name.encode(), digest_size=16).hexdigest()
        return f"{name[: _LONGEST_NAME - len(digest)]}{digest}.cut"

    def _path(self, key: ObjectKey) -> Path:
        return self._root / self.file_name(key)

    def _keys(self) -> list[str]:
        return sorted(unquote(path.stem) for kind in ("object", "cut") for path in self._root.glob(f"*.{kind}"))


def _begin(index_bytes: int) -> int:
    """The byte of a file at which its block begins."""
    return -(-(_LENGTH_BYTES + index_bytes) // ALIGNMENT) * ALIGNMENT


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
