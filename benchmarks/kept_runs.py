"""Runs of benchmarks that take hours: each is kept as a line of JSON when it ends, and is not played again."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

Played = TypeVar("Played")
Cell = TypeVar("Cell")


def kept_in(file: Path, kind: Callable[..., Played]) -> list[Played]:
    """The runs that ended, as instances of their dataclass."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [kind(**json.loads(line)) for line in lines]


def play_all(cells: Sequence[Cell], play: Callable[[Cell], Any], file: Path, *, jobs: int) -> None:
    """Plays cells, `jobs` at a time, and keeps what `play` returns of each as soon as it ends.

    After an error no other cell begins; those under way are kept. Raises the first error.
    """
    lock, ended = Lock(), 0

    def kept(cell: Cell) -> None:
        nonlocal ended
        played = play(cell)
        with lock:
            ended += 1
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(played)) + "\n")
            print(f"{ended} of {len(cells)}: {played}", flush=True)

    with ThreadPoolExecutor(jobs) as at_once:
        running = [at_once.submit(kept, cell) for cell in cells]
        try:
            for future in running:
                future.result()
        except BaseException:
            at_once.shutdown(wait=False, cancel_futures=True)
            raise
