"""Files of a trainer's state on torch: the same for any number of ranks, so that any number reads them.

weights.safetensors     the masters, by name; those of a bfloat16 model are float32
trainer.pt              version, optimiser, gradient sums, and the reports of micro-batches that are in them
reference.safetensors   the reference, once it was reset
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flexmarl.cluster.own_folder import require_space
from flexmarl.errors import CheckpointError
from flexmarl.records import LossReport, PolicyName, Version
from flexmarl.training.backends.causal_lm import Updater, some_of
from flexmarl.training.backends.gradients import GradientCache, check_optimizer, check_weights
from flexmarl.training.backends.network import Network
from flexmarl.training.backends.ranks import part_of


@dataclass(slots=True, kw_only=True)
class Counted:
    """Counts and names in a trainer's files."""

    policy: PolicyName
    version: Version
    reports: dict[str, LossReport] = field(default_factory=dict)
    """Reports of the micro-batches whose gradients are in the sums, by id."""


def write_trainer(path: Path, counted: Counted, network: Network, updater: Updater, cache: GradientCache) -> None:
    """Writes the files into the folder `path`, which the first rank makes. Called by all ranks together."""
    ranks, names = network.ranks, list(updater.masters)

    def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return ranks.whole({name: updater.whole(name, tensor.detach()) for name, tensor in tensors.items()})

    def whole_sums(sums: Sequence[Tensor]) -> list[Tensor]:
        return list(whole(dict(zip(names, sums, strict=True))).values())

    weights, optimizer, sums = whole(updater.masters), updater.optimizer.state_dict(), cache.state()
    for number, moments in optimizer["state"].items():
        held = {moment: updater.whole(names[number], tensor) for moment, tensor in moments.items()}
        optimizer["state"][number] = ranks.whole(held)
    if sums["sums"] is not None:
        sums["sums"] = whole_sums(sums["sums"])
    for of_group in sums["open"].values():
        of_group |= {kind: whole_sums(of_group[kind]) for kind in ("plain", "scored")}
    has_moved = network.has_reference and network.reference.moved
    reference = ranks.whole(network.reference.tensors()) if has_moved else {}
    state = {
        "policy": counted.policy,
        "version": counted.version,
        "optimizer": optimizer,
        "cache": sums,
        "reports": [asdict(report) for report in counted.reports.values()],
    }
    ranks.first(lambda: _write(path, weights, state, reference))


def _write(path: Path, weights: dict[str, Tensor], state: dict[str, Any], reference: dict[str, Tensor]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    held = [*weights.values(), *reference.values(), *(state["cache"]["sums"] or ())]
    held += [t for of_group in state["cache"]["open"].values() for kind in ("plain", "scored") for t in of_group[kind]]
    held += [tensor for moments in state["optimizer"]["state"].values() for tensor in moments.values()]
    require_space(path, sum(tensor.nbytes for tensor in held), f"the state of policy '{state['policy']}'")
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "weights.safetensors")
    torch.save(state, path / "trainer.pt")
    if reference:
        tensors = {name: tensor.detach().contiguous() for name, tensor in reference.items()}
        save_file(tensors, path / "reference.safetensors")


def read_trainer(path: Path, network: Network, updater: Updater, cache: GradientCache) -> Counted:
    """Restores what `write_trainer` wrote. Called by all ranks together; each takes its part. Raises CheckpointError.

    Weights that are not finite are found only when they have replaced the trainer's own.
    """
    weights = load_file(path / "weights.safetensors")
    state = torch.load(path / "trainer.pt", map_location=network.model.device, weights_only=True)
    names, optimizer = list(updater.masters), state["optimizer"]
    whole = {name: updater.whole(name, master) for name, master in updater.masters.items()}
    check_weights(path, weights, whole)
    check_optimizer(path, optimizer, list(whole.values()))
    with torch.no_grad():
        for name, master in updater.masters.items():
            master.copy_(part_of(weights[name], updater.parameters[name]))
    updater.refresh()
    if lacking := updater.unbounded():
        raise CheckpointError(
            f"{path} holds weights that are not finite: {some_of(lacking)}; remove {path.parent} to go on from the "
            f"checkpoint before it"
        )

    def mine(sums: Sequence[Tensor]) -> list[Tensor]:
        return [part_of(tensor, updater.parameters[name]) for name, tensor in zip(names, sums, strict=True)]

    for number, moments in optimizer["state"].items():
        like = updater.parameters[names[number]]
        optimizer["state"][number] = {key: part_of(t, like) if t.dim() else t for key, t in moments.items()}
    updater.optimizer.load_state_dict(optimizer)
    sums = state["cache"]
    for of_group in sums["open"].values():
        of_group |= {kind: mine(of_group[kind]) for kind in ("plain", "scored")}
    cache.load({"sums": sums["sums"] and mine(sums["sums"]), "open": sums["open"]})
    if network.has_reference:
        held = path / "reference.safetensors"
        network.reference.take(load_file(held) if held.exists() else {}, moved=held.exists())
    reports = {report["micro_batch_id"]: LossReport(**report) for report in state["reports"]}
    return Counted(policy=state["policy"], version=Version(state["version"]), reports=reports)
