"""Every mode is a setting of one admission law."""

import pytest

from flexmarl.orchestrator.settings import Mode, PipelineSettings, law_of


@pytest.mark.parametrize(
    ("mode", "slots", "window", "bound"),
    [
        ("sync", 8, 1, 0),
        ("microbatch", 8, 1, 0),
        ("colocated", 8, 1, 0),
        ("one_step_off", 16, 8, 1),
        ("async", 24, 8, 3),  # 0.3 of 24 slots, rounded up: S + ceil(7 / 8)
        ("fifo", 24, 1, 2),
        ("greedy", 24, None, None),
    ],
)
def test_slots_window_and_bound_of_every_mode_at_eight_groups_a_step_and_lag_two(mode, slots, window, bound):
    law = law_of(Mode(mode), PipelineSettings(lag=2), groups=8)
    assert (law.slots, law.window, law.max_staleness) == (slots, window, bound)


def test_a_window_that_is_a_whole_number_of_groups_is_not_one_more():
    assert law_of(Mode.ASYNC, PipelineSettings(lag=2, window=0.4), groups=5).window == 6
