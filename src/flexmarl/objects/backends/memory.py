"""Object stores on memory: a dictionary of one process, and files in shared memory that all processes of a machine map.

    /dev/shm/flexmarl-{run}/weights%2Fsolver%2F3.object     a link to the block that the object is in (blocks.py)

With `Spill.allow` (cluster/spill.py), objects that have no room there are on disk.

An object gets its name only when it is complete, so a reader never sees half of one, and a writer that dies leaves only
a free block behind. Nothing is registered anywhere: removing the folder removes everything.
"""

import asyncio
import errno
import os
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from urllib.parse import quote, unquote

import torch

from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.spill import Spill
from flexmarl.errors import ObjectError, ObjectSpaceError
from flexmarl.objects.backends.blocks import Blocks, Header
from flexmarl.objects.interface import (
    Checksum,
    ObjectKey,
    ObjectMeta,
    RunCopy,
    TensorTree,
    check_layout,
    checksum,
    names_checksum,
)
from flexmarl.objects.settings import Verify
from flexmarl.objects.tensors import (
    Layout,
    copy_in,
    copy_summed,
    facts_digest,
    layout_of,
    tree_sums,
    views,
    whole_digest,
)


class InlineObjectStore:
    """Object store for the inline world: `set` stores a copy, and `get` returns that copy."""

    def __init__(self, thread: DeviceThread | None = None) -> None:
        """Copies and checksums are made on `thread`, so that the event loop stays free; without it, at once."""
        self._thread = thread
        self._objects: dict[ObjectKey, dict[str, torch.Tensor]] = {}

    async def set(self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full") -> ObjectMeta:
        """Stores a copy. Raises ValueError if the key is taken."""
        if key in self._objects:
            raise ValueError(f"object '{key}' is already set; keys name immutable objects")
        copy, digest = await self._thread.run(_copied, tree, verify) if self._thread else _copied(tree, verify)
        if key in self._objects:
            raise ValueError(f"object '{key}' was set twice at a time; keys name immutable objects")
        self._objects[key] = copy
        return ObjectMeta(key, sum(t.numel() * t.element_size() for t in copy.values()), digest)

    async def get(self, key: ObjectKey) -> TensorTree:
        """The stored copy. Raises KeyError if there is none."""
        if key not in self._objects:
            raise KeyError(f"no object '{key}'; there are: {sorted(self._objects) or 'none'}")
        return self._objects[key]

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        """Copies the stored copy. Raises KeyError if there is none, ValueError if its layout differs."""
        held = await self.get(key)
        check_layout(layout_of(held), layout_of(tree))

        def copy() -> Checksum:
            copy_in(held, tree)
            return checksum(tree) if verify == "full" else names_checksum(tree)

        return await run(copy)

    async def take(self, key: ObjectKey) -> TensorTree:
        """A copy of the stored copy, which may have readers. Raises KeyError."""
        held = await self.get(key)
        await self.release(key)
        return {name: tensor.clone() for name, tensor in held.items()}

    async def release(self, key: ObjectKey) -> None:
        """Drops the object, if there is one."""
        self._objects.pop(key, None)


def _copied(tree: TensorTree, verify: Verify) -> tuple[dict[str, torch.Tensor], Checksum]:
    copy = {name: tensor.detach().clone() for name, tensor in tree.items()}
    return copy, checksum(copy) if verify == "full" else names_checksum(copy)


_LONGEST_NAME = 200
"""Bytes. File systems allow 255. A longer name is cut, and the digest of its key keeps it distinct."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT})


class ShmObjectStore:
    """One run's objects in one folder. Every process makes its own store with the same `root`; a store can be pickled.

    The process that owns the run calls `create`, and removes the folder when all other processes have ended. All copies
    are made on threads, so that the event loop stays free. A reader's changes to the tensors of `get` are seen by that
    reader alone. They stay valid after the object's release: their block is not written to while they live.
    """

    def __init__(self, root: Path) -> None:
        """`root` is a folder in memory, `/dev/shm/...`; on a disk it works too, at the disk's speed."""
        self._root = root
        self._blocks = Blocks(root)

    def __reduce__(self) -> tuple[type["ShmObjectStore"], tuple[Path]]:
        """Leaves out the blocks that this process keeps mapped."""
        return ShmObjectStore, (self._root,)

    def create(self) -> None:
        """Makes the folder, for this user alone. Raises ObjectError if there is one of that name."""
        try:
            self._root.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            owner = self._root.lstat().st_uid
            raise ObjectError(
                f"'{self._root}' is there already, made by user {owner}; remove it, or begin again for another name"
            ) from None

    async def set(self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full") -> ObjectMeta:
        """Stores a copy. Raises ValueError if the key is taken, ObjectError if there is no room or no folder.

        When it returns, no thread holds the tree: a thread keeps the arguments of its last work for a moment after the
        result, and in that moment a caller who frees a device would leave the tree on it.
        """
        once = [tree]
        del tree
        return await asyncio.to_thread(lambda: self._set(key, once.pop(), verify))

    async def get(self, key: ObjectKey) -> TensorTree:
        """Views of this process's own map of the object. Raises KeyError, which lists the keys that exist."""
        return await asyncio.to_thread(self._get, key)

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        """Copies the object from its block, which stays mapped. Raises KeyError or ValueError."""
        return await run(lambda: self._get_into(key, tree, verify))

    async def take(self, key: ObjectKey) -> TensorTree:
        """The tensors in the object's block; copies of them if others read it, or where objects may go to disk.

        Without a copy it is one moment of the event loop, so that a caller who is cancelled has taken nothing.
        """
        tree = None if self._spill is not None else self._take(key)
        if tree is None:
            tree = await asyncio.to_thread(lambda: {name: held.clone() for name, held in self._get(key).items()})
            await self.release(key)
        return tree

    async def release(self, key: ObjectKey) -> None:
        """Removes the object's name. Its block is free when no reader has it any more."""
        if self._spill is None:
            self._path(key).unlink(missing_ok=True)
        else:
            await asyncio.to_thread(self._spill.remove, self.file_name(key))

    @cached_property
    def _spill(self) -> Spill | None:
        """Where objects go that have no room, once the run has allowed it: before its first object."""
        return Spill.of(self._root)

    def _set(self, key: ObjectKey, tree: TensorTree, verify: Verify) -> ObjectMeta:
        if self.has(key):
            raise _already_set(key)
        header = Header(key, layout_of(tree))
        try:
            if self._blocks.give_back(header, tree, lambda block: self._link(block, key)):
                return ObjectMeta(key, header.layout.num_bytes, _digest(header.layout, tree, verify))
            if self._spill is not None:
                return self._set_or_spill(self._spill, key, header, tree, verify)
            try:
                return self._write(key, header, tree, verify)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._blocks.remove_free()
                return self._write(key, header, tree, verify)
        except FileNotFoundError:
            raise ObjectError(
                f"setting '{key}': there is no folder {self._root}; its run has ended, or has not created it yet"
            ) from None
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._no_room(key, header.num_bytes) from error

    def _set_or_spill(
        self, spill: Spill, key: ObjectKey, header: Header, tree: TensorTree, verify: Verify
    ) -> ObjectMeta:
        """Sets the object in memory, at the cost of others that are read less, or on disk where memory is too small."""
        while spill.make_room(header.num_bytes, reusing=f"{header.family}-{header.shape}-"):
            try:
                return self._write(key, header, tree, verify)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if not spill.move_one():
                    break
        path = spill.new_path()
        with self._blocks.write_at(path, header) as block:
            digest = _copy(header.layout, tree, block.tensors(header), verify)
            try:
                spill.name(path, self.file_name(key))
            except FileExistsError:
                raise _already_set(key) from None
        return ObjectMeta(key, header.layout.num_bytes, digest)

    def _write(self, key: ObjectKey, header: Header, tree: TensorTree, verify: Verify) -> ObjectMeta:
        with self._blocks.write(header) as block:
            digest = _copy(header.layout, tree, block.tensors_beside(tree, header), verify)
            self._link(block.path, key)
        return ObjectMeta(key, header.layout.num_bytes, digest)

    def _link(self, block: Path, key: ObjectKey) -> None:
        try:
            os.link(block, self._path(key))
        except FileExistsError:
            raise _already_set(key) from None

    def _take(self, key: ObjectKey) -> TensorTree | None:
        try:
            return self._blocks.take(self._path(key), key)
        except FileNotFoundError:
            raise self._missing(key) from None

    def _get(self, key: ObjectKey) -> TensorTree:
        try:
            block, header = self._blocks.hold(self._path(key), key)
        except FileNotFoundError:
            raise self._missing(key) from None
        return views(header.layout, block, header.begin)

    def _get_into(self, key: ObjectKey, tree: TensorTree, verify: Verify) -> Checksum:
        try:
            with self._blocks.read(self._path(key), key) as (block, header):
                check_layout(header.layout, layout_of(tree))
                return _copy(header.layout, block.tensors_beside(tree, header), tree, verify)
        except FileNotFoundError:
            raise self._missing(key) from None

    def _missing(self, key: ObjectKey) -> KeyError:
        return KeyError(f"no object '{key}' in {self._root}; there are: {self._keys() or 'none'}")

    def _no_room(self, key: ObjectKey, num_bytes: int) -> ObjectSpaceError:
        if self._spill is not None:
            return ObjectSpaceError(
                f"setting '{key}' needs {num_bytes:,} bytes, and neither {self._root} nor {self._spill.disk} has them "
                f"free ({_free_bytes(self._root):,} and {_free_bytes(self._spill.disk):,}); set TMPDIR to a folder of "
                "a larger disk, remove what dead runs left (`flexmarl clean`), or train a smaller model"
            )
        return ObjectSpaceError(
            f"setting '{key}' needs {num_bytes:,} bytes in {self._root}, where {_free_bytes(self._root):,} are "
            "free; remove what dead runs left there (`flexmarl clean`), give the machine more shared memory "
            "(`mount -o remount,size=16G /dev/shm`; in a container `--shm-size=16g`), let some be on disk "
            "(`objects.memory_gib`), or train a smaller model"
        )

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


def _already_set(key: ObjectKey) -> ValueError:
    return ValueError(f"object '{key}' is already set; keys name immutable objects")


def _copy(layout: Layout, source: TensorTree, into: TensorTree, verify: Verify) -> Checksum:
    if verify == "full":
        return Checksum(whole_digest(layout, copy_summed(layout, source, into)))
    copy_in(source, into)
    return Checksum(facts_digest(layout))


def _digest(layout: Layout, tree: TensorTree, verify: Verify) -> Checksum:
    return Checksum(whole_digest(layout, tree_sums(tree, layout)) if verify == "full" else facts_digest(layout))


def _free_bytes(folder: Path) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
