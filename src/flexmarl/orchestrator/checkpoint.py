"""Checkpoints on a disk: one folder per step boundary, sealed, that is complete or does not count.

    checkpoints/step-00040/
        state.json          the RunState
        solver/ verifier/   what each trainer saved: weights, optimiser, version, its empty gradient cache
        experience.sqlite   a copy of the store, if `checkpoint.store` is set: a run whose store is gone goes on with it
        MANIFEST.json       {"solver/trainer.pt": {"bytes": 9120, "blake2b": "1f0c22..."}, ...}

    checkpoints/best        a link to the checkpoint of the best evaluation, if `checkpoint.best` is set

The folder is written under another name, the manifest last. It is flushed to the disk, and renamed when it is complete.
If a checkpoint is damaged nevertheless, by the disk for example, the manifest shows it: a file is missing, torn or
changed. It is then passed over for the newest intact one.

A checkpoint holds no seeds and no learning rates. A call's seed is computed from the run's seed and the call's identity
(agents/context.py), and a learning rate from the version (training/settings.py).
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, TypedDict

from flexmarl.cluster.own_folder import require_space
from flexmarl.errors import CheckpointError, boundary
from flexmarl.events.safe_json import json_text, parse_json
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.records import GroupId, PolicyName, Version
from flexmarl.rollout.admission import ActiveGroup, AdmissionState

MANIFEST = "MANIFEST.json"
_digest = partial(hashlib.blake2b, digest_size=16)
_COMPLETE, _PARTIAL = "step-", ".partial-"
"""Prefixes of the folder names. A partial folder is being written or removed, or was left behind by a killed run."""
_STEP = re.compile("[0-9]{1,18}")
_BEST = "best"
Which = Literal["newest", "best"] | int
"""A checkpoint of a run: by its age, by its evaluation, or by its number of completed steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """State of a run at a step boundary, apart from the state of its trainers."""

    step: int
    """Number of completed steps."""
    admission: AdmissionState
    """All groups before `admission.next_group` have ended, except those in `admission.active`. No later one counts."""
    versions: Mapping[PolicyName, Version]
    before: Evaluation | None = None
    """The evaluation before the first step: a resumed run compares with it."""
    wall_s: float = 0.0
    """Sum of the seconds that each process of the run took so far."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """State of the estimators, e.g. running baselines, to the last bit. Empty if an older checkpoint has none."""
    evaluations: Mapping[int, Evaluation] = field(default_factory=dict)
    """Every evaluation so far, by completed steps, to the last bit (orchestrator/stopping.py)."""
    resets: Mapping[PolicyName, int] = field(default_factory=dict)
    """Completed steps at the last reset of each policy's reference (orchestrator/references.py)."""

    @property
    def replayed(self) -> tuple[GroupId, ...]:
        """Groups that were active: a resumed run plays them again."""
        return tuple(one.group for one in self.admission.active)


def first_group(admission: AdmissionState) -> GroupId:
    """The first group that a run may play again if it resumes with this state or with a later one."""
    return min([one.group for one in admission.active], default=GroupId(admission.next_group))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One checkpoint on the disk."""

    step: int
    num_bytes: int = 0
    damage: str = ""
    """Why it is not intact; "" if it is. The size of a damaged checkpoint is unknown: `num_bytes` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest intact checkpoint, if there is one, and why newer ones were passed over, newest first."""

    path: Path | None
    passed_over: Sequence[str] = ()


class CheckpointFolder:
    """The checkpoints of one run, in one folder. Every method blocks until the disk has done its work."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.absolute()  # Trainers write there, from processes with another working directory.

    def of_step(self, step: int, prefix: str = _COMPLETE) -> Path:
        """Path of the folder for a step's checkpoint; it need not exist."""
        return self.path / f"{prefix}{step:05d}"

    def partial(self, step: int) -> Path:
        """Path of the folder in which a step's checkpoint is written."""
        return self.of_step(step, _PARTIAL)

    def begin(self, step: int) -> None:
        """Makes the partial folder of a step, empty. Raises OSError if a checkpoint as big as the last has no space."""
        shutil.rmtree(self.partial(step), ignore_errors=True)
        self.partial(step).mkdir(parents=True)
        last = next((one for one in reversed(self.held()) if not one.damage), None)
        if last:
            require_space(self.path, last.num_bytes, "a checkpoint as big as the last one")

    def complete(self, state: RunState) -> Path:
        """Adds the state to the step's partial folder, which the trainers wrote, and makes it a checkpoint."""
        written, final = self.partial(state.step), self.of_step(state.step)
        (written / "state.json").write_text(json_text(asdict(state), indent=1), encoding="utf-8")
        seal(written)
        self.remove(state.step)
        written.rename(final)
        flush(self.path)
        return final

    def remove(self, step: int) -> None:
        """Renames the folder, then deletes it: if the deletion stops halfway, no damaged checkpoint is left."""
        folder, going = self.of_step(step), self.of_step(step, f"{_PARTIAL}removed-")
        if folder.exists():
            shutil.rmtree(going, ignore_errors=True)
            folder.rename(going)
            shutil.rmtree(going)

    def held(self) -> list[Held]:
        """Every checkpoint in the folder, oldest first. Only file sizes are checked, not contents."""
        return [_look(folder) for folder in self._folders()]

    def best(self) -> int | None:
        """The step of the best checkpoint; None if none is marked, or if the marked one is gone."""
        link = self.path / _BEST
        step = link.readlink().name.removeprefix(_COMPLETE) if link.is_symlink() else ""
        return int(step) if _STEP.fullmatch(step) and self.of_step(int(step)).is_dir() else None

    def mark_best(self, step: int) -> None:
        """Marks the checkpoint of a step as the best, in place of the one that was."""
        made = self.path / f"{_PARTIAL}{_BEST}"
        made.unlink(missing_ok=True)
        made.symlink_to(self.of_step(step).name)
        made.replace(self.path / _BEST)
        flush(self.path)

    def chosen(self, which: Which) -> Path:
        """Path of the newest intact checkpoint, of the best one, or of that of a step, which is read and is intact.

        Raises CheckpointError that says which ones there are.
        """
        if which != "newest":
            verify(path := self.named(which))
            return path
        found = self.verified()
        if found.path is None:
            raise CheckpointError(self.none_intact(found))
        return found.path

    @contextmanager
    def reading(self, which: Which) -> Iterator[Path]:
        """The checkpoint that `chosen` gives. The block can read it even if a run that goes on removes it meanwhile.

        The path is of a folder with links to its files, or its own where no link can be made.
        """
        if not os.access(self.path, os.W_OK):
            yield self.chosen(which)
            return
        with TemporaryDirectory(prefix=f"{_PARTIAL}read-", dir=self.path, ignore_cleanup_errors=True) as links:
            yield self._linked(which, Path(links))

    def _linked(self, which: Which, into: Path) -> Path:
        while True:
            newest = self._folders()[-1:]
            try:
                checkpoint = self.chosen(which)
            except CheckpointError:
                if newest == self._folders()[-1:]:
                    raise
                continue  # The run has removed what was read here: there is a newer one.
            try:
                return shutil.copytree(checkpoint, into / checkpoint.name, copy_function=os.link)
            except OSError:
                if checkpoint.is_dir():  # It is still there, but links cannot be made.
                    return checkpoint

    def named(self, which: Which) -> Path:
        """Path of the newest, the best, or a step's checkpoint, which need not be intact. Raises as `chosen` does."""
        if which not in ("newest", "best") and (not isinstance(which, Integral) or isinstance(which, bool)):
            raise CheckpointError(f"which must be newest, best, or the step of a checkpoint, e.g. 4, got {which!r}")
        folders = self._folders()
        if which == "newest":
            if not folders:
                raise CheckpointError(self.none_intact(Found(path=None)))
            return folders[-1]
        step = self.best() if which == "best" else which
        if step is None:
            raise CheckpointError(
                f"no checkpoint in {self.path} is marked as the best; train with checkpoint.best={{}}"
            )
        if not self.of_step(step).is_dir():
            there = ", ".join(str(_step_of(folder)) for folder in folders) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.path}; there are those of steps: {there}")
        return self.of_step(step)

    def none_intact(self, found: Found) -> str:
        """The error text for a missing intact checkpoint; it says what to do."""
        if not found.passed_over:
            return f"no checkpoint in {self.path}; train first, with checkpoint.every above 0"
        return (
            f"no intact checkpoint in {self.path}: {'; '.join(found.passed_over)}. Put back a copy of one, or "
            f"remove that folder: --resume then begins at step 0"
        )

    def verified(self) -> Found:
        """Reads checkpoints, newest first, until one is intact. `path` is None if none is."""
        passed_over: list[str] = []
        for folder in reversed(self._folders()):
            try:
                verify(folder)
                return Found(path=folder, passed_over=passed_over)
            except CheckpointError as error:
                passed_over.append(str(error))
        return Found(path=None, passed_over=passed_over)

    def clear_partial(self) -> list[Path]:
        """Removes the partial folders of a killed run. Only the one process that runs in this folder may call it."""
        left = sorted(self.path.glob(f"{_PARTIAL}*"))
        for path in left:
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
        return left

    def _folders(self) -> list[Path]:
        """Folders of checkpoints, in order of steps. Other names, such as `step-00040.bak`, are the user's own."""
        found = self.path.glob(f"{_COMPLETE}*")
        return sorted((one for one in found if _STEP.fullmatch(one.name.removeprefix(_COMPLETE))), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_COMPLETE))


def _look(folder: Path) -> Held:
    try:
        return Held(step=_step_of(folder), num_bytes=check_sizes(folder))
    except CheckpointError as error:
        return Held(step=_step_of(folder), damage=str(error))


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
    for name, entry in sealed.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file} is missing: {entry['bytes']} bytes were written")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(
                f"{file} is torn: {entry['bytes']} bytes were written, {file.stat().st_size} bytes are there"
            )
    return sum(entry["bytes"] for entry in sealed.values())


def verify(folder: Path) -> None:
    """Reads every file. Raises CheckpointError, which names the first one that is not as it was written."""
    check_sizes(folder)
    for name, entry in _manifest(folder).items():
        if _digest_of(folder / name) != entry["blake2b"]:
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
        return {name: SealedFile(bytes=entry["bytes"], blake2b=entry["blake2b"]) for name, entry in sealed.items()}


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, _digest).hexdigest()


def read_state(path: Path) -> RunState:
    """Reads the state in the checkpoint at `path`. Raises CheckpointError if it is not one of this version."""
    with boundary(CheckpointError, f"{path / 'state.json'} is not a state of this version of flexmarl"):
        raw = parse_json((path / "state.json").read_bytes())
        before, admission = raw.pop("before"), _admission_of(raw.pop("admission"))
        memory, versions = _floats(raw.pop("memory", {})), dict(raw.pop("versions"))
        evaluations = {int(step): _evaluation_of(found) for step, found in raw.pop("evaluations", {}).items()}
        resets = dict(raw.pop("resets", {}))
        for name, counts in (("versions", versions), ("resets", resets)):
            for policy, count in counts.items():
                _check_count(count, f"{name}.{policy}")
        state = RunState(
            **raw,
            versions=versions,
            memory=memory,
            evaluations=evaluations,
            resets=resets,
            before=_evaluation_of(before) if before else None,
            admission=admission,
        )
        _check_count(state.step, "step")
        if type(state.wall_s) not in (int, float) or not 0 <= state.wall_s < math.inf:
            raise ValueError(f"wall_s must be a number from 0, got {state.wall_s!r}")
        return state


def _check_count(value: object, name: str) -> None:
    """Raises ValueError if `value` is not an int from 0 to 2**63 - 1."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{name} must be a whole number from 0, got {value!r}")


def _evaluation_of(raw: dict[str, Any]) -> Evaluation:
    if "metrics" not in raw:  # An older checkpoint has the figures alone.
        return Evaluation(versions={}, episodes=0, failed=0, metrics=_floats(raw))
    metrics, rewards = _floats(raw.pop("metrics")), _floats(raw.pop("rewards"))
    ranges = {name: (float(least), float(most)) for name, (least, most) in raw.pop("ranges", {}).items()}
    return Evaluation(**raw, metrics=metrics, rewards=rewards, ranges=ranges)


def _floats(raw: Mapping[str, float | str]) -> dict[Any, float]:
    """Reads numbers. Those that JSON lacks were written as texts: "nan", "inf"."""
    return {name: float(value) for name, value in raw.items()}


def _admission_of(raw: dict[str, Any]) -> AdmissionState:
    active = tuple(ActiveGroup(**one) for one in raw.pop("active"))
    expiries = tuple((position, count) for position, count in raw.pop("expiries", ()))
    state = AdmissionState(again=tuple(raw.pop("again")), active=active, expiries=expiries, **raw)
    counts = {"next_group": [state.next_group], "next_position": [state.next_position], "again": state.again}
    counts |= {f"active.{name}": [getattr(one, name) for one in active] for name in ("group", "position", "attempt")}
    counts |= {"expiries": [number for pair in expiries for number in pair]}
    for name, values in counts.items():
        for value in values:
            _check_count(value, f"admission.{name}")
    if unknown := [one.group for one in active if one.group >= state.next_group]:
        raise ValueError(f"admission.active.group must be below next_group={state.next_group}, got {unknown[0]}")
    return state
