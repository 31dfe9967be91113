"""Folder on a disk, sealed: a manifest says which bytes it holds, so that missing, torn and flipped ones are noticed.

    MANIFEST.json    {"solver/trainer.pt": {"bytes": 9120, "blake2b": "1f0c22..."}, ...}

The manifest is written last, and everything is flushed to the disk before the folder may get its final name.
"""

import hashlib
import json
import os
from functools import partial
from pathlib import Path
from typing import TypedDict

from flexmarl.errors import CheckpointError, boundary

MANIFEST = "MANIFEST.json"
_digest = partial(hashlib.blake2b, digest_size=16)


class SealedFile(TypedDict):
    """What the manifest says of one file."""

    bytes: int
    blake2b: str


def seal(folder: Path) -> None:
    """Flushes every file and folder inside to the disk, and writes the manifest."""
    inside = sorted(folder.rglob("*"))
    files = [path for path in inside if path.is_file()]
    for path in inside:
        flush(path)
    sealed = {
        str(file.relative_to(folder)): SealedFile(bytes=file.stat().st_size, blake2b=_digest_of(file)) for file in files
    }
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    flush(manifest)
    flush(folder)


def check_sizes(folder: Path) -> int:
    """How many bytes the sealed files have; a look at the folder, not into its files.

    Raises CheckpointError naming the first file that is missing or has another size.
    """
    sealed = _manifest(folder)
    for name, told in sealed.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: {told['bytes']} bytes were written")
        if file.stat().st_size != told["bytes"]:
            raise CheckpointError(
                f"{file} is torn: {told['bytes']} bytes were written, {file.stat().st_size} bytes are there"
            )
    return sum(told["bytes"] for told in sealed.values())


def verify(folder: Path) -> None:
    """Reads everything. Raises CheckpointError naming the first file that is not as it was written."""
    check_sizes(folder)
    for name, told in _manifest(folder).items():
        if _digest_of(folder / name) != told["blake2b"]:
            raise CheckpointError(f"{folder / name} is damaged: its bytes are not those that were written")


def flush(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _manifest(folder: Path) -> dict[str, SealedFile]:
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{folder} is not complete: it has no {MANIFEST}")
    with boundary(CheckpointError, f"{manifest} is damaged"):
        sealed = json.loads(manifest.read_bytes())
        if not sealed:
            raise ValueError("it names no file")
        for name in sealed:
            (folder / name).is_file()  # Of a name that no file can have: an OSError.
        return {name: SealedFile(bytes=told["bytes"], blake2b=told["blake2b"]) for name, told in sealed.items()}


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, _digest).hexdigest()
