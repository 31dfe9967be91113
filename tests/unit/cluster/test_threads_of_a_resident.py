"""How torch's threads wait in a resident, by what OpenMP prints when torch loads it."""

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("chosen", "expected"), [(None, 0), ("ACTIVE", 30_000_000_000)])
def test_they_sleep_while_they_wait_unless_the_environment_says_otherwise(chosen: str | None, expected: int) -> None:
    """By the number of turns that they spin; OpenMP's default is 300 000."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": chosen} if chosen else {})
    resident = "from flexmarl.cluster.host import Host; Host(threads=2); import torch; print(torch.get_num_threads())"
    done = subprocess.run(
        [sys.executable, "-c", resident], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr) == [str(expected)]
    assert done.stdout.strip() == "2"
