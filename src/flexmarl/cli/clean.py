"""`flexmarl clean`: removes what runs left on this machine that nobody could end properly."""

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
    if not [tell(folder, dry_run=dry_run) for folder in abandoned()]:
        typer.echo(f"Nothing to clean: no dead run left anything in {leases_root()}.")


def tell(folder: Path, *, dry_run: bool) -> Path:
    """Removes what one dead run left, and says what that was."""
    leases = read_leases(folder)
    pids = live_processes(leases)
    paths = [path for path in (folder, *map(Path, leases.paths)) if path.exists()]
    if not dry_run:
        release(folder)
    typer.echo(f"{'would remove' if dry_run else 'removed'} of run {leases.run}:")
    for thing in (*(f"process {pid}" for pid in pids), *paths):
        typer.echo(f"  {thing}")
    if not dry_run and (left := [*live_processes(leases), *(path for path in paths if path.exists())]):
        raise FlexmarlError(f"could not remove {', '.join(map(str, left))}: end or delete it as its owner")
    return folder
