"""Runs of benchmarks that take hours: each is kept as a line of JSON when it ends, and is not played again."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

Played = TypeVar("Played")
Cell = TypeVar("Cell")


def kept_in(file: Path, played: Callable[..., Played]) -> list[Played]:
    """The runs that ended; `played` is their dataclass."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [played(**json.loads(line)) for line in lines]


def play_all(cells: Sequence[Cell], play: Callable[[Cell], Any], file: Path, *, jobs: int) -> None:
    """Plays cells, `jobs` at a time, and keeps what `play` returns of each."""
    with ThreadPoolExecutor(jobs) as at_once:
        running = [at_once.submit(play, cell) for cell in cells]
        for number, future in enumerate(as_completed(running), start=1):
            played = future.result()
            with file.open("a") as lines:
                lines.write(json.dumps(asdict(played)) + "\n")
            print(f"{number} of {len(cells)}: {played}", flush=True)
