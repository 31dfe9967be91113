"""The digest of a tree on the device is that on the CPU."""

import torch

from flexmarl.cluster.word_sums import BLOCK
from flexmarl.objects.interface import checksum
from flexmarl.testing.object_checks import heterogeneous_tree


def test_the_device_computes_the_digest_that_the_cpu_computes(device: str) -> None:
    torch.manual_seed(0)
    tree = heterogeneous_tree() | {
        "large": torch.randn(130 * 2 * BLOCK + 77),
        "larger": torch.randn(3, 50 * BLOCK + 1).bfloat16(),
        "a": torch.randn(5000),
    }
    there = {name: tensor.to(device) for name, tensor in tree.items()}
    assert checksum(there) == checksum(tree)
