"""The laws where engines and trainers share devices, where episodes train alone, and where rollout is ahead of updates.

Under random faults and kills.
"""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.records import ROW_TERMINAL, RowState
from tests.simulated.test_laws import FAULTS, Schedule, Witness, many, played, schedules, trained_ids_of, whole_steps
from tests.simulated.test_resume import check_equal, lives, undisturbed

pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
STREAMED = {"estimator": {"type": "reinforce"}, "filter": None, "ready": "trajectory"}
KINDS = {
    "colocated": ("colocated", {}),
    "streamed": ("microbatch", {"credit": STREAMED}),
    "ahead": ("microbatch", {"pipeline": {"ahead": True}}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_and_rows_end_once_and_every_ready_sample_is_trained_at_its_own_version(kind: str) -> None:
    mode, sections = KINDS[kind]
    witness = Witness()

    @many
    @given(schedule=schedules)
    def on_any(schedule: Schedule) -> None:
        run = played(
            replace(schedule, mode=mode, deterministic=schedule.deterministic and kind != "streamed"), **sections
        )
        witness.of(run)
        ended = [event["group"] for name in ("group_failed", "group_filtered") for event in run.events(name)]
        ended += [group for event in run.events("step_ended") for group in event["trained"]]
        assert len(set(ended)) == len(ended)
        if whole_steps(run) == 2:
            assert sorted(ended) == list(range(2 * schedule.groups))
            assert {row.state for row in run.rows()} <= ROW_TERMINAL
        made_ready: Counter[str] = Counter()
        for event in run.events("group_ready"):
            made_ready.update(event["samples"])
        for policy, trainer in run.trainers.items():
            trained = [row for row in run.rows() if row.policy == policy and row.state is RowState.TRAINED]
            assert all(row.version is not None and row.settled_version == row.version + 1 for row in trained)
            if whole_steps(run) == 2:
                used = trained_ids_of(trainer)
                assert len(used) == len(set(used)) == len(trained) == made_ready[policy]

    on_any()
    witness.demand(*FAULTS, "trained", "group_retried", "group_failed")


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
