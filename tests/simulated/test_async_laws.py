"""The laws of the system in the asynchronous modes, on the production loops in virtual time, under random faults.

What they add to the synchronous ones (test_laws.py): a bound on staleness, the window, and life with stragglers.
"""

from collections import Counter, defaultdict
from typing import Any

import pytest
from hypothesis import strategies as st

from flexmarl.events.group_events import GroupAdmitted, GroupStopped, GroupTaken, LagChanged
from flexmarl.events.run_events import StepEnded, StepStarted
from flexmarl.records import RowState
from flexmarl.testing.faults.story import Story, ended_by
from tests.simulated.conftest import (
    FAULTS,
    MODES,
    Schedule,
    asynchronous,
    examples,
    keep_every_law,
    pipelines,
    played,
)


def keep_every_law_in_any_mode(
    *happened: str, num: int = 30, look: Any = lambda story: None, **pipeline: object
) -> None:
    keep_every_law(
        *happened,
        num=num,
        schedules=asynchronous,
        look=look,
        mode=st.sampled_from(MODES),
        steps=4,
        pipeline=pipelines.map(lambda drawn: {**drawn, **pipeline}),
    )


def test_every_law_holds_whatever_happens() -> None:
    keep_every_law_in_any_mode(
        *FAULTS, "group_retried", "group_failed", "group_filtered", "group_expired", "trained", "expired"
    )


@examples(10, 30)
def test_every_law_holds_where_policies_update_together_and_rollout_is_ahead(num: int) -> None:
    def look(story: Story) -> None:
        for row in story.rows:
            if row.state is RowState.TRAINED:
                assert row.settled_version
                staleness[row.settled_version - 1 - min(version for _, version in row.values["version_runs"])] += 1
        active, lag = set[int](), story.settings.pipeline.lag
        for event in story.events:
            if isinstance(event, GroupAdmitted):
                active.add(event.group)
                most[lag] = max(most[lag], len(active) / story.settings.batch.groups)
            active.difference_update(ended_by(event))

    staleness = Counter[int]()
    most: defaultdict[int, float] = defaultdict(float)
    keep_every_law_in_any_mode("trained", num=num, look=look, updates="together", lag=2)
    assert staleness[0]
    assert staleness[1]
    assert staleness[2], "nothing as old as the bound was trained (law 3)"
    assert min(staleness) == 0
    assert most[2] > 2, "rollout was never more than a step ahead (law 12)"


@examples(10, 30)
def test_every_law_holds_where_groups_are_taken_before_the_oldest_one(num: int) -> None:
    def look(story: Story) -> None:
        waiting = list[int]()
        for event in story.events:
            if isinstance(event, GroupAdmitted):
                waiting.append(event.group)
            elif isinstance(event, GroupTaken):
                beyond_head[story.settings.mode.value == "fifo"] += event.group != waiting[0]
            gone = [event.group] if isinstance(event, GroupTaken | GroupStopped) else ended_by(event)
            waiting = [group for group in waiting if group not in gone]

    beyond_head = Counter[bool]()
    keep_every_law_in_any_mode("group_taken", num=num, look=look, head_deadline_s=1800.0)
    assert beyond_head[True] == 0
    assert beyond_head[False]


@examples(10, 30)
def test_every_law_holds_while_the_lag_is_measured(num: int) -> None:
    """Staleness, slots and window keep the bounds of the largest lag so far, and no lag is above `max_lag`."""

    def look(story: Story) -> None:
        lag, most = 1, story.settings.pipeline.max_lag
        for event in story.events:
            if isinstance(event, StepStarted) and event.step == 0:
                lag = 1
            elif isinstance(event, LagChanged):
                assert event.before == lag
                assert 1 <= event.lag <= most
                assert "all but one task in a thousand" in event.because
                changed["up" if event.lag > lag else "down"] += 1
                lag = event.lag

    changed = Counter[str]()
    keep_every_law(
        "trained",
        "lag_changed",
        num=num,
        schedules=asynchronous,
        look=look,
        mode=st.sampled_from(["async", "fifo", "greedy"]),
        steps=8,
        pipeline=pipelines.map(lambda drawn: {**drawn, "lag": "auto", "max_lag": 3, "head_deadline_s": 1800.0}),
    )
    assert changed["up"]


def test_the_same_seed_gives_the_same_journal_in_every_mode() -> None:
    for mode in MODES:
        schedule = Schedule(seed=5, mode=mode, groups=3, raising=0.15, sample_s=0.3)
        one, two = played(schedule, steps=3), played(schedule, steps=3)
        assert one.events.all == two.events.all
        assert one.outcome


@pytest.mark.parametrize("updates", ["together", "per_policy"])
def test_every_mode_makes_the_number_of_steps_asked_for(updates: str) -> None:
    for mode in MODES:
        run = played(Schedule(mode=mode, sample_s=0.3), steps=5, pipeline={"updates": updates})
        assert run.outcome is not None
        assert len(run.events.of(StepEnded)) == run.outcome.steps == 5
        assert sorted(run.metrics) == list(range(6))
