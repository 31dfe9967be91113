"""Sealed folder on a disk: its manifest lists every file, so that missing, torn and changed ones are noticed.

    MANIFEST.json    {"solver/trainer.pt": {"bytes": 9120, "blake2b": "1f0c22..."}, ...}

The manifest is written last. Everything is flushed to the disk before the caller gives the folder its final name.
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
    """Size and digest of one file, as the manifest states them."""

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
    """Checks that every sealed file exists with its size, without reading it. Returns the sum of the sizes in bytes.

    Raises CheckpointError, which names the first file that is missing or has another size.
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
    """Reads every file. Raises CheckpointError, which names the first one that is not as it was written."""
    check_sizes(folder)
    for name, told in _manifest(folder).items():
        if _digest_of(folder / name) != told["blake2b"]:
            raise CheckpointError(f"{folder / name} is damaged: its bytes are not those that were written")


def flush(path: Path) -> None:
    """Returns when a file, or the list of names in a folder, is on the disk."""
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
            (folder / name).is_file()  # Raises OSError for a name that no file can have.
        return {name: SealedFile(bytes=told["bytes"], blake2b=told["blake2b"]) for name, told in sealed.items()}


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, _digest).hexdigest()
