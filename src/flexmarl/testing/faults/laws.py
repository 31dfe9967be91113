"""Decides which laws a story breaks. Each law recomputes its facts from journals, rows and what parts remember."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

from flexmarl.errors import (
    CheckpointError,
    EngineError,
    EpisodeError,
    FlexmarlError,
    StoreError,
    TrainingError,
    TransitionError,
    WorkerError,
)
from flexmarl.events.group_events import GroupExpired
from flexmarl.events.run_events import FaultStruck, Resumed, StepEnded
from flexmarl.records import RowState
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.faults.fault_plan import FaultKind
from flexmarl.testing.faults.laws_of_samples import (
    law_5_every_ready_row_is_in_one_update,
    law_7_rows_hold_what_engines_sampled,
    law_8_credit_compares_within_a_task,
    law_11_what_failed_is_not_trained,
    law_13_every_sampled_token_is_accounted_for,
)
from flexmarl.testing.faults.laws_of_serving import (
    law_3_tokens_are_as_fresh_as_promised,
    law_4_nothing_is_held_twice,
    law_10_versions_are_served_after_their_checksum,
    law_12_queues_are_bounded,
)
from flexmarl.testing.faults.story import Life, Story, group_of

Law = Callable[[Story], Iterator[str]]
DEMANDED: Mapping[FaultKind, tuple[type[FlexmarlError], ...]] = {
    FaultKind.LOST_TRAINER: (TrainingError, WorkerError),
    FaultKind.LOST_CACHE: (TrainingError, WorkerError),
    FaultKind.STORE_FAILURE: (StoreError,),
    FaultKind.TORN_CHECKPOINT: (CheckpointError,),
    FaultKind.SOURCE_EXHAUSTED: (SourceExhausted,),
    FaultKind.LOST_INSTANCE: (EngineError, EpisodeError),
    FaultKind.ENGINE_SILENCE: (EngineError, EpisodeError),
    FaultKind.FAILED_PUBLISH: (EngineError, EpisodeError),
    FaultKind.SLOW_INSTANCE: (EngineError, EpisodeError),
    FaultKind.ENGINE_ERRORS: (EpisodeError,),
    FaultKind.HUNG_WORKFLOW: (EpisodeError,),
    FaultKind.POISON_TASK: (EpisodeError,),
}
"""Errors that may end a life in which a fault struck."""


def every_life_ends_as_its_faults_demand(story: Story) -> Iterator[str]:
    """No life hangs. A life dies only of an error that its faults demand. The run is resumed until it has ended."""
    for number, life in enumerate(story.lives):
        if life.hung:
            yield f"life {number} hung: {life.error}"
        elif life.error is not None and not isinstance(life.error, _demanded(story, life)):
            yield f"life {number} died of what no fault demands: {type(life.error).__name__}: {life.error}"
        elif type(life.error) is TransitionError:
            yield f"life {number} died of a move that its life cycle lacks: {life.error}"
    last = story.lives[-1]
    if not story.finished and not isinstance(last.error, SourceExhausted | EpisodeError) and not last.hung:
        yield f"after {len(story.lives)} lives the run has not ended: {type(last.error).__name__}: {last.error}"
    if story.finished and not last.of(StepEnded) and not last.of(Resumed):
        yield "the run ended without a step"
    if story.finished and sorted(story.steps) != list(range(story.settings.steps)):
        yield f"the run ended with the steps {sorted(story.steps)}, steps is {story.settings.steps}"


def _demanded(story: Story, life: Life) -> tuple[type[FlexmarlError], ...]:
    struck = {FaultKind(event.kind) for event in life.of(FaultStruck)}
    errors = [error for kind in struck for error in DEMANDED.get(kind, ())]
    filtered = story.settings.credit.filter is not None
    late = any("held up others" in event.because for event in life.of(GroupExpired))  # The deadline was too short.
    if story.chance or filtered or late:
        errors.append(EpisodeError)  # With so few groups, all may end without a sample by chance.
    return tuple(errors)


def law_1_every_group_ends_once(story: Story) -> Iterator[str]:
    """Every admitted group ends exactly once, and its rows end with it. Group ids have no gaps."""
    for group, told in sorted(story.groups.items()):
        if len(told.admitted) != 1:
            yield f"group {group} was admitted {len(told.admitted)} times"
        if len(told.ends) > 1 or (story.finished and not told.ends):
            yield f"group {group} ended {len(told.ends)} times: {told.ends}"
    if sorted(story.groups) != list(range(len(story.groups))):
        yield f"groups {sorted(story.groups)} have gaps"
    yield from _groups_of_steps(story)
    ends = {group: told.ends[0] for group, told in story.groups.items() if told.ends}
    states: dict[int, Counter[RowState]] = defaultdict(Counter)
    for row in story.rows:
        states[group_of(row.sample_id)][row.state] += 1
    for group, found in states.items():
        if group not in story.groups:
            yield f"rows are left of group {group}, which was never admitted, or was taken back"
        elif group in ends and (unended := {*found} - _ALLOWED[ends[group]]):
            yield f"group {group} is {ends[group]}, but has rows that are {sorted(unended)}"
        elif ends.get(group) == "trained" and not found[RowState.TRAINED]:
            yield f"group {group} is trained, but none of its rows is"


def _groups_of_steps(story: Story) -> Iterator[str]:
    """Synchronous steps without refill admit `batch.groups` groups each. Asynchronous steps train at least as many."""
    per_step, num_steps = story.settings.batch.groups, story.settings.steps
    if not story.settings.mode.synchronous:
        for step, trained in story.steps.items():
            if len(trained) < per_step:
                yield f"step {step} trained {len(trained)} groups, batch.groups is {per_step}"
    elif story.finished and not story.refills and len(story.groups) != num_steps * per_step:
        yield f"{len(story.groups)} groups were admitted for {num_steps} steps of {per_step}"


_ENDED = {RowState.TRAINED, RowState.FILTERED, RowState.FAILED, RowState.EXPIRED}
_ALLOWED = {
    "trained": _ENDED - {RowState.EXPIRED},
    "filtered": {RowState.FILTERED, RowState.FAILED},
    "failed": {RowState.FAILED},
    "expired": {RowState.EXPIRED, RowState.FAILED, RowState.FILTERED},
}


LAWS: Mapping[str, Law] = {
    "ends": every_life_ends_as_its_faults_demand,
    "1": law_1_every_group_ends_once,
    "3": law_3_tokens_are_as_fresh_as_promised,
    "4": law_4_nothing_is_held_twice,
    "5": law_5_every_ready_row_is_in_one_update,
    "7": law_7_rows_hold_what_engines_sampled,
    "8": law_8_credit_compares_within_a_task,
    "10": law_10_versions_are_served_after_their_checksum,
    "11": law_11_what_failed_is_not_trained,
    "12": law_12_queues_are_bounded,
    "13": law_13_every_sampled_token_is_accounted_for,
}
"""The laws by their number in docs/laws.md. `ends` has no number there: it says how lives may end."""


def broken(story: Story) -> dict[str, list[str]]:
    """Returns the laws that a story breaks, each with the reasons."""
    found = {number: list(law(story)) for number, law in LAWS.items()}
    return {number: because for number, because in found.items() if because}
