"""How torch's threads wait in a resident and in a command, by what OpenMP prints when torch loads it."""

import os
import re
import subprocess
import sys

import pytest

from flexmarl.__main__ import BRIEF_SPIN

TURNS = "GOMP_SPINCOUNT"
RESIDENT = "from flexmarl.cluster.host import Host; Host(threads=2); import torch; print(torch.get_num_threads())"
COMMAND = """
import sys
from flexmarl.__main__ import main
sys.argv[1:] = ["--help"]
try:
    main()
except SystemExit:
    import torch
"""
ACTIVE = 30_000_000_000


def spins(program: str, chosen: dict[str, str]) -> tuple[int, str]:
    """Turns for which torch's threads spin with these variables, of 300 000 by default, and what the program prints."""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", TURNS)}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **chosen}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    (found,) = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    return int(found), done.stdout


@pytest.mark.parametrize(
    ("chosen", "expected"), [({}, 0), ({TURNS: BRIEF_SPIN}, 0), ({"OMP_WAIT_POLICY": "ACTIVE"}, ACTIVE)]
)
def test_they_sleep_while_they_wait_unless_the_environment_says_otherwise(
    chosen: dict[str, str], expected: int
) -> None:
    """A command that starts residents leaves its own number of turns in their environment."""
    assert spins(RESIDENT, chosen) == (expected, "2\n")


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, int(BRIEF_SPIN)),
        ({TURNS: "7"}, 7),
        ({"OMP_WAIT_POLICY": "PASSIVE"}, 0),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ACTIVE),
    ],
)
def test_those_of_a_command_spin_briefly_unless_the_environment_says_otherwise(
    chosen: dict[str, str], expected: int
) -> None:
    assert spins(COMMAND, chosen)[0] == expected


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
