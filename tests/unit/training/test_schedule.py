"""Learning rates by hand."""

import pytest
from pydantic import ValidationError

from flexmarl.training.settings import ScheduleSettings


def test_a_constant_schedule_is_constant() -> None:
    assert [ScheduleSettings().factor(i) for i in (0, 1, 10**6)] == [1.0] * 3


def test_warm_up_reaches_the_full_rate_and_a_line_ends_at_its_minimum() -> None:
    line = ScheduleSettings(type="linear", warmup_steps=2, decay_steps=6, min_ratio=0.2)
    assert [line.factor(i) for i in (0, 1, 2, 4, 6, 99)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2])


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    cosine = ScheduleSettings(type="cosine", decay_steps=10, min_ratio=0.1)
    assert [cosine.factor(i) for i in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"type": "linear"}, "decay_steps is None with type 'linear'"),
        ({"type": "cosine", "warmup_steps": 5, "decay_steps": 5}, "more than warmup_steps"),
        ({"decay_steps": 5}, "type is 'constant'; use 'linear' or 'cosine'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScheduleSettings(**values)
