"""Laws of samples: what is trained, from what, and with which credit."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from flexmarl.agents.seeds import context_hash
from flexmarl.experience.interface import Row
from flexmarl.records import FinishReason, RowState
from flexmarl.testing.faults.story import Story, group_of

GOOD = (FinishReason.STOP, FinishReason.LENGTH)


def law_5_every_ready_row_is_in_one_update(story: Story) -> Iterator[str]:
    """What trainers accumulated into the updates that count is what the rows say, each exactly once."""
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
    if story.finished:
        yield from _weights(story, list(trained.values()))


def _weights(story: Story, trained: list[Row]) -> Iterator[str]:
    """The weight that these rows give, against the trainer's own: its gradient is the mean of advantage over tokens."""
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


def law_8_credit_compares_within_a_task(story: Story) -> Iterator[str]:
    """A row's tags name its group's task, equal context hashes mean equal contexts, and advantages are its group's."""
    contexts: dict[tuple[str, str], bytes] = {}
    compared: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in story.rows:
        if row.version is None:
            continue
        tags, prompt = row.values["tags"], row.values["prompt_ids"]
        admitted = [event["task"] for event in story.groups[group_of(row.sample_id)].admitted]
        if tags["task"] not in admitted or not row.sample_id.startswith(tags["task"] + "_"):
            yield f"{row.sample_id} is of task {tags['task']}, its group of {admitted}"
        if tags["context_hash"] != context_hash(row.policy, prompt):
            yield f"{row.sample_id}: its context hash is not that of its prompt"
        if contexts.setdefault((row.policy, tags["context_hash"]), prompt.tobytes()) != prompt.tobytes():
            yield f"{row.sample_id}: another context has the same hash"
        if "advantage" in row.values:
            compared[group_of(row.sample_id), row.agent].append(row)
    for (group, agent), rows in compared.items():
        mean = sum(row.values["reward"] for row in rows) / len(rows)
        if len(rows) > 1 and any(
            (row.values["advantage"] > 1e-9) != (row.values["reward"] > mean + 1e-9) for row in rows
        ):
            yield f"group {group}, {agent}: advantages do not follow from its own rewards"


def law_11_what_failed_is_not_trained(story: Story) -> Iterator[str]:
    """Training rows are whole answers with a reward; a failed row has none, and says why it failed."""
    good = {
        generation.request_id
        for life in story.lives
        for engine in life.engines.values()
        for _, _, generation in engine.answered
        if generation.finish in GOOD
    }
    failed_episodes = {row.sample_id.rpartition("_")[2] for row in story.rows if row.state is RowState.FAILED}
    for row in story.rows:
        if row.state is RowState.FAILED and ("reward" in row.values or not row.reason):
            yield f"{row.sample_id} failed, with reward {row.values.get('reward')} and reason {row.reason!r}"
        if row.state is not RowState.TRAINED:
            continue
        if row.values["finish"] not in GOOD or row.sample_id not in good:
            yield f"{row.sample_id} was trained, but no engine ended it well"
        if "reward" not in row.values:
            yield f"{row.sample_id} was trained without a reward"
        if row.sample_id.rpartition("_")[2] in failed_episodes:
            yield f"{row.sample_id} was trained, of an episode that failed"
        if row.policy not in story.schedule.trained:
            yield f"{row.sample_id} was trained, of a frozen policy"
