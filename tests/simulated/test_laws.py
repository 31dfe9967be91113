"""The laws of the system in the synchronous modes, on the production loops in virtual time, under random faults.

The laws are those of `flexmarl.testing.faults`, all of them on every run; each test is a kind of run in which some of
them are tried hardest.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from flexmarl.events.group_events import GroupAdmitted, GroupFailed, GroupFiltered, GroupReady
from flexmarl.records import FinishReason, RowState
from flexmarl.testing.faults.story import Story
from tests.simulated.conftest import FAULTS, Schedule, examples, keep_every_law, many, played, schedules
from tests.simulated.stories import story_of

ENDINGS = ("group_retried", "group_failed", "group_filtered", "group_ready", "trained")


def fixed(**values: object):
    """Random schedules, but for these values."""
    return schedules.map(lambda schedule: replace(schedule, **values))  # type: ignore[arg-type]


def test_every_law_holds_whatever_happens_to_episodes_calls_and_engines() -> None:
    def look(story: Story) -> None:
        for engine in story.lives[0].engines.values():
            tokens.update(a.generation.finish for a in engine.answered if len(a.generation.response_ids))

    tokens = Counter[FinishReason]()
    keep_every_law(*FAULTS, *ENDINGS, "published", "update_skipped", look=look)
    assert tokens[FinishReason.ABORT], "no example had an aborted call with tokens (law 13)"
    assert tokens[FinishReason.ERROR], "no example had a failed call with tokens (law 13)"


@pytest.mark.parametrize("mode", ["sync", "microbatch"])
def test_every_law_holds_in_each_mode_with_remainders_of_micro_batches(mode: str) -> None:
    def look(story: Story) -> None:
        for policy, updates in story.updates.items():
            if story.settings.policies[policy].training.micro_batch > 1:
                remainders.update(len(ids) for batches in updates.values() for ids in batches)

    remainders = Counter[int]()
    keep_every_law(*FAULTS, "trained", "group_filtered", schedules=fixed(mode=mode), look=look)
    assert remainders[1], "no step ended with a single sample left over (law 5)"


@examples(12, 30)
def test_every_law_holds_where_credit_is_centred(num: int) -> None:
    """Had any row been compared with another task's, the advantages of a group would not add up to 0 (law 8)."""

    def look(story: Story) -> None:
        spread.extend(row.values["advantage"] for row in story.rows if row.state is RowState.TRAINED)

    spread: list[float] = []
    keep_every_law("trained", "group_retried", "failed", num=num, schedules=fixed(estimator="drmas"), look=look)
    assert max(spread) > 0.4, "no example had rewards that differ"


@examples(12, 30)
def test_every_law_holds_where_a_slow_store_slows_the_feed(num: int) -> None:
    def look(story: Story) -> None:
        playing = set[int]()
        for event in story.events:
            if isinstance(event, GroupAdmitted):
                playing.add(event.group)
            elif isinstance(event, GroupReady | GroupFiltered | GroupFailed):
                playing.discard(event.group)
            limit = story.settings.rollout.inter_query
            most[limit] = max(most[limit], len(playing))

    most = Counter[int]()
    slow = fixed(store_s=3.0, groups=6, mode="microbatch", deterministic=False)
    keep_every_law("trained", num=num, schedules=slow, look=look)
    assert most[1] == 2, "the bound was not reached, so it was not tested (law 12)"


def test_in_deterministic_mode_the_same_micro_batches_are_trained_at_any_speed() -> None:
    @settings(many, max_examples=10)
    @given(schedule=schedules)
    def on_any(schedule: Schedule) -> None:
        schedule = replace(schedule, deterministic=True, stuck=0.0, slow_calls=0.0, engine_lost_at=None)
        other = replace(
            schedule, store_s=0.7 - 0.7 * bool(schedule.store_s), sample_s=1.0, inter_query=5 - schedule.inter_query
        )
        one, two = story_of(played(schedule)), story_of(played(other))
        assert one.updates == two.updates
        for policy, trainer in one.lives[0].trainers.items():
            assert trainer.weight == two.lives[0].trainers[policy].weight
        seen["orders"] += orders(one) != orders(two)
        seen["batches"] += sum(len(batches) for of_policy in one.updates.values() for batches in of_policy.values())

    seen: Counter[str] = Counter()
    on_any()
    assert seen["orders"], "groups never finished in another order: nothing was tested"
    assert seen["batches"] > 20


def orders(story: Story) -> list[str]:
    """Sample ids in the order in which engines answered."""
    return [a.request.request_id for engine in story.lives[0].engines.values() for a in engine.answered]
