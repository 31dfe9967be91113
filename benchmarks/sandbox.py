"""Boxes for code of a model: what a box, a call in a live session, and many sessions at once cost.

Needs bubblewrap, and the guarantees of `flexmarl sandbox probe`. A box is compared with a bare start of the same
Python, by turns, so that the load of the machine counts for both.
"""

import asyncio
import os
import statistics
import subprocess
import time
from contextlib import AsyncExitStack

import psutil
from common import parser, report

from flexmarl.sandbox.backends.bubblewrap import Bubblewrap, cgroups_here, python_of
from flexmarl.sandbox.backends.cgroups import Cgroups
from flexmarl.sandbox.spare_boxes import SparePool

PAIRS = 20
"""Starts of a box and of a bare Python in one repeat."""
CALLS = 200
"""Calls in one live session."""


def bare_start(python: str) -> float:
    """Seconds of a bare Python with the same code."""
    began = time.perf_counter()
    subprocess.run([python, "-I", "-c", "print(6 * 7)"], check=True, capture_output=True)
    return time.perf_counter() - began


async def cold(sandbox: Bubblewrap) -> tuple[float, float]:
    """Median seconds of a fresh box with one call, and of a bare Python that does the same."""
    boxes, bare = [], []
    python = python_of(sandbox.settings)
    for _ in range(PAIRS):
        began = time.perf_counter()
        async with sandbox.open() as box:
            await box.run("print(6 * 7)")
        boxes.append(time.perf_counter() - began)
        bare.append(bare_start(python))
    return statistics.median(boxes), statistics.median(bare)


async def spared(sandbox: Bubblewrap) -> float:
    """Median seconds of a spare box with one call. The next spare has half a second to start."""
    pool, taken = SparePool(sandbox, 1), []
    for _ in range(PAIRS):
        began = time.perf_counter()
        async with pool.open() as box:
            await box.run("print(6 * 7)")
            taken.append(time.perf_counter() - began)
        await asyncio.sleep(0.5)
    return statistics.median(taken[1:])


async def warm(sandbox: Bubblewrap) -> float:
    """Median seconds of a call in a live session."""
    taken = []
    async with sandbox.open() as box:
        for number in range(CALLS):
            began = time.perf_counter()
            await box.run(f"print({number} * 7)")
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


async def together(sandbox: Bubblewrap, sessions: int, calls: int) -> tuple[float, float]:
    """Calls per second over live sessions, and the memory of all of them in GB (its peak, files included)."""
    async with AsyncExitStack() as stack:
        boxes = [await stack.enter_async_context(sandbox.open()) for _ in range(sessions)]

        async def session(number: int) -> int:
            peak = 0
            for _ in range(calls):
                peak = (await boxes[number].run(f"print({number})")).peak_bytes
            return peak

        began = time.perf_counter()
        peaks = await asyncio.gather(*map(session, range(sessions)))
        return sessions * calls / (time.perf_counter() - began), sum(peaks) / 1e9


async def remains(sandbox: Bubblewrap, number: int) -> int:
    """Processes, groups and open files that so many boxes leave."""
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(number // 8):
        async with AsyncExitStack() as stack:
            boxes = await asyncio.gather(*(stack.enter_async_context(sandbox.open()) for _ in range(8)))
            await asyncio.gather(*(box.run("1") for box in boxes))
    groups, left = cgroups_here(), 0
    if isinstance(groups, Cgroups):
        left = sum(len(list(folder.glob(f"{groups.name}-*"))) for folder in groups.folders)
    return left + len(psutil.Process().children(recursive=True)) + len(os.listdir("/proc/self/fd")) - files


def main() -> None:
    """Prints the table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--boxes", type=int, default=200, help="boxes that must leave nothing (default 200)")
    chosen = options.parse_args()
    sandbox = Bubblewrap()
    starts = [asyncio.run(cold(sandbox)) for _ in range(chosen.repeats)]
    box_s, bare_s = (statistics.median(one[index] for one in starts) for index in (0, 1))
    spare_s = statistics.median(asyncio.run(spared(sandbox)) for _ in range(chosen.repeats))
    call_s = statistics.median(asyncio.run(warm(sandbox)) for _ in range(chosen.repeats))
    rate, _ = asyncio.run(together(sandbox, 32, 50))
    _, memory = asyncio.run(together(sandbox, 128, 2))
    left = asyncio.run(remains(sandbox, chosen.boxes))
    report(
        "Boxes",
        ("what", "measured"),
        [
            ("a fresh box with one call", f"{1000 * box_s:.0f} ms"),
            ("a bare Python", f"{1000 * bare_s:.0f} ms"),
            ("a spare box with one call", f"{1000 * spare_s:.1f} ms"),
            ("a call in a live session", f"{1000 * call_s:.2f} ms"),
            ("calls in 32 sessions", f"{rate:.0f} per second"),
            ("memory of 128 sessions", f"{memory:.2f} GB"),
            (f"left by {chosen.boxes} boxes", f"{left}"),
        ],
        {
            "cold_vs_python": statistics.median(one / other for one, other in starts),
            "spare_ms": 1000 * spare_s,
            "warm_ms": 1000 * call_s,
            "calls_per_s": rate,
            "gb_of_128": memory,
            "left_over": left,
        },
        as_json=chosen.json,
        wanted_at_most={"cold_vs_python": 3.0, "warm_ms": 3.0, "gb_of_128": 1.5, "left_over": 0.0},
        wanted={"calls_per_s": 300.0},
    )


if __name__ == "__main__":
    main()
