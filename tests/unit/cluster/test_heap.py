"""Freed memory goes back to the system."""

import ctypes
import subprocess
import sys

import psutil
import pytest
import torch

from flexmarl.cluster import torch_device
from flexmarl.cluster.torch_device import _WORTH_RETURNING, free_unused, return_heap, returning_heap

NUMBERS, TENSORS = 1 << 14, 2048


needs_glibc = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library cannot return pages: no glibc"
)


@needs_glibc
@pytest.mark.parametrize("give_back", [return_heap, lambda: free_unused("cpu")])
def test_what_small_tensors_leave_is_returned_though_one_of_them_stays(give_back) -> None:
    resident = psutil.Process().memory_info
    tensors = [torch.ones(NUMBERS) for _ in range(TENSORS)]
    size = tensors[0].nbytes * TENSORS
    full = resident().rss
    del tensors[:-1]
    give_back()
    assert full - resident().rss > size / 2


@needs_glibc
def test_a_block_that_made_the_process_grow_returns_what_it_has_freed() -> None:
    resident = psutil.Process().memory_info
    return_heap()
    number = 2 * _WORTH_RETURNING // (4 * NUMBERS)
    before, freed = resident().rss, 0
    with returning_heap("cpu"):
        tensors = [torch.ones(NUMBERS) for _ in range(number)]
        full = resident().rss
        del tensors[:-1]
        freed = full - resident().rss
    assert full - before > _WORTH_RETURNING, "it grew"
    assert full - resident().rss > max(freed, _WORTH_RETURNING), "more than the heap returns by itself"


@needs_glibc
def test_what_a_small_model_frees_stays_for_its_next_step_but_growth_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    returned = []
    monkeypatch.setattr(torch_device, "return_heap", lambda: returned.append(psutil.Process().memory_info().rss))
    monkeypatch.setattr(torch_device._resident, "low", psutil.Process().memory_info().rss)
    kept = []
    for _ in range(4):
        with returning_heap("cpu"):
            kept.append(torch.ones(_WORTH_RETURNING // 12))  # A third of what is worth it, every time.
    assert len(returned) == 1, "after the third or fourth block"


KEPT = """
import ctypes
import resource
import torch
from flexmarl.cluster.torch_device import keep_heap

class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d keepcost".split()]

libc = ctypes.CDLL(None)
facts, malloc = libc.mallinfo2, libc.malloc
facts.restype, libc.free.argtypes = Facts, [ctypes.c_void_p]
malloc.restype = libc.sbrk.restype = ctypes.c_void_p

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        torch.ones(5_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for bound in (-1, -3):
    libc.mallopt(bound, 128 << 10)  # As in a process that has freed nothing large.
before = facts().hblks
tensor = torch.ones(5_000_000)
print(facts().hblks - before)
keep_heap()
another = torch.ones(5_000_000)
print(facts().hblks - before)
del another
faults()
print(faults())
end = libc.sbrk(0)
while (block := malloc(5 << 20)) < end:
    pass
libc.free(block)
print(facts().keepcost)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not count its blocks")
def test_a_heap_that_is_kept_serves_tensors_below_32_mib_without_fresh_pages() -> None:
    done = subprocess.run([sys.executable, "-c", KEPT], capture_output=True, text=True, timeout=120, check=True)
    mapped, mapped_later, faults, kept_at_its_end = map(int, done.stdout.split())
    assert (mapped, mapped_later) == (1, 1), "the first is the system's, the second the heap's"
    assert faults < 100, "a round that gives its pages back takes 10 of the largest size, or 5 000"
    assert kept_at_its_end >= 4 << 20, "else the C library gives the end back as soon as it is larger than 128 KiB"
