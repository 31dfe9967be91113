"""Plays many random runs that break, and checks the laws.

    python -m flexmarl.testing.faults --seeds 0:3000 --jobs 2
    python -m flexmarl.testing.faults --seeds 17:18          # one of them again
    python -m flexmarl.testing.faults --mutations            # are the laws sharp? each broken rule must be caught

Exit code 1 if a law was broken, with the seed and how.
"""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from flexmarl.testing.faults.report import failure_lines, fault_table, mutation_table
from flexmarl.testing.faults.trials import catch_all, try_all


def main(
    seeds: Annotated[str, typer.Option(help="From the first to before the last, as in 0:3000.")] = "0:3000",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    mode: Annotated[str | None, typer.Option(help="Only this mode; without it, all of them.")] = None,
    mutations: Annotated[bool, typer.Option("--mutations", help="Break rules on purpose instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line last.")] = False,
) -> None:
    """Plays random runs with random faults, and checks the laws of docs/laws.md on each."""
    console = Console(stderr=as_json)
    chosen = _range(seeds)
    if mutations:
        caught = catch_all(chosen, jobs, console)
        console.print(mutation_table(caught))
        failed = [one.name for one in caught if one.seed is None]
        told = {"caught": {one.name: one.laws for one in caught}, "missed": failed}
    else:
        tally = try_all(chosen, jobs, console, mode)
        console.print(fault_table(tally))
        for line in failure_lines(tally):
            console.print(line)
        failed = sorted(tally.broken)
        told = tally.told()
    if as_json:
        sys.stdout.write(json.dumps(told) + "\n")
    raise typer.Exit(1 if failed else 0)


def _range(seeds: str) -> range:
    first, _, last = seeds.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise typer.BadParameter(f"--seeds is {seeds!r}; give the first one and the one after the last, as in 0:3000")
    return range(int(first), int(last))


if __name__ == "__main__":
    typer.run(main)
