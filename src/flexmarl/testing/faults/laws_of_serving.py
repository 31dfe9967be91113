"""Decides whether a story keeps the laws of serving: versions of tokens, owners of devices, lengths of queues."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from decimal import Decimal

from flexmarl.events.event import Event
from flexmarl.events.group_events import (
    GroupAdmitted,
    GroupFailed,
    GroupFiltered,
    GroupReady,
    GroupStopped,
    GroupTaken,
    LagChanged,
)
from flexmarl.events.run_events import StepStarted
from flexmarl.events.serving_events import (
    Called,
    InstanceGrown,
    InstanceLost,
    InstanceReplaced,
    InstanceRetired,
    Loaded,
    Moved,
    MoveFailed,
)
from flexmarl.events.training_events import DevicesFreed, Published, Swapped
from flexmarl.orchestrator.settings import Mode
from flexmarl.records import InstanceId, RowState, WorkerId
from flexmarl.testing.faults.story import Life, Story, ended_by, group_of


def law_3_tokens_are_as_fresh_as_promised(story: Story) -> Iterator[str]:
    """Tokens are not older than docs/math.md allows, and no group is taken from outside the window.

    Synchronous modes: every token of an update was sampled at the version before it. Other modes: at most
    S + ceil((W - 1) / P) + N - 1 versions earlier, where at least every N-th update is published. With
    `updates: per_policy`: at most B + W - 2 other groups of its policy were trained in between. P is `batch.groups` and
    B = (S + 1) P; S and W are those of `lag_and_window`.
    """
    yield from _outside_the_window(story)
    if story.settings.mode.synchronous and not story.refills:
        yield from _of_other_steps(story)
    if story.per_policy:
        yield from _overtaken(story)
    bound = staleness_bound(story)
    for row in story.rows:
        if row.state is not RowState.TRAINED or row.settled_version is None:
            continue
        oldest = min(version for _, version in row.values["version_runs"])
        newest = max(version for _, version in row.values["version_runs"])
        lag = row.settled_version - 1 - oldest
        if bound is not None and lag > bound:
            yield f"{row.sample_id} was sampled at {oldest} and trained into {row.settled_version}: lag {lag} > {bound}"
        if newest >= row.settled_version:
            yield f"{row.sample_id} was sampled at {newest}, the version it was trained into or a later one"


def _of_other_steps(story: Story) -> Iterator[str]:
    """Reports rows, trained or not, that were sampled at another version than that at which their step began."""
    served = {event.step: event.versions for event in story.events if isinstance(event, StepStarted)}
    for row in story.rows:
        step = group_of(row.sample_id) // story.settings.batch.groups
        if row.version is not None and step in served:
            runs, expected = row.values["version_runs"], served[step][row.policy]
            if any(version != expected for _, version in runs):
                yield f"{row.sample_id} was sampled at {runs}, step {step} began with version {expected}"


def lag_and_window(story: Story) -> tuple[int, int | None]:
    """Returns S and W of the run's mode, as docs/math.md defines them. W is None if the mode has no window.

    A lag that is measured counts as the largest that the run had.
    """
    groups, pipeline, mode = story.settings.batch.groups, story.settings.pipeline, story.settings.mode
    if mode.synchronous:
        return 0, 1
    measured = max((event.lag for event in story.events if isinstance(event, LagChanged)), default=1)
    lag = 1 if mode is Mode.ONE_STEP_OFF else measured if pipeline.lag == "auto" else pipeline.lag
    windows = {
        Mode.ONE_STEP_OFF: groups,
        Mode.FIFO: 1,
        Mode.ASYNC: math.ceil(Decimal(str(pipeline.window)) * (lag + 1) * groups),
    }
    return lag, windows.get(mode)


def staleness_bound(story: Story) -> int | None:
    """Returns the most versions that a token may be late. None without a window, or if policies update on their own."""
    if story.per_policy:
        return None  # A batch that ends early also makes a version, so no bound on versions holds.
    publish = story.settings.pipeline.publish
    behind = 0 if publish.type == "eager" else publish.every - 1
    if story.settings.mode is Mode.ONE_STEP_OFF:
        return 1 + behind  # Its window does not slide within a step.
    lag, window = lag_and_window(story)
    return None if window is None else lag + math.ceil((window - 1) / story.settings.batch.groups) + behind


def _overtaken(story: Story) -> Iterator[str]:
    """Reports rows whose policy was trained on too many other groups between their sampling and their training."""
    lag, window = lag_and_window(story)
    if window is None:
        return
    bound = (lag + 1) * story.settings.batch.groups + window - 2
    sizes = {
        policy: {version: len({group_of(i) for ids in batches for i in ids}) for version, batches in updates.items()}
        for policy, updates in story.updates.items()
    }
    for row in story.rows:
        if row.state is RowState.TRAINED and row.settled_version is not None and row.policy in sizes:
            oldest = min(version for _, version in row.values["version_runs"])
            others = sum(n for version, n in sizes[row.policy].items() if oldest < version < row.settled_version)
            if others > bound:
                yield f"{row.sample_id} was sampled at {oldest}, and then {others} groups were trained, > {bound}"


def _outside_the_window(story: Story) -> Iterator[str]:
    """Reports groups taken without a reason, or from beyond the window. It begins at the oldest open group."""
    window = lag_and_window(story)[1]
    for number, life in enumerate(story.lives):
        untaken = set[int]()
        for event in life.events:
            if isinstance(event, GroupAdmitted):
                untaken.add(event.group)
            elif isinstance(event, GroupStopped):  # A group that held up others leaves the window before it ends.
                untaken.discard(event.group)
            elif isinstance(event, GroupTaken):
                head = min(untaken)
                if not event.because:
                    yield f"life {number}: group {event.group} was taken without a reason"
                if window is not None and event.group >= head + window:
                    yield f"life {number}: group {event.group} was taken, {head} is the head and the window {window}"
            untaken.difference_update([event.group] if isinstance(event, GroupTaken) else ended_by(event))


def law_4_nothing_is_held_twice(story: Story) -> Iterator[str]:
    """No more trainers than allowed are on devices, none while engines have them, no move takes a policy's last
    instance, no name is used twice."""
    for number, life in enumerate(story.lives):
        for because in (*_crowded_devices(story, life), *_two_tenants(story, life), *_bereft_policies(story, life)):
            yield f"life {number}: {because}"


def _crowded_devices(story: Story, life: Life) -> Iterator[str]:
    """Reports too many trainers on devices. One holds them from the start of a resume to the end of a suspend."""
    at_once = story.settings.process_groups.at_once or len(story.trained_policies)
    resident = set[str]()
    moments = [
        (event.began if event.direction == "resume" else event.ended, event.direction, event.process)
        for event in life.of(Swapped)
    ]
    for _, direction, process in sorted(moments, key=lambda moment: (moment[0], moment[1] == "resume")):
        (resident.add if direction == "resume" else resident.discard)(process)
        if len(resident) > at_once:
            yield f"{sorted(resident)} are on devices, process_groups.at_once is {at_once}"


def _two_tenants(story: Story, life: Life) -> Iterator[str]:
    """Reports trainers that are on devices while engines have them, in the mode in which both have the same."""
    if story.settings.mode is not Mode.COLOCATED:
        return
    engines, since, there = True, 0.0, set[str]()
    for event in life.of(Swapped, DevicesFreed):  # A swap is in the journal when it has ended.
        if isinstance(event, Swapped):
            if engines or event.began < since:
                yield f"{event.process} has its {event.direction} while engines have the devices"
            (there.add if event.direction == "resume" else there.discard)(event.process)
            continue
        engines, since = event.by == "trainers", event.ended
        if there:
            yield f"{sorted(there)} are on devices that the {event.by} have given up"


def _bereft_policies(story: Story, life: Life) -> Iterator[str]:
    """Reports moves of a policy's last instance, and names used twice. Lost instances that can be replaced count."""
    live, names = set(story.initial), Counter(story.initial)
    owed, losses = set[InstanceId](), Counter[str]()
    for event in life.of(InstanceLost, InstanceReplaced, InstanceGrown, InstanceRetired, Moved, MoveFailed):
        name, policy, joined = event.instance, event.instance.policy, None
        match event:
            case InstanceLost():
                losses[policy] += 1
                owed |= live & {name}
                live.discard(name)  # An instance that is lost during a move has a name that was never live.
            case InstanceReplaced():
                owed.discard(event.replaces)
                joined = name
            case InstanceGrown():
                joined = name
            case InstanceRetired():
                live.discard(name)
                if policy not in {one.policy for one in live | owed}:
                    yield f"{name} was retired, the last of its policy"
            case Moved():
                live.discard(name)
                joined = event.became
                replaceable = losses[policy] <= story.settings.pool.replacements
                if policy not in {one.policy for one in (live | owed if replaceable else live)}:
                    yield f"{name} was moved, the last of its policy"
            case _ if "was not moved" in event.because:
                live.discard(name)
                if "so it stays" in event.because:
                    joined = InstanceId(policy, -len(names))  # The event does not name its new id.
            case _:
                pass  # The move was refused, so nothing has changed.
        if joined is not None:
            live.add(joined)
            names[joined] += 1
            if names[joined] > 1:
                yield f"the name {joined} was used twice"


def law_10_versions_are_served_after_their_checksum(story: Story) -> Iterator[str]:
    """An instance answers only with versions whose checksum it has confirmed.

    In synchronous modes, no call of a policy is sent before all its instances hold the same weights. Without
    `pipeline.ahead`, no group is admitted before that either.
    """
    for number, life in enumerate(story.lives):
        for because in _unchecked_answers(life):
            yield f"life {number}: {because}"
        if story.settings.mode.synchronous:
            ahead = story.settings.pipeline.ahead
            for because in (*_early_calls(story, life), *(() if ahead else _early_admissions(story, life))):
                yield f"life {number}: {because}"


def _unchecked_answers(life: Life) -> Iterator[str]:
    """Reports answers with a version before the engine held weights with the trainer's published checksum."""
    for name, engine in life.engines.items():
        held: dict[tuple[str, int], float] = {}
        for at, policy, version, checksum in engine.loads:
            if checksum == life.trainers[policy].published.get(version):
                held.setdefault((policy, version), at)
        for at, request, generation in engine.answered:
            for run in generation.versions if request.policy in life.trainers else ():
                if held.get((request.policy, run.version), math.inf) > at:
                    yield f"{name} answered {generation.request_id} with version {run.version}, unchecked"


def _early_admissions(story: Story, life: Life) -> Iterator[str]:
    """Reports admissions while an instance, live before and serving after, did not hold the published weights."""
    last_sent = {event.process: event.began for event in life.of(Called)}
    live = set(map(WorkerId.engine, story.initial))
    held, published = dict[WorkerId, str](), dict[str, str]()
    for event in life.events:
        match event:
            case Called():
                live.add(event.process)
            case Loaded():
                held[event.process] = event.checksum
            case Published():
                published[event.policy] = event.checksum
            case GroupAdmitted():
                for process in sorted(live):
                    expected = published.get(process.policy)
                    serves = last_sent.get(process, -1.0) >= event.t
                    if serves and expected is not None and held.get(process) != expected:
                        yield f"group {event.group} was admitted while {process} held {held.get(process, 'nothing')}"


def _early_calls(story: Story, life: Life) -> Iterator[str]:
    """Reports calls sent while another instance of the policy, live before and serving after, held other weights."""
    held: dict[WorkerId, list[tuple[float, str]]] = defaultdict(list)
    sent: dict[WorkerId, list[float]] = defaultdict(list)
    for event in life.of(Loaded):
        held[event.process].append((event.t, event.checksum))
    for event in life.of(Called):
        sent[event.process].append(event.began)

    def holds(process: WorkerId, at: float) -> str:
        return next((checksum for t, checksum in reversed(held[process]) if t <= at), "nothing")

    initial = set(map(WorkerId.engine, story.initial))
    for event in life.of(Called):
        mine, began = event.process, event.began
        for other, times in sent.items():
            served = (other in initial or min(times) < began) and max(times) >= began
            if served and other.policy == mine.policy and holds(other, began) != holds(mine, began):
                yield f"a call was sent to {mine} at {began}, while {other} held {holds(other, began)}"


def law_12_queues_are_bounded(story: Story) -> Iterator[str]:
    """No more groups are active than there are slots, and no instance has more requests than `pool.max_running`."""
    settings = story.settings
    steps = lag_and_window(story)[0] + 1 + settings.pipeline.ahead
    slots, at_once = steps * settings.batch.groups, settings.pool.max_running
    yield from _crowded_rollout(story)
    for number, life in enumerate(story.lives):
        active, owing = set[int](), dict[int, set[str]]()
        for event in life.events:
            if isinstance(event, GroupAdmitted):
                active.add(event.group)
            active.difference_update(ended_by(event))
            if story.per_policy:
                active.difference_update(_served(life, event, owing))
            if len(active) > slots:
                yield f"life {number}: {len(active)} groups were active, there are {slots} slots"
                break
        for name, engine in life.engines.items():
            if at_once is not None and engine.most_running > at_once:
                yield f"life {number}: {name} was given {engine.most_running} requests, pool.max_running is {at_once}"


def _crowded_rollout(story: Story) -> Iterator[str]:
    """In mode microbatch, at most rollout.inter_query groups play and one waits. Skips deterministic and ahead runs."""
    settings = story.settings
    if settings.mode is not Mode.MICROBATCH or settings.deterministic or settings.pipeline.ahead:
        return
    for number, life in enumerate(story.lives):
        playing = set[int]()
        for event in life.events:
            if isinstance(event, GroupAdmitted):
                playing.add(event.group)
            elif isinstance(event, GroupReady | GroupFiltered | GroupFailed):
                playing.discard(event.group)
            if len(playing) > settings.rollout.inter_query + 1:
                yield f"life {number}: {len(playing)} groups played at once, of rollout.inter_query + 1"
                break


def _served(life: Life, event: Event, owing: dict[int, set[str]]) -> list[int]:
    """Returns groups whose policies have all been updated. `owing` has the policies that each group still waits for."""
    if isinstance(event, GroupReady):
        owing[event.group] = set(event.samples)
    if not isinstance(event, Published):
        return []
    policy = event.policy
    for ids in life.trainers[policy].updates.get(event.version, {}).values():
        for sample_id in ids:
            owing[group_of(sample_id)].discard(policy)
    return [group for group, policies in owing.items() if not policies]
