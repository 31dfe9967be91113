"""Location-agnostic Set/Get (FlexMARL section 7): who asks does not know where the bytes are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

import torch

from flexmarl.errors import FlexmarlError
from flexmarl.objects.tensors import facts_digest, layout_of, tree_sums, whole_digest

ObjectKey = NewType("ObjectKey", str)
"""Names one immutable object, e.g. `weights/solver/3`."""
Checksum = NewType("Checksum", str)
"""Digest of a tensor tree, in hex: `{names, dtypes and shapes}:{bytes}`, or the first part alone (digest.py)."""
TensorTree = Mapping[str, torch.Tensor]


class ObjectError(FlexmarlError):
    """An object could not be stored; the text says how much room it needs, and how to make it."""


def checksum(tree: TensorTree) -> Checksum:
    """The whole digest of the tensors, wherever they live; equal trees have equal ones.

    >>> checksum({"a": torch.zeros(2)}) == checksum({"a": torch.zeros(2, 1)})
    False
    """
    layout = layout_of(tree)
    return Checksum(whole_digest(layout, tree_sums(tree, layout)))


def names_checksum(tree: TensorTree) -> Checksum:
    """The digest of names, dtypes and shapes alone; reads no tensor."""
    return Checksum(facts_digest(layout_of(tree)))


def vouches(held: Checksum, expected: Checksum) -> bool:
    """Whether who states `held` holds what `expected` is of, as far as `held` goes.

    >>> vouches(Checksum("ab"), Checksum("ab:cd")), vouches(Checksum("ab:cc"), Checksum("ab:cd"))
    (True, False)
    """
    return held == expected or held == expected.partition(":")[0]


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
