"""The laws where engines and trainers share devices, where episodes train alone, and where rollout is ahead of updates.

Under random faults and kills.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.simulated.conftest import FAULTS, Schedule, check_equal, keep_every_law, lives, many, schedules, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
STREAMED = {"estimator": {"type": "reinforce"}, "filter": None, "ready": "trajectory"}
KINDS = {
    "colocated": ("colocated", {}),
    "streamed": ("microbatch", {"credit": STREAMED}),
    "ahead": ("microbatch", {"pipeline": {"ahead": True}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_law_holds(kind: str) -> None:
    mode, sections = KINDS[kind]

    def of_kind(schedule: Schedule) -> Schedule:
        return replace(schedule, mode=mode, deterministic=schedule.deterministic and kind != "streamed")

    happened = (*FAULTS, "trained", "group_retried", "group_failed")
    keep_every_law(*happened, schedules=schedules.map(of_kind), **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_killed_again_and_again_it_ends_as_if_undisturbed(kind: str) -> None:
    mode, sections = KINDS[kind]
    seen = Counter[str]()

    @settings(many, max_examples=15)
    @given(schedule=schedules, kills=st.lists(st.integers(1, 120), min_size=1, max_size=2))
    def on_any(schedule: Schedule, kills: list[int]) -> None:
        # Of two calls that are aborted at once, a slow store decides which one is the episode's reason.
        schedule = replace(schedule, engine_lost_at=None, slow_calls=0.0, mode=mode)
        schedule = replace(schedule, deterministic=schedule.deterministic and kind != "streamed")
        # Saved at rest: rollout that is ahead is killed only where there is no rest between two steps.
        lived = lives(schedule, kills, checkpoint={"every": 2 if kind == "ahead" else 1}, **sections)
        seen["kills"] += len(lived) - 1
        check_equal(lived, undisturbed(schedule, **sections), schedule)

    on_any()
    assert seen["kills"] > 10
