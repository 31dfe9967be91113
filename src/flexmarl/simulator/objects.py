"""Object store of the simulated world: a dictionary, from and to which bytes take their time."""

import asyncio
import math
from collections.abc import Callable

from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import ObjectKey, ObjectMeta, TensorTree


class SimulatedObjectStore(InlineObjectStore):
    """`ObjectStore` in virtual time. By default nothing takes any: publishing and loading have costs of their own."""

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        bytes_of: Callable[[ObjectKey], int] | None = None,
    ) -> None:
        """`bytes_of` says what an object stands for: simulated weights are a number or two. Default: its own bytes."""
        super().__init__()
        self._latency_s, self._bytes_per_s, self._bytes_of = latency_s, bytes_per_s, bytes_of

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """The object is there once its bytes are; its key is taken at once."""
        meta = await super().set(key, tree)
        await self._transfer(key, tree)
        return meta

    async def get(self, key: ObjectKey) -> TensorTree:
        """The stored copy, once its bytes have come."""
        tree = await super().get(key)
        await self._transfer(key, tree)
        return tree

    async def _transfer(self, key: ObjectKey, tree: TensorTree) -> None:
        own = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
        num_bytes = self._bytes_of(key) if self._bytes_of else own
        seconds = self._latency_s + num_bytes / self._bytes_per_s
        if seconds:
            await asyncio.sleep(seconds)
