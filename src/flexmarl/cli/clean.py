"""`flexmarl clean`: removes what runs left on this machine that nobody could end properly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from flexmarl.cluster.leases import abandoned, leases_root, live_processes, read_leases, release
from flexmarl.errors import FlexmarlError


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """Remove processes, shared memory and temporary files of runs whose controller is dead; live runs stay as they are.

    A run cleans up behind itself, even after kill -9. This is for machines that went down meanwhile.
    """
    root = leases_root()
    lines = cleaned(root, dry_run=dry_run)
    typer.echo(next(lines, f"Nothing to clean: no dead run left anything in {root}."))
    for line in lines:
        typer.echo(line)


def cleaned(root: Path, *, dry_run: bool) -> Iterator[str]:
    """Removes what dead runs left, saying so line by line. Raises FlexmarlError if something cannot be removed."""
    for folder in abandoned(root):
        leases = read_leases(folder)
        pids = live_processes(leases)
        paths = [path for path in (folder, *map(Path, leases.paths)) if path.exists()]
        yield f"{'would remove' if dry_run else 'removing'} what the run {leases.run} left:"
        yield from (f"  process {pid}" for pid in pids)
        yield from (f"  {path}" for path in paths)
        if dry_run:
            continue
        release(folder)
        if left := [*live_processes(leases), *(path for path in paths if path.exists())]:
            raise FlexmarlError(f"cannot remove {', '.join(map(str, left))}: end or delete it as its owner")
