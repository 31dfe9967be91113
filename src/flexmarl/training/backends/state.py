"""State of a trainer on torch, laid out by name: what leaves a device when a policy is set aside, and comes back to it.

weights      the model's own tensors, as they are published, without tied duplicates; none with an adapter
masters      trained tensors that are not among the weights: float32 masters, the adapter, the critic's head
buffers      tensors that no file of a model holds, such as rotary frequencies
moments      AdamW's two moments and its count of steps, for each trained tensor
sums         gradient sums since the last update
open         two sums of each open credit group
reference    the weights of the reference, if they are a copy, or the adapter of its last reset
facts        what is no tensor: counts and names

Names are those of the parameters, so a state belongs to no device and no process, nor to a number of ranks: a tensor of
which ranks have parts is laid out whole.
"""

import pickle
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from flexmarl.cluster.torch_device import host_memory, place
from flexmarl.objects.tensors import TensorFacts, plan, separate
from flexmarl.training.backends.causal_lm import (
    DTYPES,
    Updater,
    check_model_files,
    load_model,
    unique_tensors,
    use_onednn,
)
from flexmarl.training.backends.gradients import GradientCache, OpenSums
from flexmarl.training.backends.network import Network
from flexmarl.training.backends.ranks import part_of
from flexmarl.training.settings import Dtype

Tensors = dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """The whole state of a trainer. Its tensors are the trainer's own until they are copied.

    Where several ranks have parts of a tensor, it is a DTensor here, and whole in blocks and files.
    """

    tensors: dict[str, Tensors]
    """By kind, as above. Kinds without a tensor are left out."""
    facts: dict[str, Any]
    """Can be pickled."""


def state_of(network: Network, updater: Updater, cache: GradientCache) -> TrainerState:
    """Names every tensor that a trainer holds. Copies none."""
    model, names, whole = network.model, list(updater.masters), updater.whole
    weights = network.tensors() if network.adapter is None else {}
    masters = updater.masters.items()
    found: dict[str, Tensors] = {
        "weights": weights,
        "masters": {n: whole(n, m) for n, m in masters if n not in weights or weights[n].dtype != m.dtype},
        "buffers": buffers_of(model),
        "moments": {
            f"{name}.{moment}": whole(name, tensor)
            for name, master in masters
            for moment, tensor in updater.optimizer.state.get(master, {}).items()
        },
        "sums": {n: whole(n, tensor) for n, tensor in zip(names, cache.sums or (), strict=bool(cache.sums))},
        "open": {
            f"{number}.{kind}.{name}": whole(name, tensor)
            for number, of_group in enumerate(cache.open.values())
            for kind, sums in (("plain", of_group.plain), ("scored", of_group.scored))
            for name, tensor in zip(names, sums, strict=True)
        },
        "reference": network.reference.tensors() if network.has_reference else {},
    }
    facts = {
        "open": {name: _counts(of_group) for name, of_group in cache.open.items()},
        "reference_moved": network.has_reference and network.reference.moved,
    }
    tensors = {kind: {name: t.detach() for name, t in of.items()} for kind, of in found.items() if of}
    return TrainerState(tensors=tensors, facts=facts)


@torch.no_grad()
def take_state(state: TrainerState, network: Network, updater: Updater, cache: GradientCache) -> None:
    """Gives a trainer, whose model has the state's weights already, the rest of a state. Takes the tensors over.

    The tensors are whole; one of several ranks takes its part.
    """
    tensors, names = state.tensors, list(updater.masters)

    def mine(name: str, tensor: Tensor) -> Tensor:
        return part_of(tensor, updater.parameters[name])

    for name, tensor in tensors.get("masters", {}).items():
        updater.masters[name].copy_(mine(name, tensor))
    updater.refresh()
    moments: dict[str, Tensors] = {}
    for key, tensor in tensors.get("moments", {}).items():
        name, _, moment = key.rpartition(".")
        moments.setdefault(name, {})[moment] = mine(name, tensor)
    updater.optimizer.state.clear()
    for name, of_one in moments.items():
        updater.optimizer.state[updater.masters[name]] = of_one
    sums, opened = tensors.get("sums"), tensors.get("open", {})
    cache.sums = [mine(name, sums[name]) for name in names] if sums else None
    cache.open = {
        group: OpenSums(
            plain=[mine(name, opened[f"{number}.plain.{name}"]) for name in names],
            scored=[mine(name, opened[f"{number}.scored.{name}"]) for name in names],
            **counts,
        )
        for number, (group, counts) in enumerate(state.facts["open"].items())
    }
    if network.has_reference:
        network.reference.take(tensors.get("reference", {}), moved=state.facts["reference_moved"])


def facts_of(tensors: Mapping[str, Tensor]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of each tensor, by name."""
    return {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}


def empty_like(facts: Mapping[str, tuple[str, tuple[int, ...]]], device: str, *, at_once: bool = True) -> Tensors:
    """Tensors of these types and shapes, whose numbers are to be filled in.

    On a CPU their memory is freed `at_once`, with the last of them, and is in huge pages if the system has them.
    """
    kinds = {name: (getattr(torch, dtype), shape) for name, (dtype, shape) in facts.items()}
    if device != "cpu" or not at_once:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, (dtype, shape) in kinds.items()}
    layout = plan({name: TensorFacts(facts[name][0], shape, dtype.itemsize) for name, (dtype, shape) in kinds.items()})
    return separate(layout, host_memory(layout.num_bytes))


def _counts(sums: OpenSums) -> dict[str, Any]:
    return {
        "num_samples": sums.num_samples,
        "num_tokens": sums.num_tokens,
        "sums": sums.sums,
        "scored_loss": sums.scored_loss,
    }


def buffers_of(model: PreTrainedModel) -> Tensors:
    """The buffers that are not part of the state dict, by name."""
    held = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in held}


def bind(model: PreTrainedModel, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> PreTrainedModel:
    """Gives a model without memory its tensors, which it takes over, and returns it."""
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    for name, buffer in buffers.items():
        module, _, attribute = name.rpartition(".")
        model.get_submodule(module).register_buffer(attribute, buffer, persistent=False)
    lacking = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    assert not lacking, f"a state lacks the tensors {lacking[:5]} of its model"
    use_onednn(model)
    return model


class Skeleton:
    """A model without memory, which models are made of. Its files are read once."""

    def __init__(self, source: str | Path) -> None:
        """`source` is a Hugging Face folder or name."""
        self._model = check_model_files(source)
        try:
            self._pickled = pickle.dumps(self._model)  # It is read in a seventh of the time of a deep copy.
        except (pickle.PicklingError, AttributeError, TypeError):  # It has functions that are defined inside others.
            self._pickled = None

    def model(self) -> PreTrainedModel:
        """A new one."""
        return deepcopy(self._model) if self._pickled is None else pickle.loads(self._pickled)


class Base:
    """Weights on a device that adapters of several policies are trained on. Nothing writes to them."""

    def __init__(self, source: str | Path, dtype: Dtype, device: str, skeleton: Skeleton) -> None:
        """Loads them. `skeleton` is of the same source."""
        self.name = (str(source), dtype)
        model = load_model(source)
        place(model, device, DTYPES[dtype])
        self.weights: Tensors = {name: tensor.detach() for name, tensor in unique_tensors(model)}
        self._buffers, self._skeleton = buffers_of(model), skeleton

    def to(self, device: str) -> None:
        """Moves them. Models that were made before keep those of the device before."""
        self.weights = {name: tensor.to(device) for name, tensor in self.weights.items()}
        self._buffers = {name: tensor.to(device) for name, tensor in self._buffers.items()}

    def model(self) -> PreTrainedModel:
        """A model that computes with these weights, for an adapter to be put on. It has no memory of its own."""
        return bind(self._skeleton.model(), self.weights, self._buffers)
