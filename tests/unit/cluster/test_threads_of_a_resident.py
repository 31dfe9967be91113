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


INLINE = """
import os
import torch
from concurrent.futures import ThreadPoolExecutor
from flexmarl.cluster.concurrency import DeviceThread
from flexmarl.cluster.torch_device import set_own_threads, with_threads
import asyncio

def native():
    return len(os.listdir("/proc/self/task"))

def compute():
    (torch.ones(2000, 2000) * 2).sum()
    return torch.get_num_threads()

torch.set_num_threads(2)
thread = DeviceThread(first=lambda: set_own_threads(2))
with with_threads(1):
    before = native()
    compute()
    print(native() - before)
    print(asyncio.run(thread.run(compute)), native() - before)
    with ThreadPoolExecutor(1) as other:
        print(other.submit(compute).result(), torch.get_num_threads())
print(torch.get_num_threads())
thread.close()
"""


def test_only_the_thread_of_the_device_has_a_team_where_all_is_in_one_process() -> None:
    """With two teams on two cores, both would sleep at the end of each operation."""
    done = subprocess.run([sys.executable, "-c", INLINE], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["0", "2", "1", "1", "1", "2"]
