"""Decides which laws a story breaks. Each law recomputes its facts from journals, rows and what parts remember.

Laws of samples say which rows are trained, their contents and their credit; laws of serving are in laws_of_serving.py.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from flexmarl.agents.context import context_hash
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
from flexmarl.events.group_events import EpisodeAccount, EpisodeFailed, EpisodeLost, GroupExpired
from flexmarl.events.run_events import FaultStruck, Resumed, StepEnded
from flexmarl.events.serving_events import InstanceLost
from flexmarl.experience.interface import Row
from flexmarl.records import (
    ROW_TERMINAL,
    EpisodeId,
    FinishReason,
    IntArray,
    PolicyName,
    Purpose,
    RowState,
    SampleId,
    split_sample_id,
)
from flexmarl.tasks import SourceExhausted
from flexmarl.testing.faults.fault_plan import FaultKind
from flexmarl.testing.faults.laws_of_serving import (
    law_3_tokens_are_as_fresh_as_promised,
    law_4_nothing_is_held_twice,
    law_10_versions_are_served_after_their_checksum,
    law_12_queues_are_bounded,
)
from flexmarl.testing.faults.story import Life, Story, group_of
from flexmarl.testing.faults.watched import Answered

Law = Callable[[Story], Iterator[str]]
ROUNDED_S = 1e-6
"""The moments of events are rounded to it."""
DEMANDED: Mapping[FaultKind, tuple[type[FlexmarlError], ...]] = {
    FaultKind.LOST_TRAINER: (TrainingError, WorkerError),
    FaultKind.LOST_CACHE: (TrainingError, WorkerError),
    FaultKind.STORE_FAILURE: (StoreError,),
    FaultKind.TORN_CHECKPOINT: (CheckpointError,),
    FaultKind.SOURCE_EXHAUSTED: (SourceExhausted,),
    FaultKind.LOST_INSTANCE: (EngineError, EpisodeError),
    FaultKind.LOST_NODE: (EngineError, EpisodeError),
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
    for group, one in sorted(story.groups.items()):
        if len(one.admitted) != 1:
            yield f"group {group} was admitted {len(one.admitted)} times"
        if len(one.ends) > 1 or (story.finished and not one.ends):
            yield f"group {group} ended {len(one.ends)} times: {one.ends}"
    if sorted(story.groups) != list(range(len(story.groups))):
        yield f"groups {sorted(story.groups)} have gaps"
    yield from _groups_of_steps(story)
    ends = {group: one.ends[0] for group, one in story.groups.items() if one.ends}
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


GOOD = (FinishReason.STOP, FinishReason.LENGTH)
PER_AGENT = ("default", "drmas")
"""Estimators that compare a row with the mean reward of its own agent."""


def law_5_every_ready_row_is_in_one_update(story: Story) -> Iterator[str]:
    """Every trained row is in exactly one update, and every sample in an update is a trained row."""
    used = Counter(story.trained())
    for sample_id, times in used.items():
        if times != 1:
            yield f"{sample_id} is in {times} updates"
    trained = {row.sample_id: row for row in story.rows if row.state is RowState.TRAINED}
    if strays := sorted(used.keys() ^ trained.keys()):
        yield f"trained by trainers or by rows, not by both: {strays[:3]} and {len(strays[3:])} more"
    for policy, updates in story.updates.items():
        for version, batches in updates.items():
            wrong = [i for ids in batches for i in ids if i in trained and trained[i].settled_version != version]
            if wrong:
                yield f"{wrong[0]} went into version {version} of {policy}, its row says otherwise"
    yield from _large_batches(story)
    if story.finished:
        yield from _weights(story, list(trained.values()))
        yield from _versions(story, list(trained.values()))
        yield from _ready_rows(story, list(trained.values()))


def _large_batches(story: Story) -> Iterator[str]:
    for policy, updates in story.updates.items():
        most = story.settings.policies[policy].training.micro_batch
        for version, batches in updates.items():
            if large := [ids for ids in batches if len(ids) > most]:
                yield f"version {version} of {policy}: a micro-batch has {len(large[0])} samples, more than {most}"


def _versions(story: Story, trained: list[Row]) -> Iterator[str]:
    """Every version of a trainer has rows that were trained into it, and no row names another version."""
    for policy, trainer in story.lives[-1].trainers.items():
        settled = {row.settled_version or 0 for row in trained if row.policy == policy}
        if settled != set(range(1, trainer.version + 1)):
            yield f"{policy} is at version {trainer.version}, its rows were trained into {sorted(settled)}"


def _ready_rows(story: Story, trained: list[Row]) -> Iterator[str]:
    """In a trained group, as many rows of each policy are trained as credit made ready."""
    found = Counter((group_of(row.sample_id), row.policy) for row in trained)
    for group, one in story.groups.items():
        if one.ends == ["trained"]:
            for policy, ready in one.ready.items():
                if (entered := found[group, PolicyName(policy)]) != ready:
                    yield f"group {group}: {ready} rows of {policy} were ready, {entered} were trained"


def _weights(story: Story, trained: list[Row]) -> Iterator[str]:
    """A trainer's weight is the one that its rows give: each update adds the mean advantage over weighted tokens."""
    sums: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in trained:
        tokens = row.values["weight"] * len(row.values["response_ids"])
        assert row.settled_version is not None
        of_update = sums[row.policy, row.settled_version]
        of_update[0] += tokens * row.values["advantage"]
        of_update[1] += tokens
    for policy, trainer in story.lives[-1].trainers.items():
        expected = sum(gradient / tokens for (of, _), (gradient, tokens) in sums.items() if of == policy and tokens)
        if abs(trainer.weight - expected) > 1e-9:
            yield f"the weight of {policy} is {trainer.weight}, its rows give {expected}"


def law_7_rows_hold_what_engines_sampled(story: Story) -> Iterator[str]:
    """A row has, to the last bit, the prompt, ids and log-probabilities of the engines that answered its call."""
    prompts: dict[str, IntArray] = {}
    answers: dict[str, list[Answered]] = defaultdict(list)
    for life in story.lives:
        if story.programs:  # One that plays an episode again may ask for something else.
            again = {_episode(request.request_id) for engine in life.engines.values() for request in engine.asked}
            for kept in (prompts, answers):
                for name in [name for name in kept if _episode(name) in again]:
                    del kept[name]
        for engine in life.engines.values():
            for request in engine.asked:
                prompts[request.request_id] = request.prompt_ids[: len(request.prompt_ids) - request.offset]
            for answered in engine.answered:
                answers[answered.request.request_id].append(answered)
    for row in story.rows:
        if row.sample_id in prompts and not _same(row.values["prompt_ids"], prompts[row.sample_id]):
            yield f"{row.sample_id}: its prompt is not the one that its engine was asked"
        if row.version is None:
            continue
        num_tokens = len(row.values["response_ids"])
        if num_tokens not in {a.request.offset + len(a.generation.response_ids) for a in answers[row.sample_id]}:
            yield f"{row.sample_id} has {num_tokens} tokens, no engine's answer ended there"
        for answered in answers[row.sample_id]:
            if strays := [name for name in _SAMPLED if not _agrees(row, answered, name)]:
                yield f"{row.sample_id}: its {', '.join(strays)} are not those that an engine sampled"


def _episode(request: str) -> str:
    return split_sample_id(SampleId(request))[2]


_SAMPLED = ("response_ids", "logprobs", "raw_logprobs")


def _agrees(row: Row, answered: Answered, name: str) -> bool:
    """True if row and answer are equal where both have tokens. Only an answer that was given up has another end."""
    kept, sampled, begin = row.values[name], getattr(answered.generation, name), answered.request.offset
    both = max(0, min(len(kept) - begin, len(sampled)))
    return _same(kept[begin : begin + both], sampled[:both])


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def law_8_credit_compares_within_a_task(story: Story) -> Iterator[str]:
    """A row is of the task of its group, equal context hashes mean equal contexts, and advantages fit the group."""
    contexts: dict[tuple[str, str], bytes] = {}
    compared: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in story.rows:
        if row.version is None:
            continue
        (task, *_), hashed = split_sample_id(row.sample_id), row.values["context_hash"]
        prompt = row.values["prompt_ids"]
        admitted = [event.task for event in story.groups[group_of(row.sample_id)].admitted]
        if task not in admitted:
            yield f"{row.sample_id} is of task {task}, its group of {admitted}"
        if hashed != context_hash(row.policy, prompt):
            yield f"{row.sample_id}: its context hash is not that of its prompt"
        if contexts.setdefault((row.policy, hashed), prompt.tobytes()) != prompt.tobytes():
            yield f"{row.sample_id}: another context has the same hash"
        if "advantage" in row.values:
            compared[group_of(row.sample_id), row.agent].append(row)
    for (group, agent), rows in compared.items() if story.estimator in PER_AGENT else ():
        mean = sum(row.values["reward"] for row in rows) / len(rows)
        if len(rows) > 1 and any(
            (row.values["advantage"] > 1e-9) != (row.values["reward"] > mean + 1e-9) for row in rows
        ):
            yield f"group {group}, {agent}: advantages do not follow from its own rewards"
        trained = [row.values["advantage"] for row in rows if row.state is RowState.TRAINED]
        if len(trained) > 1 and abs(sum(trained)) > 1e-9 and story.estimator == "drmas":
            yield f"group {group}, {agent}: the sum of its advantages is {sum(trained)}, not 0"


def law_11_what_failed_is_not_trained(story: Story) -> Iterator[str]:
    """Every trained row is a whole answer with a reward. A failed row has no reward, and a reason.

    A failed call fails its episode, but for calls of programs, who may ask for something else.
    """
    good = {
        generation.request_id
        for life in story.lives
        for engine in life.engines.values()
        for answered in engine.answered
        if (generation := answered.generation).finish in GOOD
    }
    failed_episodes = {split_sample_id(row.sample_id)[2] for row in story.rows if row.state is RowState.FAILED}
    failed_episodes -= {event.episode for life in story.lives for event in life.of(EpisodeAccount)}
    failed_episodes |= {event.episode for event in story.lives[-1].of(EpisodeFailed)}
    for row in story.rows:
        if row.state is RowState.FAILED and ("reward" in row.values or not row.reason):
            yield f"{row.sample_id} failed, with reward {row.values.get('reward')} and reason {row.reason!r}"
        if row.state is not RowState.TRAINED:
            continue
        if row.values["finish"] not in GOOD or row.sample_id not in good:
            yield f"{row.sample_id} was trained, but no engine ended it well"
        if "reward" not in row.values:
            yield f"{row.sample_id} was trained without a reward"
        if split_sample_id(row.sample_id)[2] in failed_episodes:
            yield f"{row.sample_id} was trained, of an episode that failed"
        if row.policy not in story.trained_policies:
            yield f"{row.sample_id} was trained, of a frozen policy"


def law_13_every_sampled_token_is_accounted_for(story: Story) -> Iterator[str]:
    """Every token that an engine sampled is in a row that has ended. A failed row has a reason.

    This holds too for calls that were aborted, that failed, or that their workflow left. Tokens of lost engines, of
    earlier lives, of evaluations, and of plays that were lost with their rollout worker are not checked.
    """
    last = story.lives[-1]
    if not story.finished:
        return
    rows = {row.sample_id: row for row in story.rows}
    lost = {event.instance for event in last.of(InstanceLost)}
    deleted = {event.episode: event.t + ROUNDED_S for event in last.of(EpisodeLost)}  # The last time counts.
    for name, engine in last.engines.items():
        for at, request, generation in engine.answered if name not in lost else ():
            end = request.offset + len(generation.response_ids)
            if not len(generation.response_ids) or request.purpose is Purpose.EVALUATION:
                continue
            if at <= deleted.get(EpisodeId(split_sample_id(request.request_id)[2]), -math.inf):
                continue
            row = rows.get(SampleId(request.request_id))
            if row is None or row.state not in ROW_TERMINAL:
                yield f"{request.request_id} was sampled by {name}, its row is {row and row.state}"
            elif row.state is RowState.FAILED and not row.reason:
                yield f"{request.request_id} failed without a reason"
            elif len(row.values.get("response_ids", ())) < end:
                yield f"{request.request_id}: {name} sampled {end} tokens, its row has fewer"
    yield from _accounts(story)


def _accounts(story: Story) -> Iterator[str]:
    """The account of an episode that programs played is the sum of its parts, and of its rows; what nobody read is not
    trained."""
    last = story.lives[-1]
    rows, trained, turns = Counter[EpisodeId](), Counter[EpisodeId](), Counter[EpisodeId]()
    for row in story.rows:
        episode, tokens = EpisodeId(split_sample_id(row.sample_id)[2]), len(row.values.get("response_ids", ()))
        rows[episode] += tokens
        if row.state is RowState.TRAINED:
            trained[episode] += tokens
            turns[episode] += 1
    replayed = {event.episode for event in last.of(EpisodeLost)}
    for account in last.of(EpisodeAccount):
        parts = account.delivered, sum(account.undelivered.values()), sum(account.failed.values())
        if sum(parts) != account.sampled:
            yield f"{account.episode}: {account.sampled} tokens were sampled, its account has {parts}"
        if account.purpose is Purpose.EVALUATION or account.episode in replayed:
            continue
        if rows[account.episode] != account.sampled:
            yield f"{account.episode}: {account.sampled} tokens were sampled, its rows have {rows[account.episode]}"
        if trained[account.episode] > account.delivered:
            yield f"{account.episode}: {account.delivered} tokens were read, {trained[account.episode]} are trained"
        if turns[account.episode] > last.read.get(account.episode, 0):
            yield f"{account.episode}: {turns[account.episode]} replies are trained, and its program has read fewer"


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
