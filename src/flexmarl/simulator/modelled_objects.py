"""Object store of the simulated world: a dictionary whose transfers take modelled time."""

import asyncio
import math
from collections.abc import Callable

from flexmarl.objects.backends.inline import InlineObjectStore
from flexmarl.objects.interface import ObjectKey, ObjectMeta, TensorTree


class SimulatedObjectStore(InlineObjectStore):
    """`ObjectStore` in virtual time. By default transfers take none: publishing and loading have costs of their own."""

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        bytes_per_s: float = math.inf,
        bytes_of: Callable[[ObjectKey], int] | None = None,
    ) -> None:
        """`bytes_of` gives the modelled size of an object, since simulated weights are a number or two.

        By default an object has its real size.
        """
        super().__init__()
        self._latency_s, self._bytes_per_s, self._bytes_of = latency_s, bytes_per_s, bytes_of

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """Stores a copy at once, then waits for the transfer. Raises ValueError if the key is taken."""
        meta = await super().set(key, tree)
        await self._transfer(key, tree)
        return meta

    async def get(self, key: ObjectKey) -> TensorTree:
        """Waits for the transfer, then returns the stored copy."""
        tree = await super().get(key)
        await self._transfer(key, tree)
        return tree

    async def _transfer(self, key: ObjectKey, tree: TensorTree) -> None:
        own = sum(tensor.numel() * tensor.element_size() for tensor in tree.values())
        num_bytes = self._bytes_of(key) if self._bytes_of else own
        seconds = self._latency_s + num_bytes / self._bytes_per_s
        if seconds:
            await asyncio.sleep(seconds)
