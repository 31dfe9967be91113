"""Adapter on the embedded engine's model: the base is kept, and what is served is merged from it anew by each version.

base (kept for the adapted layers) + adapter of version v ──► the model's weights, which decode as any others
"""

import torch

from flexmarl.errors import EngineError
from flexmarl.objects.adapter import PublishedAdapter, merged
from flexmarl.objects.interface import Checksum, checksum, names_checksum, vouches
from flexmarl.objects.settings import Verify


class AdaptedWeights:
    """The adapter that a model serves with, if any. Not safe to call from two threads at once."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._base: dict[str, torch.Tensor] = {}
        """Weights of adapted layers as they are without the adapter."""
        self._adapter: PublishedAdapter | None = None

    @torch.no_grad()
    def load(self, adapter: PublishedAdapter, verify: Verify) -> Checksum:
        """Merges the adapter into the model and returns the checksum of it and of the base, both as they are held.

        Raises EngineError before anything is changed: if the adapter is of another base, or fits no layer.
        """
        of_base = checksum if verify == "full" else names_checksum
        base = of_base(self._without_adapter())
        if not vouches(base, adapter.base):
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
            weights[f"{layer}.weight"].copy_(merged(self._base[f"{layer}.weight"], a, b, adapter.scaling))
        self._adapter = PublishedAdapter(held, adapter.scaling, base if verify == "full" else adapter.base)
        return of_base(self._adapter.as_tree())

    def forget(self) -> None:
        """Whole weights have come: they are the base of whatever adapter comes next."""
        self._base, self._adapter = {}, None

    def to(self, device: str) -> None:
        """Moves what is kept beside the model."""
        self._base = {name: tensor.to(device) for name, tensor in self._base.items()}
        if self._adapter is not None:
            layers = {layer: (a.to(device), b.to(device)) for layer, (a, b) in self._adapter.layers.items()}
            self._adapter = PublishedAdapter(layers, self._adapter.scaling, self._adapter.base)

    def _without_adapter(self) -> dict[str, torch.Tensor]:
        """The base by its own names: of tied tensors the first counts, as a trainer publishes them."""
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
