"""Location-agnostic Set/Get (FlexMARL section 7): the caller does not know where the bytes are.

A version of a policy is one object, `weights_key`: a tensor tree of whole weights by the model's own names, or of a
LoRA adapter alone, `PublishedAdapter`:

{layer}.lora_A     [rank, in]      a linear layer W of the base becomes  W + scaling B A
{layer}.lora_B     [out, rank]
adapter.scaling    alpha / rank
adapter.base       checksum of the base, as text
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import NewType, Protocol, Self

import torch

from flexmarl.objects.settings import Verify
from flexmarl.objects.tensors import Layout, facts_digest, layout_of, tree_sums, whole_digest
from flexmarl.records import PolicyName, Version

ObjectKey = NewType("ObjectKey", str)
"""Names one immutable object, e.g. `weights/solver/3`."""
Checksum = NewType("Checksum", str)
"""Digest of a tensor tree, in hex: `{names, dtypes and shapes}:{bytes}`, or the first part alone (tensors.py)."""
TensorTree = Mapping[str, torch.Tensor]
RunCopy = Callable[[Callable[[], Checksum]], Awaitable[Checksum]]
"""Calls a function where it may take its time, and returns its result: `asyncio.to_thread`, or `DeviceThread.run`."""


def weights_key(policy: PolicyName, version: Version) -> ObjectKey:
    """The key under which a policy's trainer sets a version, and its engines get it.

    >>> weights_key(PolicyName("solver"), Version(3))
    'weights/solver/3'
    """
    return ObjectKey(f"weights/{policy}/{version}")


def canary_key(policy: PolicyName, version: Version) -> ObjectKey:
    """The key of a version's canary, for engines that cannot show the weights that they serve.

    It has `ids` [N] and `logprobs` [N] by the trainer: of each of these tokens as the next one after all of them, at
    temperature 1.
    """
    return ObjectKey(f"canary/{policy}/{version}")


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


def check_layout(stored: Layout, given: Layout) -> None:
    """Raises ValueError that names the first tensor by which the caller's layout differs from the object's.

    >>> check_layout(layout_of({"a": torch.zeros(2)}), layout_of({"a": torch.zeros(3)}))
    Traceback (most recent call last):
    ValueError: tensor 'a' is float32 (3,) here, but float32 (2,) in the object
    """
    if stored == given:
        return
    there, here = (
        {slot.name: f"{buffer.dtype} {slot.shape}" for buffer in layout.buffers for slot in buffer.slots}
        for layout in (stored, given)
    )
    name = next(name for name in sorted({*there, *here}) if there.get(name) != here.get(name))
    raise ValueError(
        f"tensor '{name}' is {here.get(name, 'missing')} here, but {there.get(name, 'missing')} in the object"
    )


def confirms(held: Checksum, expected: Checksum) -> bool:
    """True if `held` equals `expected`, or is its first part alone (the digest of names, dtypes and shapes).

    >>> confirms(Checksum("ab"), Checksum("ab:cd")), confirms(Checksum("ab:cc"), Checksum("ab:cd"))
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

    async def set(self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full") -> ObjectMeta:
        """Stores a copy: later changes to the caller's tensors are not seen.

        A key is set once: raises ValueError if it is taken. Raises ObjectError if there is no room. With `verify`
        names, the checksum covers names, dtypes and shapes alone.
        """
        ...

    async def get(self, key: ObjectKey) -> TensorTree:
        """The object, to which the caller must not write. Raises KeyError, which lists the keys that exist."""
        ...

    async def get_into(
        self, key: ObjectKey, tree: TensorTree, *, verify: Verify = "full", run: RunCopy = asyncio.to_thread
    ) -> Checksum:
        """Copies the object into the caller's tensors; returns the checksum of what they hold then.

        `tree` must have the object's layout: raises ValueError that names the first tensor that differs, or KeyError
        as `get` does. After either the tensors are as they were. With `verify` names, the checksum covers names,
        dtypes and shapes alone. The copy is one call of a function, made by `run`.
        """
        ...

    async def take(self, key: ObjectKey) -> TensorTree:
        """Releases the object and returns its tensors, to which the caller may write. Raises KeyError as `get` does.

        They are in the object's own memory if the store can do that. If just these tensors are set later, they may
        become that object without a copy: it can be read when the last of them is gone.
        """
        ...

    async def release(self, key: ObjectKey) -> None:
        """Frees the object. An unknown key is ignored."""
        ...


_SCALING, _BASE = "adapter.scaling", "adapter.base"
_A, _B = ".lora_A", ".lora_B"


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """The adapter of one version."""

    layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """A and B of each layer, by the layer's name in the base."""
    scaling: float
    base: Checksum
    """Checksum of the weights without the adapter, by the base's names, without tied duplicates."""

    def as_tree(self) -> dict[str, torch.Tensor]:
        """The adapter as a tensor tree; `from_tree` is the inverse."""
        tree = {
            _SCALING: torch.tensor(self.scaling, dtype=torch.float64),
            _BASE: torch.frombuffer(bytearray(self.base.encode()), dtype=torch.uint8),
        }
        for layer, (a, b) in self.layers.items():
            tree[layer + _A], tree[layer + _B] = a, b
        return tree

    def to(self, device: torch.device | str) -> Self:
        """The adapter on a device; tensors that are there already are not copied."""
        layers = {layer: (a.to(device), b.to(device)) for layer, (a, b) in self.layers.items()}
        return replace(self, layers=layers)

    @classmethod
    def from_tree(cls, tree: TensorTree) -> Self | None:
        """The adapter in a tensor tree; None if the tree holds whole weights."""
        if _BASE not in tree:
            return None
        layers = {
            name.removesuffix(_A): (tensor, tree[name.removesuffix(_A) + _B])
            for name, tensor in tree.items()
            if name.endswith(_A)
        }
        return cls(layers, tree[_SCALING].item(), Checksum(bytes(tree[_BASE].tolist()).decode()))
