"""In-place weight swap on a torch module: whole weights or an adapter, all or nothing, with a checksum of what is held.

An adapter's base is kept, and every version is merged from it anew:

    base (kept for the adapted layers) + adapter of version v ──► the model's weights, which decode as any others
"""

import torch

from flexmarl.errors import EngineError
from flexmarl.objects.interface import (
    Checksum,
    PublishedAdapter,
    TensorTree,
    checksum,
    confirms,
    merged,
    names_checksum,
)
from flexmarl.objects.settings import Verify


def swap_weights(model: torch.nn.Module, tree: TensorTree, verify: Verify = "full") -> Checksum:
    """Copies the tree into the model and returns the checksum of the model's own tensors under the tree's names.

    With `verify` names, that checksum covers names, dtypes and shapes alone, and no tensor is read.

    Names are those of `model.state_dict()`. Tied tensors (an `lm_head` that is the embedding) may come under one of
    their names, or under several with equal values. If the tree does not fit, raises EngineError and changes nothing.
    """
    held = model.state_dict()
    _check_names(held, tree)
    for name, tensor in tree.items():
        if tensor.shape != held[name].shape or tensor.dtype != held[name].dtype:
            raise EngineError(
                f"weight '{name}' must be {tuple(held[name].shape)} {held[name].dtype}, "
                f"got {tuple(tensor.shape)} {tensor.dtype}; publish the weights of the engine's own model and dtype"
            )
    with torch.no_grad():
        for name, tensor in tree.items():
            held[name].copy_(tensor)
    served = {name: held[name] for name in tree}
    return checksum(served) if verify == "full" else names_checksum(served)


def _check_names(held: TensorTree, tree: TensorTree) -> None:
    unknown = sorted(set(tree) - set(held))
    if unknown:
        raise EngineError(f"the engine's model has no weight '{unknown[0]}' ({len(unknown)} unknown names)")
    names_of: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in held.items():
        names_of.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    for names in names_of.values():
        given = [name for name in names if name in tree]
        if not given:
            raise EngineError(f"the object has no weight '{names[0]}'; it must hold every tensor of the model")
        for other in given[1:]:
            if not _same_bits(tree[given[0]], tree[other]):
                raise EngineError(f"weights '{given[0]}' and '{other}' are tied in the engine, but their values differ")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if all bits are equal, also those of NaN. Tied weights mostly share memory, and then the check is free."""
    if left.data_ptr() == right.data_ptr() and left.shape == right.shape:
        return True
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(one, other)


class AdaptedWeights:
    """The adapter that a model serves with, if any. Not safe to call from two threads at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] = {}
        """Weights of the adapted layers without the adapter."""
        self._checksum: Checksum | None = None
        """Checksum of all weights without the adapter; None if they were not read yet."""
        self._adapter: PublishedAdapter | None = None

    @torch.no_grad()
    def load(self, adapter: PublishedAdapter, verify: Verify) -> Checksum:
        """Merges the adapter into the model and returns the checksum of adapter and base, both as they are held.

        The base is read once, with its first adapter: nothing writes to it as long as only adapters are loaded. If the
        adapter is of another base, or one of its layers does not fit, raises EngineError and changes nothing.
        """
        of_base = checksum if verify == "full" else names_checksum
        base = self._checksum = self._checksum or of_base(self._without_adapter())
        if not confirms(base, adapter.base):
            raise EngineError(
                f"the adapter is of a base with checksum {adapter.base}, but the engine's model has {base}; trainer "
                f"and engine must begin with the same model (policies.*.model), in the same dtype"
            )
        weights: dict[str, torch.Tensor] = self._model.state_dict()
        for layer, (a, b) in adapter.layers.items():
            _check(f"{layer}.weight", weights.get(f"{layer}.weight"), a, b)
        names = {f"{layer}.weight" for layer in adapter.layers}
        for name in self._base.keys() - names:
            weights[name].copy_(self._base.pop(name))
        for name in names - self._base.keys():
            self._base[name] = weights[name].clone()
        device = next(iter(weights.values())).device
        held = {layer: (a.to(device, copy=True), b.to(device, copy=True)) for layer, (a, b) in adapter.layers.items()}
        for layer, (a, b) in held.items():
            merged(self._base[f"{layer}.weight"], a, b, adapter.scaling, out=weights[f"{layer}.weight"])
        self._adapter = PublishedAdapter(held, adapter.scaling, base if verify == "full" else adapter.base)
        return of_base(self._adapter.as_tree())

    def forget(self) -> None:
        """Forgets base and adapter, because whole weights were loaded: those are the base of the next adapter."""
        self._base, self._adapter, self._checksum = {}, None, None

    def to(self, device: str) -> None:
        """Moves the base and the adapter that are kept to a device."""
        self._base = {name: tensor.to(device) for name, tensor in self._base.items()}
        if self._adapter is not None:
            layers = {layer: (a.to(device), b.to(device)) for layer, (a, b) in self._adapter.layers.items()}
            self._adapter = PublishedAdapter(layers, self._adapter.scaling, self._adapter.base)

    def _without_adapter(self) -> dict[str, torch.Tensor]:
        """The base by its own names. Of tied tensors only the first is included, as a trainer publishes them."""
        seen: set[int] = set()
        found: dict[str, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        for name, tensor in weights.items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = self._base.get(name, tensor)
        return found


def _check(name: str, weight: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> None:
    if weight is None:
        raise EngineError(f"the engine's model has no weight '{name}', for which the adapter is")
    shape = (b.shape[0], a.shape[1])
    if weight.shape != shape or b.shape[1] != a.shape[0] or {a.dtype, b.dtype} != {weight.dtype}:
        raise EngineError(
            f"weight '{name}' is {tuple(weight.shape)} {weight.dtype}, but the adapter's A and B for it are "
            f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        )
