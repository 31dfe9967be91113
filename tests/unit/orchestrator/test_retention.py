"""Which checkpoints stay."""

from hypothesis import given
from hypothesis import strategies as st

from flexmarl.orchestrator.checkpoint import Held
from flexmarl.orchestrator.saving import Drop, to_drop

steps = st.integers(0, 20)
intact_or_torn = st.builds(Held, step=steps, num_bytes=st.integers(0, 9)) | st.builds(
    Held, step=steps, damage=st.just("torn")
)
checkpoints = st.lists(
    intact_or_torn,
    min_size=1,
    max_size=8,
    unique_by=lambda held: held.step,
)


def held(*sizes: int) -> list[Held]:
    return [Held(step=step, num_bytes=size) for step, size in enumerate(sizes, start=1)]


def test_every_drop_has_its_reason() -> None:
    found = [*held(1, 2, 2, 2), Held(step=5, damage="step-00005 is torn"), Held(step=6, num_bytes=2), Held(step=7)]
    assert to_drop(found, saved=6, keep=3, budget_bytes=5) == [
        Drop(step=7, because="the run went back behind it, and is at step 6 now"),
        Drop(step=5, because="step-00005 is torn"),
        Drop(step=3, because="with it there are 6e-09 GB, checkpoint.budget_gb is 5e-09"),
        Drop(step=2, because="with it there are 8e-09 GB, checkpoint.budget_gb is 5e-09"),
        Drop(step=1, because="with it there are 9e-09 GB, checkpoint.budget_gb is 5e-09"),
    ]
    assert to_drop(held(1, 1, 1), saved=3, keep=2, budget_bytes=None) == [Drop(step=1, because="checkpoint.keep is 2")]


@given(found=checkpoints, keep=st.integers(1, 4), budget=st.none() | st.integers(1, 20))
def test_what_stays_is_the_saved_one_and_as_many_of_the_newest_intact_ones_as_fit(
    found: list[Held], keep: int, budget: int | None
) -> None:
    saved = max((one for one in found if not one.damage), key=lambda one: one.step, default=None)
    if saved is None:
        return
    gone = {drop.step for drop in to_drop(found, saved=saved.step, keep=keep, budget_bytes=budget)}
    stay = [one for one in found if one.step not in gone]
    assert saved in stay
    assert len(stay) <= keep
    assert not any(one.damage or one.step > saved.step for one in stay)
    assert stay == [saved] or budget is None or sum(one.num_bytes for one in stay) <= budget
    intact = sorted((one for one in found if not one.damage), key=lambda one: -one.step)
    assert sorted(stay, key=lambda one: -one.step) == intact[: len(stay)], "never an older one in place of a newer one"
    one_more = intact[: len(stay) + 1]
    too_much = budget is not None and sum(one.num_bytes for one in one_more) > budget
    assert len(one_more) == len(stay) or len(stay) == keep or too_much, "no more go than must"


@given(found=checkpoints, keep=st.integers(1, 4), budget=st.none() | st.integers(1, 20), best=steps)
def test_the_best_stays_whatever_the_limits_and_changes_nothing_else(
    found: list[Held], keep: int, budget: int | None, best: int
) -> None:
    saved = max((one.step for one in found if not one.damage), default=None)
    if saved is None:
        return
    without = {drop.step for drop in to_drop(found, saved=saved, keep=keep, budget_bytes=budget)}
    with_best = {drop.step for drop in to_drop(found, saved=saved, keep=keep, budget_bytes=budget, best=best)}
    intact = any(one.step == best and not one.damage for one in found)
    assert with_best == (without - {best} if intact else without)
