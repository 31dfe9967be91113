"""Checkpoints on a folder: one atomic set of files per step boundary. `to_drop` decides which ones are removed.

    checkpoints/step-00040/
        state.json          the RunState
        solver/ verifier/   what each trainer saved: weights, optimiser, version, its empty gradient cache
        MANIFEST.json       every file with its size and digest

The folder is written under another name, flushed to the disk, and renamed when it is complete. If a checkpoint is
damaged nevertheless, by the disk for example, it is passed over for the newest intact one.

A checkpoint holds no seeds and no learning rates. A call's seed is computed from the run's seed and the call's identity
(agents/context.py), and a learning rate from the version (training/settings.py).
"""

import asyncio
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from flexmarl.cluster.own_folder import require_space
from flexmarl.errors import CheckpointError, boundary
from flexmarl.events.safe_json import json_text, parse_json
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.sealed_folder import check_sizes, flush, seal, verify
from flexmarl.records import GroupId, PolicyName, Version
from flexmarl.rollout.admission import ActiveGroup, AdmissionState
from flexmarl.training.interface import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One checkpoint on the disk."""

    step: int
    num_bytes: int = 0
    damage: str = ""
    """Why it is not intact; "" if it is. The size of a damaged checkpoint is unknown: `num_bytes` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One checkpoint to remove, and why."""

    step: int
    because: str


def to_drop(held: Sequence[Held], *, saved: int, keep: int, budget_bytes: int | None) -> list[Drop]:
    """Chooses the checkpoints to remove, newest first, after that of step `saved` (one of `held`) is complete.

    The saved one always stays. Of the others the oldest are removed first, so that the newest intact ones stay.

    >>> held = [Held(step=step, num_bytes=10**9) for step in (1, 2, 3)]
    >>> to_drop(held, saved=3, keep=5, budget_bytes=2 * 10**9)
    [Drop(step=1, because='with it there are 3 GB, checkpoint.budget_gb is 2')]
    """
    drops: list[Drop] = []
    stay = total = 0
    for checkpoint in sorted(held, key=lambda one: one.step, reverse=True):
        total += checkpoint.num_bytes if checkpoint.step <= saved else 0
        because = ""
        if checkpoint.step > saved:
            because = f"the run went back behind it, and is at step {saved} now"
        elif checkpoint.step == saved:
            stay += 1
        elif checkpoint.damage:
            because = checkpoint.damage
        elif stay >= keep:
            because = f"checkpoint.keep is {keep}"
        elif budget_bytes is not None and total > budget_bytes:
            because = f"with it there are {total / 1e9:.3g} GB, checkpoint.budget_gb is {budget_bytes / 1e9:.3g}"
        else:
            stay += 1
        if because:
            drops.append(Drop(step=checkpoint.step, because=because))
    return drops


P = ParamSpec("P")
T = TypeVar("T")

_COMPLETE, _PARTIAL = "step-", ".partial-"
"""Prefixes of the folder names. A partial folder is being written or removed, or was left behind by a killed run."""
_STEP = re.compile("[0-9]{1,18}")


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

    @property
    def replayed(self) -> tuple[GroupId, ...]:
        """Groups that were active: a resumed run plays them again."""
        return tuple(one.group for one in self.admission.active)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The newest intact checkpoint, if there is one, and why newer ones were passed over, newest first."""

    path: Path | None
    passed_over: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A new checkpoint, and the checkpoints that were removed after it was complete."""

    path: Path
    num_bytes: int
    dropped: Sequence[Drop]
    first_group: GroupId
    """The first group that a run may play again, whichever of the remaining checkpoints it resumes from."""


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path, *, keep: int, budget_bytes: int | None = None, in_thread: bool = True) -> None:
        """Without `in_thread`, disk work blocks the event loop: virtual time has no threads."""
        self._folder = folder.absolute()  # Trainers write there, from processes with another working directory.
        self._keep = keep
        self._budget_bytes = budget_bytes
        self._in_thread = in_thread

    async def save(self, state: RunState, trainers: Mapping[PolicyName, Trainer]) -> Saved:
        """Writes a checkpoint, then removes those that `to_drop` chooses. If writing fails, the older ones stay.

        Trainers write one after the other, because they share the disk. Raises CheckpointError, and errors of trainers.
        """
        partial = self.path(state.step, _PARTIAL)
        with boundary(CheckpointError, f"saving {self.path(state.step)}"):
            try:
                await self._aside(self._begin, partial)
                for policy, trainer in trainers.items():
                    await trainer.save(partial / policy)
                return await self._aside(self._complete, partial, state)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)  # Frees the space again if the disk was full.
                raise

    async def find(self) -> Found:
        """Reads checkpoints, newest first, until one is intact."""
        return await self._aside(self._find)

    async def restore(self, path: Path, trainers: Mapping[PolicyName, Trainer]) -> RunState:
        """Loads into every trainer what it saved. `path` must come from `find`, which verified it.

        Raises CheckpointError if its state cannot be read or does not fit the trainers.
        """
        state = _read_state(path)
        missing = sorted(set(trainers) - set(state.versions))
        if missing:
            raise CheckpointError(f"{path} has no policy '{missing[0]}'; it has: {', '.join(sorted(state.versions))}")
        for policy, trainer in trainers.items():
            version = await trainer.load(path / policy)
            if version != state.versions[policy]:
                raise CheckpointError(f"{path}: '{policy}' is at version {version}, not {state.versions[policy]}")
        return state

    async def load(self, trainers: Mapping[PolicyName, Trainer]) -> RunState:
        """Restores the newest intact checkpoint. Raises CheckpointError if there is none."""
        found = await self.find()
        if found.path is None:
            raise CheckpointError(self.none_intact(found))
        return await self.restore(found.path, trainers)

    def none_intact(self, found: Found) -> str:
        """The error text for a missing intact checkpoint; it says what to do."""
        if not found.passed_over:
            return f"no checkpoint in {self._folder}; train first, with checkpoint.every above 0"
        return (
            f"no intact checkpoint in {self._folder}: {'; '.join(found.passed_over)}. Put back a copy of one, or "
            f"remove that folder: --resume then begins at step 0"
        )

    def held(self) -> list[Held]:
        """Every checkpoint in the folder, oldest first. Only file sizes are checked, not contents."""
        return [_look(folder) for folder in self._folders()]

    def clear_partial(self) -> list[Path]:
        """Removes the partial folders of a killed run. Only the one process that runs in this folder may call it."""
        left = sorted(self._folder.glob(f"{_PARTIAL}*"))
        for folder in left:
            shutil.rmtree(folder)
        return left

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does disk work in a thread, so that the event loop stays free.

        A cancelled call waits for the thread, so that nothing is written after it has returned.
        """
        if not self._in_thread:
            return work(*args, **kwargs)
        working = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs), name="checkpoint-disk")
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.gather(working, return_exceptions=True)
            raise

    def _begin(self, partial: Path) -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        last = next((one for one in reversed(self.held()) if not one.damage), None)
        if last:
            require_space(self._folder, last.num_bytes, "a checkpoint as big as the last one")

    def _complete(self, partial: Path, state: RunState) -> Saved:
        final = self.path(state.step)
        (partial / "state.json").write_text(json_text(asdict(state), indent=1), encoding="utf-8")
        seal(partial)
        self._remove(state.step)
        partial.rename(final)
        flush(self._folder)
        held = self.held()
        drops = to_drop(held, saved=state.step, keep=self._keep, budget_bytes=self._budget_bytes)
        for drop in drops:
            self._remove(drop.step)
        dropped = {drop.step for drop in drops}
        kept = [one for one in held if one.step not in dropped]
        return Saved(
            path=final,
            num_bytes=kept[-1].num_bytes,
            dropped=drops,
            first_group=first_group(_read_state(self.path(kept[0].step)).admission),
        )

    def _find(self) -> Found:
        passed_over: list[str] = []
        for folder in reversed(self._folders()):
            try:
                verify(folder)
                return Found(path=folder, passed_over=passed_over)
            except CheckpointError as error:
                passed_over.append(str(error))
        return Found(path=None, passed_over=passed_over)

    def _remove(self, step: int) -> None:
        """Renames the folder, then deletes it: if the deletion stops halfway, no damaged checkpoint is left."""
        folder, going = self.path(step), self.path(step, f"{_PARTIAL}removed-")
        if folder.exists():
            shutil.rmtree(going, ignore_errors=True)
            folder.rename(going)
            shutil.rmtree(going)

    def _folders(self) -> list[Path]:
        """Folders of checkpoints, in order of steps. Other names, such as `step-00040.bak`, are the user's own."""
        found = self._folder.glob(f"{_COMPLETE}*")
        return sorted((one for one in found if _STEP.fullmatch(one.name.removeprefix(_COMPLETE))), key=_step_of)

    def path(self, step: int, prefix: str = _COMPLETE) -> Path:
        """Path of the folder for a step's checkpoint; it need not exist."""
        return self._folder / f"{prefix}{step:05d}"


def first_group(admission: AdmissionState) -> GroupId:
    """The first group that a run may play again if it resumes with this state or with a later one."""
    return min([one.group for one in admission.active], default=GroupId(admission.next_group))


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix(_COMPLETE))


def _look(folder: Path) -> Held:
    try:
        return Held(step=_step_of(folder), num_bytes=check_sizes(folder))
    except CheckpointError as error:
        return Held(step=_step_of(folder), damage=str(error))


def _read_state(path: Path) -> RunState:
    with boundary(CheckpointError, f"{path / 'state.json'} is not a state of this version of flexmarl"):
        raw = parse_json((path / "state.json").read_bytes())
        before, admission = raw.pop("before"), _admission_of(raw.pop("admission"))
        memory, versions = _floats(raw.pop("memory", {})), dict(raw.pop("versions"))
        for policy, version in versions.items():
            _check_count(version, f"versions.{policy}")
        state = RunState(
            **raw,
            versions=versions,
            memory=memory,
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
    metrics, rewards = _floats(raw.pop("metrics")), _floats(raw.pop("rewards"))
    return Evaluation(**raw, metrics=metrics, rewards=rewards)


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
