"""Location-agnostic Set/Get (FlexMARL section 7): who asks does not know where the bytes are."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

import torch

from flexmarl.errors import FlexmarlError

ObjectKey = NewType("ObjectKey", str)
"""Names one immutable object, e.g. `weights/solver/3`."""
Checksum = NewType("Checksum", str)
"""Hex digest over names, dtypes, shapes and bytes of a tensor tree."""
TensorTree = Mapping[str, torch.Tensor]


class ObjectError(FlexmarlError):
    """An object could not be stored; the text says how much room it needs, and how to make it."""


def checksum(tree: TensorTree) -> Checksum:
    """128-bit BLAKE2b over the tensors in name order, wherever they live.

    >>> checksum({"a": torch.zeros(2)}) == checksum({"a": torch.zeros(2, 1)})
    False
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        tensor = tree[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return Checksum(digest.hexdigest())


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """What is known about an object without its bytes."""

    key: ObjectKey
    num_bytes: int
    checksum: Checksum


class ObjectStore(Protocol):
    """Holds tensor trees by key until they are released. Called by trainers (`set`) and engines (`get`)."""

    async def set(self, key: ObjectKey, tree: TensorTree) -> ObjectMeta:
        """Stores a copy: later changes to the caller's tensors are not seen.

        A key is set once: raises ValueError if it is taken. Raises ObjectError if there is no room.
        """
        ...

    async def get(self, key: ObjectKey) -> TensorTree:
        """The object; the caller must not write to it. Raises KeyError with the keys there are."""
        ...

    async def release(self, key: ObjectKey) -> None:
        """Frees it; an unknown key is no error."""
        ...
