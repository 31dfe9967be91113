"""Runs saving at the end of a step, and resumption from what was saved.

Loop of `Saver`: the end of a step becomes a checkpoint. Then rows that no checkpoint needs may lose their payloads.

consumes    the state of a run at a step boundary
waits for   each trainer, then the disk
produces    a checkpoint; journal events for what was saved, dropped or failed
unblocked by the disk; if it is full, the run only warns, provided that an older checkpoint is intact and a save follows

Loop of `resume`: trainers and store return to one step boundary, that of the newest intact checkpoint.

consumes    the checkpoints and the store that a run left behind
waits for   the disk, the trainers, the store
produces    the state to continue from; in the journal and on screen, what was passed over and discarded
unblocked by nothing else: no other part of the run has started yet
"""

from collections.abc import Awaitable, Callable, Mapping

from flexmarl.errors import CheckpointError
from flexmarl.events.event import Events
from flexmarl.events.run_events import (
    CheckpointDropped,
    CheckpointFailed,
    CheckpointPassedOver,
    CheckpointRemoved,
    CheckpointSaved,
    StorePruned,
    StoreRewound,
)
from flexmarl.experience.interface import ExperienceStore
from flexmarl.orchestrator.checkpoint import Checkpoints, Found, RunState, Saved, first_group
from flexmarl.orchestrator.settings import CheckpointSettings
from flexmarl.records import CONTROLLER, GroupId, PolicyName, Version
from flexmarl.rollout.admission import AdmissionState
from flexmarl.training.interface import Trainer

Prune = Callable[[GroupId], Awaitable[int]]
"""Called with the first group that a run may play again: may drop payloads of older ones. Returns how many rows."""


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
    ) -> None:
        self._checkpoints = checkpoints
        self._trainers = trainers
        self._settings = settings
        self._events = events
        self._warn = warn
        self._prune = prune

    def due(self, step: int, *, last: bool) -> bool:
        """True if a checkpoint is saved at the end of this step."""
        return bool(self._settings.every) and (last or step % self._settings.every == 0)

    async def not_saved(self, admission: AdmissionState) -> None:
        """Called at the end of a step without a checkpoint. If checkpoints are off, nothing needs the ended groups."""
        if not self._settings.every:
            await self._make_room(first_group(admission), "there are no checkpoints: a resumed run begins anew")

    async def save(self, state: RunState, *, last: bool) -> None:
        """Saves a checkpoint. If that fails, it warns if an older one is intact and a later save will come.

        Otherwise it raises CheckpointError: the run must end, because its work would be lost.
        """
        began = self._events.now()
        try:
            saved = await self._checkpoints.save(state, self._trainers)
        except CheckpointError as error:
            self._failed(state, error, last)
            return
        self._tell(state, saved, began)
        await self._make_room(saved.first_group, f"every checkpoint goes on from group {saved.first_group} or later")

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
        for drop in saved.dropped:
            self._events.emit(CheckpointDropped(step=drop.step, because=drop.because))
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
    """Goes back to the newest intact checkpoint, or to step 0 if the run was killed before its first.

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
    say("the run was ended before its first checkpoint: it begins again, in the same folder")
    start = AdmissionState(next_group=0, next_position=0)
    return RunState(step=0, admission=start, versions=dict.fromkeys(trainers, Version(0)))
