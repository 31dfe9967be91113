"""Free space of a disk, asked for before much is written: a full disk is then noticed while nothing is half-written."""

import shutil
from pathlib import Path

from flexmarl.errors import CheckpointError


def require_space(folder: Path, num_bytes: int, what: str) -> None:
    """Raises CheckpointError if `what`, of so many bytes, does not fit on the disk of an existing folder."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"no room for {what} in {folder}: it takes about {num_bytes / 1e9:.3g} GB, {free / 1e9:.3g} GB are free; "
            f"free some there, or lower checkpoint.keep or checkpoint.budget_gb"
        )
