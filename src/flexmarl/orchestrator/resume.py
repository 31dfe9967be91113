"""Runs resumption: trainers and store go back to one step boundary, the newest that is whole.

consumes    the checkpoints and the store that a run left behind
waits for   the disk, the trainers, the store
produces    the state to go on from; what was passed over and discarded, in the journal and on screen
unblocked by nothing else: no other part of the run has started yet
"""

from collections.abc import Callable, Mapping

from flexmarl.errors import CheckpointError
from flexmarl.experience.interface import ExperienceStore
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.checkpoint import Checkpoints, Found, RunState
from flexmarl.records import GroupId, PolicyName, Version
from flexmarl.rollout.admission import AdmissionState
from flexmarl.training.interface import Trainer


async def resume(
    checkpoints: Checkpoints,
    trainers: Mapping[PolicyName, Trainer],
    store: ExperienceStore,
    *,
    journal: Journal,
    say: Callable[[str], None],
) -> RunState:
    """Goes back to the newest intact checkpoint, or to step 0 if the run was killed before its first.

    Groups of which the checkpoint knows nothing are discarded from the store, and played again under the same ids.
    Raises CheckpointError if there are checkpoints and none is intact.
    """
    for left in checkpoints.clear_partial():
        journal.event("checkpoint_removed", path=left, because="a killed run left it half-written")
    found = await checkpoints.find()
    for because in found.passed_over:
        journal.event("checkpoint_passed_over", because=because)
        say(f"passed over a checkpoint: {because}")
    state = await _restored(checkpoints, found, trainers, say)
    next_group, active = state.admission.next_group, state.replayed
    rows = await store.rewind(GroupId(next_group), replay=active)
    because = f"groups from {next_group} on are played again"
    if active:
        because += f", and {len(active)} that were active: {', '.join(map(str, active))}"
    journal.event("store_rewound", next_group=next_group, replay=active, rows=rows, because=because)
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
