"""Object store on a dictionary of this process."""

import torch

from flexmarl.objects.interface import ObjectKey, ObjectMeta, TensorTree, checksum


class InlineObjectStore:
    """Object store for the inline world: `set` stores a copy, and `get` returns that copy."""

    def __init__(self) -> None:
        self._objects: dict[ObjectKey, dict[str, torch.Tensor]] = {}

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """Stores a copy. Raises ValueError if the key is taken."""
        if key in self._objects:
            raise ValueError(f"object '{key}' is already set; keys name immutable objects")
        copy = {name: tensor.detach().clone() for name, tensor in tree.items()}
        self._objects[key] = copy
        return ObjectMeta(key, sum(t.numel() * t.element_size() for t in copy.values()), checksum(copy))

    async def get(self, key: ObjectKey) -> TensorTree:
        """The stored copy. Raises KeyError if there is none."""
        if key not in self._objects:
            raise KeyError(f"no object '{key}'; there are: {sorted(self._objects) or 'none'}")
        return self._objects[key]

    async def release(self, key: ObjectKey) -> None:
        """Drops the object, if there is one."""
        self._objects.pop(key, None)
