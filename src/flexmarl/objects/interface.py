"""Location-agnostic Set/Get (FlexMARL section 7): the caller does not know where the bytes are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

import torch

from flexmarl.errors import FlexmarlError
from flexmarl.objects.tensors import facts_digest, layout_of, tree_sums, whole_digest

ObjectKey = NewType("ObjectKey", str)
"""Names one immutable object, e.g. `weights/solver/3`."""
Checksum = NewType("Checksum", str)
"""Digest of a tensor tree, in hex: `{names, dtypes and shapes}:{bytes}`, or the first part alone (tensors.py)."""
TensorTree = Mapping[str, torch.Tensor]


class ObjectError(FlexmarlError):
    """An object could not be stored. The text says why and, if room is missing, how much and how to make it."""


def checksum(tree: TensorTree) -> Checksum:
    """The whole digest of the tensors, wherever they live. Equal trees have equal digests.

    >>> checksum({"a": torch.zeros(2)}) == checksum({"a": torch.zeros(2, 1)})
    False
    """
    layout = layout_of(tree)
    return Checksum(whole_digest(layout, tree_sums(tree, layout)))


def names_checksum(tree: TensorTree) -> Checksum:
    """The digest of names, dtypes and shapes alone; reads no tensor."""
    return Checksum(facts_digest(layout_of(tree)))


def vouches(held: Checksum, expected: Checksum) -> bool:
    """True if `held` equals `expected`, or is its first part alone (the digest of names, dtypes and shapes).

    >>> vouches(Checksum("ab"), Checksum("ab:cd")), vouches(Checksum("ab:cc"), Checksum("ab:cd"))
    (True, False)
    """
    return held == expected or held == expected.partition(":")[0]


@dataclass(frozen=True, slots=True)
class ObjectMeta:
    """The facts about an object that are known without its bytes."""

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
        """The object, to which the caller must not write. Raises KeyError, which lists the keys that exist."""
        ...

    async def release(self, key: ObjectKey) -> None:
        """Frees the object. An unknown key is ignored."""
        ...
