"""The laws of windowed FIFO, over random schedules with failures, retries, filters, expiries and restarts."""

import random
from dataclasses import replace

import pytest

from flexmarl.records import GroupId
from flexmarl.rollout.admission import AdmissionLaw
from tests.unit.experience.schedules import Schedule

SCHEDULES = 10_000


def test_in_ten_thousand_random_schedules_no_law_of_the_window_is_broken() -> None:
    """I1 inside the window, I2 the oldest first, I3 the bound, I4 nobody waits in vain, I5 every group ends once."""
    seen: set[str] = set()
    reached = 0
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        groups, lag = rng.randint(1, 4), rng.randint(0, 2)
        window = rng.choice([1, 2, rng.randint(1, 2 * (lag + 1) * groups), None])
        law = AdmissionLaw(groups=groups, lag=lag, window=window)
        if rng.random() < 0.2:
            law = AdmissionLaw(groups=groups, lag=lag, window=groups, steps_in_order=True)
        law = replace(law, unpublished=rng.choice([0, 0, 1, 3]))
        schedule = Schedule(law, rng, weightless=0.03)
        try:
            schedule.run(rng.randint(20, 160))
        except AssertionError as broken:
            raise AssertionError(f"seed {seed}, {schedule.law}: {broken}") from broken
        seen |= schedule.seen
        reached += schedule.largest_lag == schedule.law.max_staleness
    assert seen == {"done", "failed", "filtered", "weightless", "expired", "restarted", "deferred"}
    assert reached > SCHEDULES // 20, "schedules that never come near the bound prove little"


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 7, 11])
@pytest.mark.parametrize("unpublished", [0, 1, 3])
def test_a_group_that_everyone_may_overtake_is_trained_exactly_as_late_as_the_bound_allows(
    groups: int, lag: int, window: int, unpublished: int
) -> None:
    law = AdmissionLaw(groups=groups, lag=lag, window=window, unpublished=unpublished)
    schedule = Schedule(law, random.Random(0), defers=True)
    for _ in range(law.slots):
        schedule.admit()
    for _ in range(unpublished):  # Then the straggler is admitted at a version that is as old as the law allows.
        for group in sorted(schedule.books.open)[:groups]:
            for _ in ("begins", "ends"):
                schedule.play("done", GroupId(group))
        schedule.consume()
        schedule.publish()
        for _ in range(groups):
            schedule.admit()
    straggler = GroupId(max(schedule.books.open))
    while straggler in schedule.books.open:
        others = sorted(schedule.books.open - schedule.books.done - {straggler})
        for group in others:
            for _ in ("begins", "ends"):
                schedule.play("done", GroupId(group))
        before = len(schedule.books.open)
        schedule.consume()
        schedule.publish()
        while schedule.admission.may_admit().allowed:
            schedule.admit()
        if not others and len(schedule.books.open) == before:
            for _ in ("begins", "ends"):
                schedule.play("done", straggler)
            schedule.consume()
    assert schedule.largest_lag == law.max_staleness


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_where_steps_are_in_order_a_straggler_is_trained_as_late_as_the_lag_and_not_later(lag: int) -> None:
    schedule = Schedule(AdmissionLaw(groups=2, lag=lag, window=2, steps_in_order=True), random.Random(0))
    while schedule.admission.may_admit().allowed:
        schedule.admit()
    youngest = max(schedule.books.open)
    for group in [*sorted(schedule.books.open - {youngest}), youngest]:
        for _ in ("begins", "ends"):
            schedule.play("done", GroupId(group))
        schedule.consume()
        schedule.publish()
    assert schedule.largest_lag == lag == schedule.law.max_staleness


def test_without_a_window_a_straggler_has_no_bound() -> None:
    law = AdmissionLaw(groups=1, lag=1, window=None)
    schedule = Schedule(law, random.Random(0))
    schedule.admit()
    for _ in range(50):
        schedule.admit()
        for _ in ("begins", "ends"):
            schedule.play("done", GroupId(max(schedule.books.open)))
        schedule.consume()
        schedule.publish()
    for _ in ("begins", "ends"):
        schedule.play("done", GroupId(0))
    schedule.consume()
    assert schedule.largest_lag == 50
