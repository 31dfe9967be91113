"""Ranks on torch.distributed: processes that train one policy side by side, each with a part of every tensor (FSDP2).

    weight [n, ...]     rank 0: rows 0 to c - 1     rank 1: rows c to 2c - 1     ...     c = n / ranks, rounded up

A layer's weights are gathered before it computes and let go after it; its gradients are summed over the ranks, and each
keeps its rows. A DTensor stands for a whole tensor of which this process has a part. All ranks make the same calls in
the same order: every call here that is marked *together* waits for the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast
from warnings import warn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flexmarl.errors import FlexmarlError

T = TypeVar("T")
WAIT = timedelta(days=7)
"""Longest wait for the other ranks. The controller ends ranks whose peers are lost, long before."""
MEET = timedelta(seconds=120)
"""Longest wait for all ranks of a place to start."""


class Ranks:
    """The ranks that train one policy, as one of them sees them."""

    def __init__(self, number: int = 0, world: int = 1, *, group: dist.ProcessGroup | None = None) -> None:
        """This process is rank `number` of `world`, which are joined in `group`."""
        self.number, self.world, self._group = number, world, group

    @property
    def is_first(self) -> bool:
        """True for the rank that answers, and writes what all of them hold together."""
        return self.number == 0

    def shard(self, module: nn.Module, *, compute: torch.dtype | None = None) -> None:
        """Leaves this rank its part of a module, in place: each decoder layer by itself, and the rest as one.

        Trained weights of 16 bits become float32; the module computes in `compute`, and gradients are summed in at
        least float32. Nothing happens if there is one rank.
        """
        if self.world == 1:
            return
        precise = None if compute is None else torch.promote_types(compute, torch.float32)
        for parameter in module.parameters():
            if parameter.requires_grad and precise is not None:
                parameter.data = parameter.data.to(precise)
        device = next(module.parameters()).device.type
        assert self._group is not None, "ranks that share a policy have met"
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=precise, cast_forward_inputs=False)
        options: Any = {"mesh": DeviceMesh.from_group(self._group, device), "mp_policy": policy}
        for part in (*_layers(module), module):
            sharded = cast(FSDPModule, fully_shard(part, **options))
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)  # Else gloo refuses float32: it has no PREMUL_SUM.

    @contextmanager
    def computing(self, module: nn.Module) -> Iterator[None]:
        """Context of passes: after it, the module has its part of the weights only, whichever pass was the last."""
        try:
            yield
        finally:
            if isinstance(module, FSDPModule):
                module.reshard()

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Together: the whole tensors on the first rank, and none on the others."""
        gathered = ((name, self._gathered(t) if isinstance(t, DTensor) else t) for name, t in tensors.items())
        return {name: tensor for name, tensor in gathered if tensor is not None and self.is_first}

    def everyone(self, mine: T) -> list[T]:
        """Together: what each rank gave, in the order of the ranks."""
        if self.world == 1:
            return [mine]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def total(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Together: the sums of all ranks, by name."""
        total: dict[str, float] = {}
        for of_rank in self.everyone(dict(sums)):
            for name, value in of_rank.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def norm(self, of_parts: Tensor) -> Tensor:
        """Together: the L2 norm of tensors from that of this rank's parts."""
        if self.world == 1:
            return of_parts
        squares = self.everyone(float(of_parts.double()) ** 2)
        return torch.tensor(sum(squares), dtype=torch.float64).sqrt().to(of_parts)

    def agree(self, error: FlexmarlError | None) -> None:
        """Together: raises, on every rank, the error of the first rank that has one."""
        for found in self.everyone(error):
            if found is not None:
                raise found

    def first(self, work: Callable[[], T]) -> T | None:
        """Together: what `work` returns on the first rank, None on the others. Its error is raised on all of them."""
        found, error = None, None
        if self.is_first:
            try:
                found = work()
            except FlexmarlError as raised:
                error = raised
        self.agree(error)
        return found

    def _gathered(self, tensor: DTensor) -> Tensor | None:
        """The whole tensor, on the first rank."""
        mine = part(tensor.detach())
        padded = mine.new_zeros(_rows(len(tensor), self.world), *tensor.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.world)] if self.is_first else None
        dist.gather(padded, parts, group=self._group, group_dst=0)
        return None if parts is None else torch.cat(parts)[: len(tensor)].to(tensor.dtype)


ALONE = Ranks()
"""The only rank of its policy."""


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory; the tensor itself if it is whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """The rows of a whole tensor that this rank has of `like`, copied to its device; all of them if `like` is whole.

    A DTensor gives its own part. Each rank has a copy of a scalar.
    """
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return part(whole)
    if not whole.dim():
        return whole.clone()
    rows = _rows(len(whole), like.device_mesh.size())
    begin = rows * like.device_mesh.get_local_rank()
    return whole[begin : begin + rows].to(like.device, copy=True)


def as_whole(mine: Tensor, like: Tensor) -> Tensor:
    """The tensor whose part `mine` is, where `like` says which part: a DTensor in the memory of `mine`."""
    if not isinstance(like, DTensor):
        return mine
    shape: Any = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(mine, like.device_mesh, like.placements, run_check=False, **shape)


def _rows(number: int, world: int) -> int:
    return -(-number // world)


def _layers(module: nn.Module) -> Sequence[nn.Module]:
    """The decoder layers of a causal LM. A module that is none has no such layers."""
    config = getattr(module, "config", None)
    if config is None:
        return ()
    number = config.get_text_config().num_hidden_layers
    for found in module.modules():
        if isinstance(found, nn.ModuleList) and len(found) == number:
            return [*found]
    warn(
        f"training.ranks: {type(module).__name__} has no list of its {number} layers, so that every rank gathers all "
        f"weights at once in each pass; ranks=1 needs no more memory than that",
        stacklevel=2,
    )
    return ()


def meet(place: Path, number: int, world: int, *, device: str = "cpu") -> dict[int, Ranks]:
    """Joins this process, rank `number`, with the others of its place. Returns its view of the first 1, 2 ... of them.

    `place` is a file that only they use, on one machine. The dictionary lacks those to which this rank does not belong.
    """
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(place), world)
    dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=MEET)
    groups: dict[int, Any] = {size: dist.new_group([*range(size)], timeout=WAIT) for size in range(2, world + 1)}
    found = {size: Ranks(number, size, group=group) for size, group in groups.items() if number < size}
    return found | ({1: ALONE} if number == 0 else {})
