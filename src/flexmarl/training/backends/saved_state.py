"""Checks of a trainer's files on torch: they must hold all that this model's trainer saves, in its shapes and kinds.

A manifest proves that bytes are those that were written. These checks find files of another model, and files that were
edited and sealed again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flexmarl.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The tensors that AdamW keeps of each parameter."""


def check_weights(path: Path, weights: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the weights in folder `path` have the names, shapes and kinds of the masters."""
    if weights.keys() != masters.keys():
        differing = sorted(weights.keys() ^ masters.keys())
        raise CheckpointError(f"{path} is of another model: only one of the two has {', '.join(differing[:5])}")
    for name, master in masters.items():
        _check_tensor(path, name, weights[name], master)


def check_optimizer(path: Path, state: Mapping[str, Any], masters: Sequence[Tensor]) -> None:
    """Raises CheckpointError unless `state`, of AdamW, has the moments of every master, or of none before an update.

    `masters` are in the optimizer's order.
    """
    held: Mapping[int, Mapping[str, Any]] = state["state"]
    if not held:
        return
    for number, master in enumerate(masters):
        for moment in MOMENTS:
            found = held.get(number, {}).get(moment)
            if not isinstance(found, Tensor):
                raise CheckpointError(f"{path} lacks the moment {moment} of parameter {number} of {len(masters)}")
            _check_tensor(path, f"{moment} of parameter {number}", found, master)


def _check_tensor(path: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or not found.is_floating_point():
        raise CheckpointError(
            f"{path}: {name} is {found.dtype} {tuple(found.shape)}, not a floating-point tensor of shape "
            f"{tuple(wanted.shape)}"
        )
