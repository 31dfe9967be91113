"""Plays many random runs with faults, and checks the laws on each.

    python -m flexmarl.testing.faults --seeds 0:3000 --jobs 2
    python -m flexmarl.testing.faults --seeds 0:10000,40000:45000 --least 300
    python -m flexmarl.testing.faults --seeds 17:18          # one seed again
    python -m flexmarl.testing.faults --mutations            # breaks rules on purpose: a law must catch each one

Prints the seed of each broken law and the reason. The exit code is 1 if a law was broken, if a kind of fault was
witnessed less often than `--least`, or if a mutation was not caught.
"""

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from flexmarl.testing.faults.trials import catch_all, failure_lines, fault_table, mutation_table, try_all


def main(
    seeds: Annotated[
        str, typer.Option(help="From the first to before the last, as in 0:3000; or several, as in 0:9,20:29.")
    ] = "0:3000",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    mode: Annotated[str | None, typer.Option(help="Only this mode; without it, all of them.")] = None,
    least: Annotated[int, typer.Option(min=0, help="Fail if a kind of fault is witnessed less often.")] = 0,
    mutations: Annotated[bool, typer.Option("--mutations", help="Break rules on purpose instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON line last.")] = False,
) -> None:
    """Plays random runs with random faults, and checks the laws of docs/laws.md on each."""
    console = Console(stderr=as_json)
    chosen = [seed for part in seeds.split(",") for seed in _range(part)]
    if mutations:
        caught = catch_all(chosen, jobs, console)
        console.print(mutation_table(caught))
        failed = [one.name for one in caught if one.seed is None]
        figures = {"caught": {one.name: one.laws for one in caught}, "missed": failed}
    else:
        tally = try_all(chosen, jobs, console, mode)
        console.print(fault_table(tally))
        for line in failure_lines(tally):
            console.print(line)
        rare = tally.rare(least)
        for name, times in rare.items():
            console.print(
                f"{name} was witnessed {times} times, --least is {least}: try more seeds, or make it likelier"
            )
        failed = [*tally.broken, *rare]
        figures = tally.figures()
    if as_json:
        sys.stdout.write(json.dumps(figures) + "\n")
    raise typer.Exit(1 if failed else 0)


def _range(seeds: str) -> range:
    first, _, last = seeds.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise typer.BadParameter(f"--seeds is {seeds!r}; give the first one and the one after the last, as in 0:3000")
    return range(int(first), int(last))


if __name__ == "__main__":
    typer.run(main)
