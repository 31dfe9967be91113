"""Decides, from a journal, which faults struck and to which of them the system reacted.

A witness is a later event that shows the reaction to a fault that struck.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from flexmarl.analysis.costs import EngineCosts
from flexmarl.events.event import Event
from flexmarl.events.group_events import (
    EpisodeAccount,
    EpisodeLost,
    GroupExpired,
    GroupFailed,
    GroupFiltered,
    GroupRetried,
)
from flexmarl.events.run_events import (
    CheckpointPassedOver,
    CheckpointRemoved,
    FaultStruck,
    ProcessStarted,
    Resumed,
    RunFailed,
    WorkerLost,
)
from flexmarl.events.serving_events import Called, InstanceLost
from flexmarl.events.training_events import MicroBatchDone, PublicationDeferred, Swapped
from flexmarl.records import PolicyName
from flexmarl.testing.faults.fault_plan import FaultKind
from flexmarl.testing.faults.schedule import ENGINE_COSTS
from flexmarl.testing.faults.story import Story

Reaction = Callable[[FaultStruck, Event], bool]
"""Rule that returns True if the second event is the system's reaction to the fault in the first."""
CostsOf = Callable[[PolicyName], EngineCosts]
"""Returns the costs of a policy's engines."""


def seen(story: Story) -> tuple[Counter[FaultKind], Counter[FaultKind]]:
    """Counts, by kind, the faults that struck in a run of the campaign, and those to which it reacted afterwards."""
    return seen_in(story.events, lambda policy: ENGINE_COSTS)


def seen_in(events: Sequence[Event], costs_of: CostsOf) -> tuple[Counter[FaultKind], Counter[FaultKind]]:
    """Counts like `seen`, for the events of any journal. `costs_of` are those that its engines were simulated with."""
    struck, answered = Counter[FaultKind](), Counter[FaultKind]()
    reactions = reactions_of(costs_of)
    for place, fault in enumerate(events):
        if isinstance(fault, FaultStruck):
            kind = FaultKind(fault.kind)
            struck[kind] += 1
            if any(reactions[kind](fault, event) for event in events[place + 1 :]):
                answered[kind] += 1
    return struck, answered


def combined(story: Story) -> Counter[str]:
    """Counts 1 for each combination of COMBINATIONS that came together in the run."""
    return Counter(name for name, holds in COMBINATIONS.items() if holds(story))


def _losses_while_streaming(story: Story) -> bool:
    """True if trainers had rows of open groups and were swapped, and the run survived a lost trainer and write."""
    streamed = any(trainer.cache.open_group_of for life in story.lives for trainer in life.trainers.values())
    swapped = any(isinstance(event, Swapped) for event in story.events)
    _, answered = seen(story)
    return streamed and swapped and bool(answered[FaultKind.LOST_TRAINER] and answered[FaultKind.STORE_FAILURE])


def _batch_id_reused(story: Story) -> bool:
    """True if all rows of a micro-batch were dropped, and other rows were accumulated under its id."""
    return any(trainer.cache.reused for life in story.lives for trainer in life.trainers.values())


def _deferred_and_lost(story: Story) -> bool:
    """True if an instance was lost, or the run resumed, after an update that was not served."""
    deferred = False
    for event in story.events:
        deferred = deferred or isinstance(event, PublicationDeferred)
        if deferred and isinstance(event, InstanceLost | Resumed):
            return True
    return False


def _accounts(story: Story) -> list[EpisodeAccount]:
    return [event for event in story.events if isinstance(event, EpisodeAccount)]


def _lost_at_a_door(story: Story) -> bool:
    """True if an instance was lost, and programs were served afterwards."""
    lost = False
    for event in story.events:
        lost = lost or isinstance(event, InstanceLost)
        if lost and isinstance(event, EpisodeAccount) and event.delivered:
            return True
    return False


COMBINATIONS: Mapping[str, Callable[[Story], bool]] = {
    "losses_while_streaming": _losses_while_streaming,
    "batch_id_reused": _batch_id_reused,
    "deferred_and_lost": _deferred_and_lost,
    "program_left": lambda story: any(one.undelivered for one in _accounts(story)),
    "program_edited": lambda story: any(one.why for one in _accounts(story)),
    "program_asked_again": lambda story: any(one.asks.keys() > {"new"} for one in _accounts(story)),
    "program_was_failed": lambda story: any(one.failed and one.delivered for one in _accounts(story)),
    "instance_lost_at_a_door": _lost_at_a_door,
}
"""Conditions that must meet in one run before some laws can break. They rarely meet by chance."""


def _lost(fault: FaultStruck, event: Event) -> bool:
    """A loss counts if it names the target, or says that it was planned: a move gives an instance another name."""
    mine = isinstance(event, InstanceLost) and event.instance == fault.target
    return mine or (isinstance(event, InstanceLost) and "as planned" in event.because)


@dataclass(frozen=True, slots=True)
class SlowCall:
    """Reaction to a slow instance: a call took as long as the slowed engine needs, or was aborted."""

    costs_of: CostsOf

    def __call__(self, fault: FaultStruck, event: Event) -> bool:
        if not isinstance(event, Called) or event.instance != fault.target:
            return "was aborted" in event.because
        engine = self.costs_of(event.policy)
        token_s = engine.decode_s + engine.decode_request_s
        slow_s = fault.amount * token_s * (event.sampled_tokens - event.kept_tokens)
        return event.finish == "abort" or event.t - event.began > 0.9 * slow_s > 0


def _node_lost(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, WorkerLost) and event.node == fault.target


def _worker_lost(fault: FaultStruck, event: Event) -> bool:
    """The episodes that it played are played again, or another worker is started in its place."""
    if isinstance(event, EpisodeLost):
        return event.because.startswith(f"{fault.target} ")
    return isinstance(event, ProcessStarted) and event.process == fault.target


def _silent(fault: FaultStruck, event: Event) -> bool:
    return _lost(fault, event) or "was aborted" in event.because


def _erred(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, Called) and event.policy == fault.target and event.finish == "error"


def _resumed(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, Resumed)


def _passed_over(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, CheckpointPassedOver | CheckpointRemoved)


def _misdated(fault: FaultStruck, event: Event) -> bool:
    """A micro-batch counts if its reported duration differs from the skew by less than half the skew."""
    if not isinstance(event, MicroBatchDone) or event.policy != fault.target:
        return False
    return abs(event.duration_s - fault.amount) < abs(fault.amount) / 2


def _timed_out(fault: FaultStruck, event: Event) -> bool:
    late = isinstance(event, GroupExpired) and "held up others" in event.because
    return late or (isinstance(event, GroupRetried | GroupFailed) and "took longer" in event.because)


def _poisoned(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, GroupFailed) and fault.target in event.because


def _filtered(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, GroupFiltered) and "no group's rewards differ" in event.because


def _exhausted(fault: FaultStruck, event: Event) -> bool:
    return isinstance(event, RunFailed) and "SourceExhausted" in event.because


def reactions_of(costs_of: CostsOf) -> Mapping[FaultKind, Reaction]:
    """Returns the reaction to each kind of fault, in a run whose engines have these costs."""
    return REACTIONS | {FaultKind.SLOW_INSTANCE: SlowCall(costs_of)}


REACTIONS: dict[FaultKind, Reaction] = {
    FaultKind.LOST_INSTANCE: _lost,
    FaultKind.LOST_NODE: _node_lost,
    FaultKind.LOST_WORKER: _worker_lost,
    FaultKind.ENGINE_SILENCE: _silent,
    FaultKind.ENGINE_ERRORS: _erred,
    FaultKind.FAILED_PUBLISH: _lost,
    FaultKind.LOST_TRAINER: _resumed,
    FaultKind.LOST_CACHE: _resumed,
    FaultKind.CLOCK_SKEW: _misdated,
    FaultKind.STORE_FAILURE: _resumed,
    FaultKind.LOST_CONTROLLER: _resumed,
    FaultKind.TORN_CHECKPOINT: _passed_over,
    FaultKind.HUNG_WORKFLOW: _timed_out,
    FaultKind.POISON_TASK: _poisoned,
    FaultKind.ALL_FILTERED: _filtered,
    FaultKind.SOURCE_EXHAUSTED: _exhausted,
}
"""The reaction to each kind but a slow instance, whose reaction depends on the costs of engines."""
