"""Runs saving at the end of a step, and resumption from what was saved.

Loop of `Saver`: the end of a step becomes a checkpoint. Then rows that no checkpoint needs may lose their payloads.

  run     step k ──► trainers write ──► step k + 1 ─────────────────────────► the next save, or the end: waits
  beside             (files, in the     flush ─► digest ─► seal ─► rename
                     system's memory)

consumes    the state of a run at a step boundary
waits for   each trainer; for the disk only if the save before has not ended, or if no step follows
produces    a checkpoint; journal events for what was saved, dropped or failed
unblocked by the disk; if it is full, the run only warns, provided that an older checkpoint is intact and a save follows

The files are a consistent copy as soon as the trainers have written them: later updates do not reach them. At most one
checkpoint is under way. Until it is complete, a killed run resumes from the one before.

Loop of `resume`: trainers and store return to one step boundary, that of the newest intact checkpoint.

consumes    the checkpoints and the store that a run left behind
waits for   the disk, the trainers, the store
produces    the state to continue from; in the journal and on screen, what was passed over and discarded
unblocked by nothing else: no other part of the run has started yet
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from flexmarl.cluster.concurrency import task_block
from flexmarl.errors import CheckpointError, boundary
from flexmarl.events.event import Events
from flexmarl.events.notices import phase
from flexmarl.events.run_events import (
    CheckpointBest,
    CheckpointDropped,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRemoved,
    CheckpointSaved,
    StorePruned,
    StoreRewound,
)
from flexmarl.experience.interface import ExperienceStore
from flexmarl.experience.store_file import copy_file
from flexmarl.orchestrator.checkpoint import CheckpointFolder, Found, Held, RunState, first_group, read_state
from flexmarl.orchestrator.settings import CheckpointSettings
from flexmarl.orchestrator.stopping import best_of
from flexmarl.records import CONTROLLER, GroupId, PolicyName, Version
from flexmarl.rollout.admission import AdmissionState
from flexmarl.training.interface import Trainer

Prune = Callable[[GroupId], Awaitable[int]]
"""Called with the first group that a run may play again: may drop payloads of older ones. Returns how many rows."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """One checkpoint to remove, and why."""

    step: int
    because: str


def to_drop(
    held: Sequence[Held], *, saved: int, keep: int, budget_bytes: int | None, best: int | None = None
) -> list[Drop]:
    """Chooses the checkpoints to remove, newest first, after that of step `saved` (one of `held`) is complete.

    The saved one always stays, and so does an intact one of step `best`, whatever the limits. Of the others the oldest
    are removed first, so that the newest intact ones stay.

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
        if because and (checkpoint.step != best or checkpoint.step > saved or checkpoint.damage):
            drops.append(Drop(step=checkpoint.step, because=because))
    return drops


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A new checkpoint, and the checkpoints that were removed after it was complete."""

    path: Path
    num_bytes: int
    dropped: Sequence[Drop]
    first_group: GroupId
    """The first group that a run may play again, whichever checkpoint it resumes from of those that the limits keep.

    The best one is not counted. A run goes back to it if all newer ones are damaged, and then plays all groups from its
    step on again, whether or not their rows have been pruned.
    """


class Checkpoints(CheckpointFolder):
    """Saves and restores the checkpoints of one run, and keeps as many as the limits allow."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        budget_bytes: int | None = None,
        in_thread: bool = True,
        store: Path | None = None,
    ) -> None:
        """Without `in_thread`, disk work blocks the event loop: virtual time has no threads.

        `store` is a store's file that every checkpoint gets a copy of.
        """
        super().__init__(folder)
        self.in_thread = in_thread
        self._store = store
        self._keep, self._budget_bytes = keep, budget_bytes

    async def save(self, state: RunState, trainers: Mapping[PolicyName, Trainer]) -> Saved:
        """Writes a checkpoint, then removes those that `to_drop` chooses. If writing fails, the older ones stay.

        Raises CheckpointError, and errors of trainers.
        """
        await self.write(state.step, trainers)
        return await self.finish(state)

    async def write(self, step: int, trainers: Mapping[PolicyName, Trainer]) -> None:
        """Lets every trainer write its files. They may change their weights afterwards.

        Trainers write one after the other, because they share the disk. Raises CheckpointError, and errors of trainers.
        """
        with self._saving(step):
            await self._aside(self.begin, step)
            for policy, trainer in trainers.items():
                await trainer.save(self.partial(step) / policy)

    async def finish(self, state: RunState) -> Saved:
        """Makes a checkpoint of what was written, once it is on the disk, then removes those that `to_drop` chooses.

        Raises CheckpointError.
        """
        with self._saving(state.step):
            return await self._aside(self._complete, state)

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        with boundary(CheckpointError, f"saving {self.of_step(step)}"):
            try:
                yield
            except BaseException:
                shutil.rmtree(self.partial(step), ignore_errors=True)  # Frees the space again if the disk was full.
                raise

    async def find(self) -> Found:
        """Reads checkpoints, newest first, until one is intact."""
        return await self._aside(self.verified)

    async def restore(self, path: Path, trainers: Mapping[PolicyName, Trainer]) -> RunState:
        """Loads into every trainer what it saved. `path` must come from `find`, which verified it.

        Raises CheckpointError if its state cannot be read or does not fit the trainers.
        """
        state = read_state(path)
        missing = sorted(set(trainers) - set(state.versions))
        if missing:
            raise CheckpointError(f"{path} has no policy '{missing[0]}'; it has: {', '.join(sorted(state.versions))}")
        for policy, trainer in trainers.items():
            version = await trainer.load(path / policy)
            if version != state.versions[policy]:
                raise CheckpointError(f"{path}: '{policy}' is at version {version}, not {state.versions[policy]}")
        return state

    async def keep_best(self, step: int) -> list[Drop]:
        """Marks the checkpoint of a step as the best, and removes those that nothing keeps any more."""
        await self._aside(self.mark_best, step)
        return await self._aside(self._prune, self.held(), self.held()[-1].step)

    def _prune(self, held: Sequence[Held], saved: int) -> list[Drop]:
        drops = self._to_drop(held, saved, self.best())
        for drop in drops:
            self.remove(drop.step)
        return drops

    def _to_drop(self, held: Sequence[Held], saved: int, best: int | None) -> list[Drop]:
        return to_drop(held, saved=saved, keep=self._keep, budget_bytes=self._budget_bytes, best=best)

    def _complete(self, state: RunState) -> Saved:
        if self._store is not None:  # Rows that were written after the step may be in it: a resume deletes them.
            copy_file(self._store, self.partial(state.step) / self._store.name)
        path, held = self.complete(state), self.held()
        drops = self._prune(held, state.step)
        beyond = {drop.step for drop in self._to_drop(held, state.step, best=None)}
        kept = [one for one in held if one.step not in beyond]
        oldest = read_state(self.of_step(kept[0].step))
        return Saved(path=path, num_bytes=kept[-1].num_bytes, dropped=drops, first_group=first_group(oldest.admission))

    async def _aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Does disk work in a thread, so that the event loop stays free.

        A cancelled call waits for the thread, so that nothing is written after it has returned.
        """
        if not self.in_thread:
            return work(*args, **kwargs)
        working = asyncio.create_task(asyncio.to_thread(work, *args, **kwargs), name="checkpoint-disk")
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.gather(working, return_exceptions=True)
            raise


class Saver:
    """Saves the steps that are due, and decides whether a failed save ends the run."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainers: Mapping[PolicyName, Trainer],
        settings: CheckpointSettings,
        *,
        events: Events,
        warn: Callable[[str], None],
        prune: Prune | None,
        visiting: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """Trainers write inside a block of `visiting`, which may bring them to their devices."""
        self._checkpoints, self._trainers, self._settings = checkpoints, trainers, settings
        self._events, self._warn, self._prune, self._visiting = events, warn, prune, visiting
        self._tasks: asyncio.TaskGroup | None = None
        """The tasks of `beside`; None outside of it."""
        self._under_way: asyncio.Task[None] | None = None
        self._failure: CheckpointError | None = None
        """Error of a checkpoint that failed beside the run, and that the run must not survive."""

    @asynccontextmanager
    async def beside(self) -> AsyncIterator[None]:
        """Inside the block, checkpoints are completed while the run goes on; leaving it waits for the last one.

        In virtual time, whose disk work blocks anyway, every save waits. Raises CheckpointError if a checkpoint failed
        without an intact older one, and the block has not raised it.
        """
        async with task_block() as tasks:
            self._tasks = tasks if self._checkpoints.in_thread else None
            try:
                yield
            finally:
                self._tasks = None
                if self._under_way:
                    await asyncio.wait([self._under_way])
        await self.settled()

    async def settled(self) -> None:
        """Returns when no checkpoint is under way. Raises the error of one that the run must not survive, once."""
        if self._under_way:
            await asyncio.wait([self._under_way])
            self._under_way = None
        failure, self._failure = self._failure, None
        if failure:
            raise failure

    def due(self, step: int, *, last: bool) -> bool:
        """True if a checkpoint is saved at the end of this step."""
        return bool(self._settings.every) and (last or step % self._settings.every == 0)

    async def not_saved(self, admission: AdmissionState) -> None:
        """Called at the end of a step without a checkpoint. If checkpoints are off, nothing needs the ended groups."""
        if self._failure:
            await self.settled()
        if not self._settings.every:
            await self._make_room(first_group(admission), "there are no checkpoints: a resumed run begins anew")

    async def keep_best(self, state: RunState) -> None:
        """Marks the checkpoint of the present step as the best if the newest evaluation is; saves it if it was not.

        If saving fails, the run goes on with the best checkpoint that it had.
        """
        if self._settings.best is None:
            return
        await self.settled()
        best = best_of(state.evaluations, self._settings.best)
        if best is None or best.step != state.step or self._checkpoints.best() == best.step:
            return
        if not self._checkpoints.of_step(best.step).is_dir():
            await self.save(state, last=False)
            await self.settled()
        if self._checkpoints.of_step(best.step).is_dir():
            drops = await self._checkpoints.keep_best(best.step)
            self._events.emit(CheckpointBest(step=best.step, because=best.because))
            self._emit_drops(drops)

    def _emit_drops(self, drops: Sequence[Drop]) -> None:
        for drop in drops:
            self._events.emit(CheckpointDropped(step=drop.step, because=drop.because))

    async def save(self, state: RunState, *, last: bool) -> None:
        """Saves a checkpoint. If that fails, it warns if an older one is intact and a later save will come.

        Otherwise it raises CheckpointError, here or when the next step has ended: the run must end, because its work
        would be lost. Inside `beside` it returns when the trainers have written, unless the save is the `last` one.
        """
        began = self._events.now()
        with phase(self._events, "checkpoint"):
            await self.settled()
            try:
                async with self._visiting():
                    await self._checkpoints.write(state.step, self._trainers)
            except CheckpointError as error:
                self._failed(state, error, last)
                return
            if self._tasks is None or last:
                await self._finish(state, began, last)
                return
        self._under_way = self._tasks.create_task(self._finish_beside(state, began), name=f"checkpoint/{state.step}")

    async def _finish_beside(self, state: RunState, began: float) -> None:
        try:
            await self._finish(state, began, last=False)
        except CheckpointError as error:
            self._failure = error

    async def _finish(self, state: RunState, began: float, last: bool) -> None:
        try:
            saved = await self._checkpoints.finish(state)
        except CheckpointError as error:
            self._failed(state, error, last)
            return
        self._tell(state, saved, began)
        because = f"checkpoints go on from group {saved.first_group} or later, the best one aside"
        await self._make_room(saved.first_group, because)

    async def _make_room(self, before_group: GroupId, because: str) -> None:
        rows = await self._prune(before_group) if self._prune else 0
        if rows:
            self._events.emit(StorePruned(before_group=before_group, rows=rows, because=because))

    def _failed(self, state: RunState, error: CheckpointError, last: bool) -> None:
        """The run goes on if an older checkpoint is there and a later save will come; else now is the time to end."""
        older = [one.step for one in self._checkpoints.held() if not one.damage]
        self._events.emit(CheckpointFailed(step=state.step, because=str(error)))
        if last or not older:
            raise error
        self._warn(f"no checkpoint of step {state.step}: {error}. Going on; the newest is of step {older[-1]}")

    def _tell(self, state: RunState, saved: Saved, began: float) -> None:
        self._events.emit(
            CheckpointSaved(
                process=CONTROLLER, began=began, step=state.step, path=str(saved.path), bytes=saved.num_bytes
            )
        )
        self._emit_drops(saved.dropped)
        budget = self._settings.budget_bytes
        if budget is not None and saved.num_bytes > budget:
            self._warn(
                f"a checkpoint takes {saved.num_bytes / 1e9:.3g} GB, more than checkpoint.budget_gb, "
                f"{self._settings.budget_gb:g}: only the newest stays"
            )


async def resume(
    checkpoints: Checkpoints,
    trainers: Mapping[PolicyName, Trainer],
    store: ExperienceStore,
    *,
    events: Events,
    say: Callable[[str], None],
) -> RunState:
    """Goes back to the newest intact checkpoint, or to step 0 if the run has none.

    Groups of which the checkpoint knows nothing are discarded from the store, and played again under the same ids.
    Raises CheckpointError if there are checkpoints and none is intact.
    """
    for left in checkpoints.clear_partial():
        events.emit(CheckpointRemoved(path=str(left), because="a killed run left it half-written"))
    found = await checkpoints.find()
    for because in found.passed_over:
        events.emit(CheckpointPassedOver(because=because))
        say(f"passed over a checkpoint: {because}")
    state = await _restored(checkpoints, found, trainers, say)
    next_group, active = GroupId(state.admission.next_group), state.replayed
    rows = await store.rewind(next_group, replay=active)
    because = f"groups from {next_group} on are played again"
    if active:
        because += f", and {len(active)} that were active: {', '.join(map(str, active))}"
    events.emit(StoreRewound(next_group=next_group, replay=active, rows=rows, because=because))
    say(f"going on after step {state.step}; {because}, {rows} rows of them are discarded")
    return state


async def _restored(
    checkpoints: Checkpoints, found: Found, trainers: Mapping[PolicyName, Trainer], say: Callable[[str], None]
) -> RunState:
    if found.path:
        return await checkpoints.restore(found.path, trainers)
    if found.passed_over:
        raise CheckpointError(checkpoints.none_intact(found))
    say("the run has no checkpoint: it begins again at step 0, in the same folder")
    start = AdmissionState(next_group=0, next_position=0)
    return RunState(step=0, admission=start, versions=dict.fromkeys(trainers, Version(0)))
