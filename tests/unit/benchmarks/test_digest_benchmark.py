"""The benchmark of the digest runs, and its last line is for machines."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_it_prints_its_figures_in_one_line_of_json() -> None:
    words = [sys.executable, "benchmarks/digest.py", "--json", "--repeats", "1", "--mib", "8", "--tensors", "20"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    figures = json.loads(said.splitlines()[-1])["figures"]
    assert set(figures) == {"digest_vs_memcpy", "vs_blake2b", "small_vs_blake2b"}
    assert min(figures.values()) > 0
