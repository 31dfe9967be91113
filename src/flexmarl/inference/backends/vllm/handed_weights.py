"""Memory by which one process of a machine hands a tensor tree to others: anonymous, so that nothing of it is left.

    with HandedTree(tree) as handed:
        ...                                  # another process: `handed_tree(handed.address)`

The memory is gone when the block has ended and no reader maps it any more, also if a process was killed.
"""

import mmap
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch

from flexmarl.objects.tensors import Layout, copy_in, layout_of, views


class HandedTree:
    """A copy of a tensor tree that other processes of this user can map while the block lasts."""

    def __init__(self, tree: Mapping[str, torch.Tensor]) -> None:
        self._tree = tree
        self._layout = layout_of(tree)
        self._file = -1

    def __enter__(self) -> "HandedTree":
        self._file = os.memfd_create("flexmarl-weights")
        try:
            os.ftruncate(self._file, max(1, self._layout.num_bytes))
            block = mmap.mmap(self._file, max(1, self._layout.num_bytes))
            copy_in(self._tree, views(self._layout, block))
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    @property
    def address(self) -> dict[str, Any]:
        """Where it is, in plain values; valid inside the block."""
        return {"path": f"/proc/{os.getpid()}/fd/{self._file}", "layout": self._layout.as_plain()}


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
