"""Freed memory goes back to the system."""

import ctypes

import psutil
import pytest
import torch

from flexmarl.cluster.torch_device import free_unused, return_heap

NUMBERS, TENSORS = 1 << 14, 2048


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library cannot return pages: no glibc"
)
@pytest.mark.parametrize("give_back", [return_heap, lambda: free_unused("cpu")])
def test_what_small_tensors_leave_is_returned_though_one_of_them_stays(give_back) -> None:
    resident = psutil.Process().memory_info
    tensors = [torch.ones(NUMBERS) for _ in range(TENSORS)]
    size = tensors[0].nbytes * TENSORS
    full = resident().rss
    del tensors[:-1]
    give_back()
    assert full - resident().rss > size / 2
