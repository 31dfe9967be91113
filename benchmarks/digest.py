"""The digest of published weights against copying them, and against BLAKE2b over the same bytes.

    python benchmarks/digest.py --json

Contenders run in turn on one thread, over one large float32 tensor and over many small ones.
`digest_vs_memcpy`: bytes/s of the digest by those of `copy_`; `vs_blake2b`: by those of 128-bit BLAKE2b.
"""

import hashlib
import statistics
import time
from collections.abc import Callable

import torch
from common import interleaved_rates, median_ratio, parser, report

from flexmarl.objects.interface import TensorTree, checksum
from flexmarl.objects.tensors import layout_of, part_sums


def blake2b(tree: TensorTree) -> str:
    """Names, dtypes, shapes and bytes, one tensor after the other."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tree):
        digest.update(f"{name}|{tree[name].dtype}|{tuple(tree[name].shape)}|".encode())
        digest.update(tree[name].flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main() -> None:
    """Runs the benchmark."""
    parts = parser(__doc__.splitlines()[0] if __doc__ else None)
    parts.set_defaults(threads=1)
    parts.add_argument("--mib", type=int, default=256, help="size of the large tensor in MiB (default 256)")
    parts.add_argument("--tensors", type=int, default=5000, help="number of small tensors (default 5000)")
    options = parts.parse_args()
    torch.set_num_threads(options.threads)
    large = torch.randn(options.mib * 2**18)
    copy = torch.empty_like(large)
    small = {f"layers.{i}.weight": torch.randn(100) for i in range(options.tensors)}
    small_bytes = layout_of(small).num_bytes
    rates = interleaved_rates(
        {
            "copy_": lambda: gib_per_s(large.nbytes, lambda: copy.copy_(large)),
            "digest": lambda: gib_per_s(large.nbytes, lambda: part_sums(large, 0)),
            "BLAKE2b": lambda: gib_per_s(large.nbytes, lambda: blake2b({"": large})),
            "digest, small tensors": lambda: gib_per_s(small_bytes, lambda: checksum(small)),
            "BLAKE2b, small tensors": lambda: gib_per_s(small_bytes, lambda: blake2b(small)),
        },
        options.repeats,
    )
    report(
        f"{options.mib} MiB in one tensor, and {options.tensors} tensors of 100 numbers",
        ("what", "GiB/s"),
        [(name, f"{statistics.median(of):.3f}") for name, of in rates.items()],
        {
            "digest_vs_memcpy": median_ratio(rates, "digest", "copy_"),
            "vs_blake2b": median_ratio(rates, "digest", "BLAKE2b"),
            "small_vs_blake2b": median_ratio(rates, "digest, small tensors", "BLAKE2b, small tensors"),
        },
        as_json=options.json,
        wanted={"vs_blake2b": 3.0},
    )


def gib_per_s(num_bytes: int, work: Callable[[], object]) -> float:
    """Bytes per second of the processor: what others do on the machine does not count."""
    began = time.process_time()
    work()
    return num_bytes / 2**30 / max(time.process_time() - began, 1e-9)


if __name__ == "__main__":
    main()
