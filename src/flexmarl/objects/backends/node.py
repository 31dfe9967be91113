"""Object stores on the nodes of a cluster: each node has files in its shared memory, as ShmObjectStore has them.

An object is set on one node. Another node fetches it once, when one of its processes first gets it (node_agent.py).
"""

import asyncio

from flexmarl.cluster.node_agent import NodeFiles
from flexmarl.objects.backends.memory import ShmObjectStore
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectMeta, RunCopy, TensorTree
from flexmarl.objects.settings import Verify


class NodeObjectStore:
    """One run's objects on all of its nodes. It can be pickled; each process uses the files of its own node."""

    def __init__(self, files: NodeFiles) -> None:
        """`files` are those of this process's node."""
        self._files = files
        self._local: ShmObjectStore | None = None

    def __getstate__(self) -> NodeFiles:
        """Leaves out the local half, which belongs to this node."""
        return self._files

    def __setstate__(self, files: NodeFiles) -> None:
        self._files, self._local = files, None

    async def set(self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full") -> ObjectMeta:
        """Stores a copy on this node. Raises ValueError if the key is taken on any node, ObjectError without room."""
        local = await self._on_node()
        meta = await local.set(key, tree, verify=verify)
        try:
            await self._files.announce(local.file_name(key))
        except FileExistsError:
            await local.release(key)
            raise ValueError(f"object '{key}' is already set on another node; keys name immutable objects") from None
        return meta

    async def get(self, key: ObjectKey) -> TensorTree:
        """Views of this process's own map of the object. Raises KeyError, which lists the keys that exist."""
        return await (await self._fetched(key)).get(key)

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        """Copies the object from this node's memory. Raises KeyError or ValueError."""
        return await (await self._fetched(key)).get_into(key, tree, verify=verify, run=run)

    async def take(self, key: ObjectKey) -> TensorTree:
        """The tensors in the memory of this node's object, which is then on no node any more. Raises KeyError."""
        local = await self._fetched(key)
        tree = await local.take(key)
        try:
            await self._files.drop(local.file_name(key))
        except BaseException:
            await local.set(key, tree, verify="names")
            raise
        return tree

    async def release(self, key: ObjectKey) -> None:
        """Removes the object's name on all nodes, and what a process of this node left that died in `set`."""
        local = await self._on_node()
        await self._files.drop(local.file_name(key))
        await local.release(key)

    async def _fetched(self, key: ObjectKey) -> ShmObjectStore:
        """This node's files, once the object is among them."""
        local = await self._on_node()
        if not local.has(key):
            try:
                await self._files.fetch(local.file_name(key))
            except FileNotFoundError as error:
                raise KeyError(f"no object '{key}': {error}") from None
        return local

    async def _on_node(self) -> ShmObjectStore:
        if self._local is None:
            self._local = ShmObjectStore(await self._files.folder())
        return self._local
