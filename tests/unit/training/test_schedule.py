"""Learning rates by hand, and against those of transformers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import get_scheduler

from flexmarl.training.settings import ScheduleSettings, SupervisedSettings


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
        ({"type": "cosine", "warmup_steps": 5, "decay_steps": 5}, "more than warmup_steps"),
        ({"decay_steps": 5}, "type is 'constant'; use 'linear' or 'cosine'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ScheduleSettings(**values)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_decay_without_a_length_is_refused_where_no_run_gives_it_one(kind: str) -> None:
    with pytest.raises(ValidationError, match=f"decay_steps is None with type '{kind}'; set it to the number"):
        SupervisedSettings(schedule=ScheduleSettings(type=kind))
    with pytest.raises(ValueError, match=f"decay_steps is null with type '{kind}'"):
        ScheduleSettings(type=kind).factor(0)


@given(kind=st.sampled_from(["constant", "linear", "cosine"]), warmup=st.integers(0, 9), updates=st.integers(0, 30))
def test_a_schedule_over_a_run_ends_with_its_last_update(kind: str, warmup: int, updates: int) -> None:
    schedule = ScheduleSettings(type=kind, warmup_steps=warmup, min_ratio=0.25).over(updates)
    assert schedule.over(updates + 7) == schedule
    if kind == "constant":
        assert schedule.decay_steps is None
    else:
        assert schedule.decay_steps == max(updates, warmup + 1)
        assert schedule.factor(schedule.decay_steps) == pytest.approx(0.25, rel=1e-12)


def rates_of_transformers(name: str, updates: int, **arguments: object) -> list[float]:
    """Learning rate of each update, as a share of the full one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, **arguments)  # type: ignore[arg-type]
    rates = []
    for _ in range(updates):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@given(
    shape=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 8),
    decay=st.integers(1, 20),
    min_ratio=st.sampled_from([0.0, 0.1, 0.5]),
)
@settings(deadline=None, max_examples=60)
def test_decays_are_those_of_transformers_and_the_warm_up_is_one_update_ahead(
    shape: str, warmup: int, decay: int, min_ratio: float
) -> None:
    length = warmup + decay
    ours = ScheduleSettings(
        type=shape, warmup_steps=warmup, decay_steps=None if shape == "constant" else length, min_ratio=min_ratio
    )
    arguments: dict[str, object] = {"num_warmup_steps": warmup}
    name = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine_with_min_lr"}[shape]
    if shape != "constant":
        arguments["num_training_steps"] = length
    if shape == "cosine":
        arguments["scheduler_specific_kwargs"] = {"min_lr_rate": min_ratio}
    theirs = rates_of_transformers(name, length + 1, **arguments)
    if shape == "linear":  # Theirs ends at 0, ours at min_ratio.
        theirs[warmup:] = [min_ratio + (1 - min_ratio) * rate for rate in theirs[warmup:]]
    assert [ours.factor(update) for update in range(warmup)] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)
    for update in range(warmup, length + 1):
        assert math.isclose(ours.factor(update), theirs[update], rel_tol=1e-12, abs_tol=1e-12)
