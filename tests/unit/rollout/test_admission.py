"""The ledger of groups: slots, moves, retries, expiry, resumption."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import TransitionError
from flexmarl.records import GROUP_MOVES, GROUP_TERMINAL, GroupId, GroupState
from flexmarl.rollout.admission import ActiveGroup, Admission, AdmissionLaw, AdmissionState, Verdict

TO = {
    GroupState.WAITING: (),
    GroupState.RUNNING: (GroupState.RUNNING,),
    GroupState.DONE: (GroupState.RUNNING, GroupState.DONE),
}
"""How a fresh group gets to each state that is no end."""


def law_of(groups: int, lag: int = 0) -> AdmissionLaw:
    return AdmissionLaw(groups=groups, lag=lag, window=None)


def admitted(state: GroupState = GroupState.WAITING) -> tuple[Admission, GroupId]:
    admission = Admission(law_of(1))
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
    admission = Admission(law_of(2))
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
    assert Admission(law_of(1), next_group=40).admit() == 40


@pytest.mark.parametrize("state", TO)
def test_a_group_expires_wherever_it_is_and_frees_its_slot(state: GroupState) -> None:
    admission, group = admitted(state)
    admission.expire(group, again=False)
    assert (admission.ended, admission.active) == ({GroupState.EXPIRED: 1}, ())
    assert (admission.admit(), admission.position(GroupId(1))) == (1, 1)


def test_the_task_of_an_expired_group_is_admitted_again_at_the_tail_under_a_new_id() -> None:
    admission = Admission(law_of(2, lag=1))
    for _ in range(4):
        admission.admit()
    admission.expire(GroupId(1), again=True)
    assert admission.next_position == 1
    assert (admission.admit(), admission.position(GroupId(4)), admission.attempt(GroupId(4))) == (4, 1, 0)
    assert admission.next_position == 4, "the source goes on where it was"


def test_a_resumed_run_plays_active_groups_again_under_the_same_ids_tasks_and_attempts() -> None:
    admission = Admission(law_of(2, lag=1), next_group=40)
    for _ in range(4):
        admission.admit()
    for group in (40, 41, 42):
        admission.move(GroupId(group), GroupState.RUNNING)
    admission.move(GroupId(40), GroupState.WAITING)
    admission.move(GroupId(41), GroupState.DONE)
    admission.expire(GroupId(42), again=True)
    state = admission.snapshot()
    assert state == AdmissionState(
        next_group=44,
        next_position=44,
        again=(42,),
        active=(
            ActiveGroup(group=GroupId(40), position=40, attempt=1),
            ActiveGroup(group=GroupId(41), position=41, attempt=0),
            ActiveGroup(group=GroupId(43), position=43, attempt=0),
        ),
        expiries=((42, 1),),
    )
    resumed = Admission.resumed(law_of(2, lag=1), state)
    assert resumed.snapshot() == state
    assert [resumed.state(group) for group in resumed.active] == [GroupState.WAITING] * 3
    assert (resumed.admit(), resumed.position(GroupId(44)), resumed.next_position) == (44, 42, 44)


def test_a_task_that_takes_too_long_again_and_again_is_given_up_even_across_checkpoints() -> None:
    admission = Admission(law_of(1))
    assert admission.after_expiry(admission.admit(), retries=1) == Verdict(
        True, "group 1 of 2 of its task took too long"
    )
    admission.expire(GroupId(0), again=True)
    assert admission.snapshot().expiries == ((0, 1),)
    resumed = Admission.resumed(law_of(1), admission.snapshot())
    assert resumed.after_expiry(resumed.admit(), retries=1) == Verdict(False, "all 2 groups of its task took too long")
    resumed.expire(GroupId(1), again=False)
    assert resumed.snapshot().expiries == ()


def test_a_task_whose_group_ends_otherwise_is_late_no_more() -> None:
    admission = Admission(law_of(1))
    admission.expire(admission.admit(), again=True)
    for state in (GroupState.RUNNING, GroupState.DONE, GroupState.TRAINED):
        admission.move(GroupId(1) if admission.active else admission.admit(), state)
    assert admission.snapshot().expiries == ()


@pytest.mark.parametrize(
    ("lag", "window", "slots", "bound"), [(0, 1, 4, 0), (1, 1, 8, 1), (1, 4, 8, 2), (1, 5, 8, 2), (2, 6, 12, 4)]
)
def test_the_law_gives_the_slots_and_the_bound_on_staleness(lag: int, window: int, slots: int, bound: int) -> None:
    law = AdmissionLaw(groups=4, lag=lag, window=window)
    assert (law.slots, law.max_staleness) == (slots, bound)


def test_without_a_window_staleness_has_no_bound() -> None:
    assert law_of(4, lag=1).max_staleness is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_happens_every_group_ends_once_and_never_more_are_active_than_there_are_slots(
    data: st.DataObject,
) -> None:
    admission = Admission(law_of(data.draw(st.integers(1, 4))))
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
