"""Weights on a torch module, swapped between two decode steps: whole or an adapter, all or nothing, with a checksum.

Whole weights are copied over those that the model has. An adapter is never merged: no version of it writes a weight of
the base, and a switch of versions is a switch of references to small tensors.

    x ──┬── W of the base ───────────────────────────┬──► x W^T + scaling (x A^T) B^T
        └── A, then B of the version that is served ─┘
"""

import torch
from torch.utils.hooks import RemovableHandle

from flexmarl.errors import EngineError
from flexmarl.objects.interface import Checksum, PublishedAdapter, TensorTree, checksum, confirms, names_checksum
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


def without_ties(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own weights by name. Of tied tensors only the first is included, as a trainer publishes them."""
    seen: set[int] = set()
    found: dict[str, torch.Tensor] = {}
    weights: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in weights.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


class GivenUp:
    """A model's own weights without memory, while somebody else has their device: their shapes are kept.

    Buffers that no version has (rotary frequencies) stay.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Gives them up. The model cannot compute before they are made again, and filled."""
        self._weights = without_ties(model)
        self._shapes = {name: tensor.shape for name, tensor in self._weights.items()}
        for tensor in self._weights.values():
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def made_again(self, device: str) -> TensorTree:
        """Takes memory on a device for all of them. Their values are unset."""
        for name, tensor in self._weights.items():
            tensor.data = torch.empty(self._shapes[name], dtype=tensor.dtype, device=device)
        return self._weights


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


_NONE = PublishedAdapter({}, 1.0, Checksum(""))


class AdaptedWeights:
    """The adapter that a model serves with, if any. Not safe to call from two threads at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._linears = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        self._base: Checksum | None = None
        """Checksum of all weights without the adapter; None if they were not read yet."""
        self.adapter = _NONE
        self._added: dict[str, tuple[_Addition, RemovableHandle]] = {}
        """By layer."""

    def load(self, adapter: PublishedAdapter, verify: Verify) -> Checksum:
        """Serves with the adapter from now on; returns the checksum of adapter and base, both as they are held.

        On its own device the adapter is not copied: it is the object's, which never changes. The base is read once,
        with its first adapter. If the adapter is of another base, or one of its layers does not fit, raises EngineError
        and changes nothing.
        """
        of_tree = checksum if verify == "full" else names_checksum
        base = self._base = self._base or of_tree(without_ties(self._model))
        if not confirms(base, adapter.base):
            raise EngineError(
                f"the adapter is of a base with checksum {adapter.base}, but the engine's model has {base}; trainer "
                f"and engine must begin with the same model (policies.*.model), in the same dtype"
            )
        for layer, (a, b) in adapter.layers.items():
            _check(layer, self._linears.get(layer), a, b)
        held = adapter.to(next(self._model.parameters()).device)
        self._serve(held)
        return of_tree(held.as_tree())

    def forget(self) -> None:
        """Forgets base and adapter, because whole weights were loaded: those are the base of the next adapter."""
        self._serve(_NONE)
        self._base = None

    def to(self, device: str) -> None:
        """Moves the adapter to a device."""
        self._serve(self.adapter.to(device))

    def _serve(self, adapter: PublishedAdapter) -> None:
        """Adds this adapter's output to that of its layers from now on, and that of no other."""
        layers = adapter.layers
        for layer in self._added.keys() - layers.keys():
            self._added.pop(layer)[1].remove()
        for layer in layers.keys() - self._added.keys():
            addition = _Addition()
            self._added[layer] = addition, self._linears[layer].register_forward_hook(addition)
        for layer, (a, b) in layers.items():
            self._added[layer][0].swap(a, b, adapter.scaling)
        self.adapter = adapter


class _Addition:
    """Adds scaling (x A^T) B^T to the output of a linear layer, in place; a forward hook."""

    def swap(self, a: torch.Tensor, b: torch.Tensor, scaling: float) -> None:
        """Adds this A and B from now on."""
        self._down, self._up, self._scaling = a.t(), b.t(), scaling

    def __call__(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        """Nothing else has seen the output yet, and no gradient is wanted of it."""
        reduced = torch.mm(inputs[0].flatten(0, -2), self._down)
        output.view(-1, output.shape[-1]).addmm_(reduced, self._up, alpha=self._scaling)


def _check(layer: str, linear: torch.nn.Linear | None, a: torch.Tensor, b: torch.Tensor) -> None:
    if linear is None:
        raise EngineError(f"the engine's model has no linear layer '{layer}', for which the adapter is")
    weight = linear.weight
    if weight.shape != (b.shape[0], a.shape[1]) or b.shape[1] != a.shape[0] or {a.dtype, b.dtype} != {weight.dtype}:
        raise EngineError(
            f"weight '{layer}.weight' is {tuple(weight.shape)} {weight.dtype}, but the adapter's A and B for it are "
            f"{tuple(a.shape)} {a.dtype} and {tuple(b.shape)} {b.dtype}"
        )
