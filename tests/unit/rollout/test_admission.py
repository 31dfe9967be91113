"""The ledger of groups: slots, moves, retries."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TransitionError
from flexmarl.records import GROUP_MOVES, GROUP_TERMINAL, GroupId, GroupState
from flexmarl.rollout.admission import Admission

TO = {
    GroupState.WAITING: (),
    GroupState.RUNNING: (GroupState.RUNNING,),
    GroupState.DONE: (GroupState.RUNNING, GroupState.DONE),
}
"""How a fresh group gets to each state that is no end."""


def admitted(state: GroupState = GroupState.WAITING) -> tuple[Admission, GroupId]:
    admission = Admission(slots=1)
    group = admission.admit()
    for step in TO[state]:
        admission.move(group, step)
    return admission, group


@pytest.mark.parametrize("state", TO)
@pytest.mark.parametrize("to", GroupState)
def test_a_group_makes_the_moves_of_the_table_and_no_other(state: GroupState, to: GroupState) -> None:
    admission, group = admitted(state)
    if to in GROUP_MOVES[state]:
        admission.move(group, to)
        assert admission.active == (() if to in GROUP_TERMINAL else (group,))
    else:
        with pytest.raises(TransitionError, match=f"group 0 is {state} and cannot become {to}; it can become: "):
            admission.move(group, to)
        assert admission.state(group) is state


@pytest.mark.parametrize("end", sorted(GROUP_TERMINAL))
def test_a_group_that_has_ended_makes_no_move_at_all(end: GroupState) -> None:
    admission, group = admitted(GroupState.RUNNING if end is GroupState.FAILED else GroupState.DONE)
    admission.move(group, end)
    assert admission.ended == {end: 1}
    for state in GroupState:
        with pytest.raises(TransitionError, match="group 0 is not active; active: none"):
            admission.move(group, state)


def test_a_slot_is_freed_by_the_end_of_a_group_and_by_nothing_before() -> None:
    admission = Admission(slots=2)
    first, _ = admission.admit(), admission.admit()
    for state in (GroupState.RUNNING, GroupState.DONE):
        admission.move(first, state)
        verdict = admission.may_admit()
        assert (verdict.allowed, verdict.because) == (
            False,
            "all 2 slots are active; one is freed when a group ends",
        )
    with pytest.raises(TransitionError, match="group 2 may not be admitted: all 2 slots are active"):
        admission.admit()
    admission.move(first, GroupState.TRAINED)
    assert admission.may_admit().because == "1 of 2 slots are active"
    assert admission.admit() == 2


def test_a_retried_group_keeps_its_id_its_slot_and_counts_its_attempts() -> None:
    admission, group = admitted(GroupState.RUNNING)
    verdict = admission.after_failure(group, retries=1)
    assert (verdict.allowed, verdict.because) == (True, "attempt 1 of 2 had no finished episode")
    admission.move(group, GroupState.WAITING)
    assert (admission.active, admission.attempt(group)) == ((group,), 1)
    assert not admission.may_admit().allowed
    admission.move(group, GroupState.RUNNING)
    verdict = admission.after_failure(group, retries=1)
    assert (verdict.allowed, verdict.because) == (False, "none of 2 attempts had a finished episode")


def test_a_resumed_run_goes_on_counting_where_the_last_one_stopped() -> None:
    assert Admission(slots=1, next_group=40).admit() == 40


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_happens_every_group_ends_once_and_never_more_are_active_than_there_are_slots(
    data: st.DataObject,
) -> None:
    admission = Admission(slots=data.draw(st.integers(1, 4)))
    ended: list[GroupId] = []
    for _ in range(data.draw(st.integers(0, 60))):
        if admission.may_admit().allowed and data.draw(st.booleans()):
            admission.admit()
        elif admission.active:
            group = data.draw(st.sampled_from(admission.active))
            state = data.draw(st.sampled_from(sorted(GROUP_MOVES[admission.state(group)])))
            admission.move(group, state)
            ended += [group] if state in GROUP_TERMINAL else []
        assert len(admission.active) <= admission.slots
        assert sorted([*ended, *admission.active]) == list(range(admission.next_group))
        assert admission.ended.total() == len(ended) == len(set(ended))
