"""Memory by which one process of a machine hands tensors to others: anonymous, so that nothing of it is left.

    with HandedTree(tree) as handed:
        ...                                  # another process: `handed_tree(handed.address)`
    with handed_adapter(adapter) as folder:
        ...                                  # another process reads it as peft's files: `adapter_in(folder)`

The memory is gone when the block has ended and no reader maps it any more, also if a process was killed.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import load_file, save

from flexmarl.objects.interface import Checksum, PublishedAdapter
from flexmarl.objects.tensors import Layout, copy_in, layout_of, views

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_BEFORE, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
"""Parts of peft's names of A and B, before and after that of a layer."""
_SCALING, _BASE = "flexmarl_scaling", "flexmarl_base"
"""Keys of ours in peft's config, which peft and vLLM ignore."""


class HandedTree:
    """A copy of a tensor tree that other processes of this user can map while the block lasts."""

    def __init__(self, tree: Mapping[str, torch.Tensor]) -> None:
        self._tree = tree
        self._layout = layout_of(tree)

    def __enter__(self) -> "HandedTree":
        self._file = open(os.memfd_create("flexmarl-weights"), "r+b", buffering=0)  # Closed when it is forgotten, too.
        os.ftruncate(self._file.fileno(), max(1, self._layout.num_bytes))
        block = mmap.mmap(self._file.fileno(), max(1, self._layout.num_bytes))
        copy_in(self._tree, views(self._layout, block))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def address(self) -> dict[str, Any]:
        """Where it is, in plain values; valid inside the block."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file.fileno()}", "layout": self._layout.as_plain()}


def handed_tree(address: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tree at an address, on this process's own map. Changes to it are seen by this process alone.

    >>> with HandedTree({"a": torch.arange(3)}) as handed:
    ...     handed_tree(handed.address)
    {'a': tensor([0, 1, 2])}
    """
    layout = Layout.from_plain(address["layout"])
    with open(address["path"], "rb") as file:
        block = mmap.mmap(file.fileno(), max(1, layout.num_bytes), access=mmap.ACCESS_COPY)
    return views(layout, block)


@contextmanager
def handed_adapter(adapter: PublishedAdapter) -> Iterator[Path]:
    """A folder with the adapter in peft's format, for the length of the block.

    The folder holds links to anonymous memory: an adapter that is being read when its process is killed leaves no byte.
    """
    rank = max(a.shape[0] for a, _ in adapter.layers.values())
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": adapter.scaling * rank,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in adapter.layers}),
        _SCALING: adapter.scaling,
        _BASE: adapter.base,
    }
    tensors = {
        f"{_BEFORE}{layer}{part}": tensor.detach().cpu().contiguous()
        for layer, of_layer in adapter.layers.items()
        for part, tensor in zip((_A, _B), of_layer, strict=True)
    }
    with TemporaryDirectory(prefix="flexmarl-adapter-") as name, ExitStack() as stack:
        folder = Path(name)
        for file, content in ((_CONFIG, json.dumps(config).encode()), (_TENSORS, save(tensors))):
            memory = os.memfd_create(file)
            stack.callback(os.close, memory)
            with open(memory, "wb", closefd=False) as target:
                target.write(content)
            (folder / file).symlink_to(f"/proc/{os.getpid()}/fd/{memory}")
        yield folder


def adapter_in(folder: Path) -> PublishedAdapter:
    """The adapter in a folder of `handed_adapter`, read from the files that vLLM reads."""
    config, tensors = json.loads((folder / _CONFIG).read_text()), load_file(folder / _TENSORS)
    layers = [name.removeprefix(_BEFORE).removesuffix(_A) for name in tensors if name.endswith(_A)]
    return PublishedAdapter(
        {layer: (tensors[f"{_BEFORE}{layer}{_A}"], tensors[f"{_BEFORE}{layer}{_B}"]) for layer in layers},
        config[_SCALING],
        Checksum(config[_BASE]),
    )
