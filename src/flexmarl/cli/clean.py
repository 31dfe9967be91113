"""`flexmarl clean`: removes what runs left on this machine when they could not end properly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cli.terminal import say
from flexmarl.cluster.leases import leases_root
from flexmarl.cluster.remains import abandoned, held_paths, live_processes, read_leases, release, strangers
from flexmarl.errors import FlexmarlError


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove processes, shared memory and temporary files of runs whose controller is dead; live runs stay as they are.

    A run cleans up behind itself, even after kill -9. This is for machines that went down meanwhile. Only what a run of
    yours made is touched.
    """
    root = leases_root()
    lines = cleaned(root, dry_run=dry_run)
    say(next(lines, f"Nothing to clean: no dead run left anything in {root}."))
    for line in lines:
        say(line)


def cleaned(root: Path, *, dry_run: bool) -> Iterator[str]:
    """Removes what dead runs left, and yields a line for each thing. Files that belong to no run stay, and are named.

    Raises ConfigError if `root` is not this user's alone, FlexmarlError if something cannot be removed.
    """
    for folder in abandoned(root):
        leases = read_leases(folder)
        processes = live_processes(leases)
        paths = held_paths(folder)
        yield f"{'would remove' if dry_run else 'removing'} what the run {leases.run} left:"
        yield from (f"  process {process.pid}" for process in processes)
        yield from (f"  {path}" for path in paths)
        if dry_run:
            continue
        release(folder)
        if left := [*(f"process {process.pid}" for process in live_processes(leases)), *map(str, held_paths(folder))]:
            raise FlexmarlError(f"cannot remove {', '.join(left)}: end or delete it as its owner")
    yield from (f"left as it is: {str(path)!r} {why}" for path, why in strangers(root))
