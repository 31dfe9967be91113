"""In-place weight swap on a torch module: all or nothing, and a checksum of what is held afterwards."""

import torch

from flexmarl.errors import EngineError
from flexmarl.objects.interface import Checksum, TensorTree, checksum, names_checksum
from flexmarl.objects.settings import Verify


def swap_weights(model: torch.nn.Module, tree: TensorTree, verify: Verify = "full") -> Checksum:
    """Copies the tree into the model and returns the checksum of the model's own tensors under the tree's names.

    With `verify: names` that of their names, dtypes and shapes, which reads no tensor.

    Names are those of `model.state_dict()`. Tied tensors (an `lm_head` that is the embedding) may come under one of
    their names or under all of them, then with equal values. Raises EngineError before anything is changed.
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
    """Equality that also holds for NaN; tied weights mostly share memory, and then it is free."""
    if left.data_ptr() == right.data_ptr() and left.shape == right.shape:
        return True
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right))
    return torch.equal(one, other)
