"""Checkpoints on a folder: one atomic set per step boundary.

    checkpoints/step-00040/
        state.json          step, next group, versions, the settings it belongs to
        solver/ verifier/   what each trainer saved
        MANIFEST.json       every file with its size: written last, so a folder without it is no checkpoint

The folder is written under another name and renamed when it is complete. One that is torn all the same, by a disk say,
does not count: the newest intact one is the newest.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flexmarl.errors import CheckpointError
from flexmarl.orchestrator.evaluate import Evaluation
from flexmarl.records import PolicyName, Version
from flexmarl.training.interface import Trainer

_MANIFEST = "MANIFEST.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands at a step boundary, besides what its trainers hold."""

    step: int
    """Steps done."""
    next_group: int
    """Position in the task source, and id of the next group."""
    versions: Mapping[PolicyName, Version]
    before: Evaluation | None = None
    """The evaluation before the first step: a resumed run compares with it."""


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    async def save(self, state: RunState, trainers: Mapping[PolicyName, Trainer]) -> Path:
        """Writes a checkpoint and drops the oldest beyond `keep`; on any error the older ones stay."""
        final = self._folder / f"step-{state.step:05d}"
        partial = self._folder / f".partial-{state.step:05d}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for policy, trainer in trainers.items():
            await trainer.save(partial / policy)
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        _seal(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(self._folder)
        intact, _ = self._found()
        for old in intact[: -self._keep]:
            shutil.rmtree(old)
        return final

    def latest(self) -> Path:
        """The newest intact checkpoint. Raises CheckpointError."""
        intact, problems = self._found()
        if not intact:
            found = "; ".join(["", *problems])
            raise CheckpointError(
                f"no intact checkpoint in {self._folder}{found}; train anew, with checkpoint.every above 0"
            )
        return intact[-1]

    async def load(self, trainers: Mapping[PolicyName, Trainer], path: Path | None = None) -> RunState:
        """Restores every trainer from the newest checkpoint, or from `path`."""
        path = path or self.latest()
        verify(path)
        state = read_state(path)
        missing = sorted(set(trainers) - set(state.versions))
        if missing:
            raise CheckpointError(f"{path} has no policy '{missing[0]}'; it has: {', '.join(sorted(state.versions))}")
        for policy, trainer in trainers.items():
            version = await trainer.load(path / policy)
            if version != state.versions[policy]:
                raise CheckpointError(f"{path}: '{policy}' is at version {version}, not {state.versions[policy]}")
        return state

    def _found(self) -> tuple[list[Path], list[str]]:
        """The intact checkpoints, oldest first; and what is wrong with the others."""
        intact, problems = [], []
        for folder in sorted(self._folder.glob("step-*"), key=lambda folder: (len(folder.name), folder.name)):
            try:
                verify(folder)
                intact.append(folder)
            except CheckpointError as error:
                problems.append(str(error))
        return intact, problems


def read_state(path: Path) -> RunState:
    """The state in a checkpoint."""
    raw = json.loads((path / "state.json").read_text(encoding="utf-8"))
    before = raw.pop("before")
    return RunState(**raw, before=Evaluation(**before) if before else None)


def verify(path: Path) -> None:
    """Raises CheckpointError naming the first file that is missing or has another size than when it was written."""
    manifest = path / _MANIFEST
    if not manifest.is_file():
        raise CheckpointError(f"{path} is not a complete checkpoint: it has no {_MANIFEST}")
    for name, size in json.loads(manifest.read_text(encoding="utf-8")).items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            found = f"{file.stat().st_size} bytes" if file.is_file() else "nothing"
            raise CheckpointError(f"{file} is torn: {size} bytes were written, {found} is there")


def _seal(folder: Path) -> None:
    """Flushes every file to the disk, then writes the manifest."""
    sizes = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            _sync(file)
            sizes[str(file.relative_to(folder))] = file.stat().st_size
    manifest = folder / _MANIFEST
    manifest.write_text(json.dumps(sizes, indent=1), encoding="utf-8")
    _sync(manifest)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
