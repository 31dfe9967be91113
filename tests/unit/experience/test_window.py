"""Whose turn it is: the window, its head, its deadline."""

import pytest

from flexmarl.errors import TransitionError
from flexmarl.experience.window import Taken, Window
from flexmarl.records import GroupId


def window_of(size: int | None, groups: int, *, finished: tuple[int, ...] = ()) -> Window:
    window = Window(size)
    for group in range(groups):
        window.submitted(GroupId(group), at=float(group))
    for group in finished:
        window.finished(GroupId(group))
    return window


def taken(window: Window) -> list[int]:
    found = []
    while one := window.take():
        found.append(one.group)
    return found


def test_inside_the_window_the_oldest_finished_group_comes_first_and_beyond_it_none() -> None:
    window = window_of(4, 8, finished=(5, 4, 3, 1))
    assert window.take() == Taken(GroupId(1), "the oldest finished one; group 0 plays, and it is among 4 from there on")
    assert taken(window) == [3]
    assert (window.head, len(window)) == (0, 6)
    window.finished(GroupId(0))
    assert window.take() == Taken(GroupId(0), "it is the oldest")
    assert taken(window) == [4, 5]


def test_a_window_of_one_is_strict_order() -> None:
    window = window_of(1, 3, finished=(2, 1))
    assert taken(window) == []
    window.finished(GroupId(0))
    assert taken(window) == [0, 1, 2]


def test_without_a_window_whatever_has_finished_is_taken() -> None:
    window = window_of(None, 1000, finished=(999,))
    because = "the oldest finished one; group 0 plays, and there is no window"
    assert window.take() == Taken(GroupId(999), because)


@pytest.mark.parametrize("finished", [False, True])
def test_the_head_passes_a_group_that_ended_without_being_taken(finished: bool) -> None:
    window = window_of(2, 4, finished=(0, 2) if finished else (2,))
    window.ended(GroupId(0))
    assert window.head == 1
    assert taken(window) == [2]


def steps_of(size: int, groups: int, *, finished: tuple[int, ...]) -> Window:
    window = Window(size, step=size)
    for group in range(groups):
        window.submitted(GroupId(group), at=float(group))
    for group in finished:
        window.finished(GroupId(group))
    return window


def test_where_steps_are_in_order_a_group_overtakes_those_of_its_step_only() -> None:
    window = steps_of(3, 7, finished=(3, 2, 1))
    because = "the oldest finished one; group 0 plays, and it is among 3 from there on, of the same step"
    assert window.take() == Taken(GroupId(1), because)
    assert taken(window) == [2]
    assert window.overdue(10.0, 5.0) == 0, "group 3 is held up: it is of the next step"
    window.finished(GroupId(0))
    window.finished(GroupId(5))
    assert taken(window) == [0, 3, 5], "then the next step is 3, 4 and 5"


def test_a_step_in_order_takes_another_group_for_one_that_goes_into_no_step() -> None:
    window = steps_of(2, 6, finished=(0, 1))
    assert taken(window) == [0, 1]
    window.lacks_one()
    window.finished(GroupId(3))
    assert taken(window) == [], "the first step lacks the oldest, group 2"
    window.begin_step()
    assert taken(window) == [3], "nothing is lacking: the next step is 2 and 3"
    window.ended(GroupId(2))
    window.finished(GroupId(4))
    assert taken(window) == [4], "group 2 goes into no step either"


def test_an_empty_window_has_no_head_and_gives_nothing() -> None:
    window = window_of(4, 1, finished=(0,))
    assert taken(window) == [0]
    assert (window.head, window.head_at, window.take(), window.overdue(1e9, 0.0)) == (None, None, None, None)


def test_the_head_is_overdue_once_it_holds_up_others_for_longer_than_the_deadline() -> None:
    window = window_of(2, 4, finished=(1, 2))
    assert window.overdue(100.0, 10.0) is None, "group 1 may be taken: nobody is held up"
    assert taken(window) == [1]
    assert window.overdue(10.0, 10.0) is None, "not longer than the deadline"
    assert window.overdue(10.5, 10.0) == 0
    window.ended(GroupId(0))
    assert (taken(window), window.head, window.head_at) == ([2], 3, 3.0)
    assert window.overdue(13.5, 10.0) == 3


def test_a_resumed_run_submits_its_active_groups_and_leaves_gaps_between_them() -> None:
    window = Window(3)
    for group in (4, 6, 9):
        window.submitted(GroupId(group), at=0.0)
    window.finished(GroupId(9))
    window.finished(GroupId(6))
    assert taken(window) == [6], "9 is not among 4, 5, 6"


def test_what_the_life_of_a_group_lacks_is_an_error() -> None:
    window = window_of(2, 3, finished=(1,))
    for call in (window.finished, window.ended):
        with pytest.raises(TransitionError, match=r"group 7 is not in the window; open: \[0, 1, 2\]"):
            call(GroupId(7))
    with pytest.raises(TransitionError, match="group 1 has finished before"):
        window.finished(GroupId(1))
    with pytest.raises(TransitionError, match="group 2 is submitted after group 2; ids come in order, once"):
        window.submitted(GroupId(2), at=0.0)
    with pytest.raises(ValueError, match="a window holds at least 1 group, got 0; use 1 for strict order"):
        Window(0)
