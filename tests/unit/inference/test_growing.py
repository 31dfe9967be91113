"""The rules of further instances, on queues that fit in a line."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.inference.growing import LEAST_GAIN, first_to_go, growth
from flexmarl.inference.scaling import Expectation, Loads, PolicyLoad, drain_s
from flexmarl.records import InstanceId, PolicyName

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
EXPECTED = Expectation(tokens=100.0, tokens_left=50.0, tokens_per_s=10.0)


def load_of(waiting: int, *running: int, start_s: float = 10.0, starting: int = 0, known: bool = True) -> PolicyLoad:
    """Its instances run so many requests, of at most 4. A request that waits takes 10 s, one that runs 5 s more."""
    return PolicyLoad(
        instances={InstanceId("x", number): count for number, count in enumerate(running)},
        waiting=waiting,
        slots=4,
        expected=EXPECTED if known else None,
        start_s=start_s,
        starting=starting,
    )


def test_the_policy_that_drains_last_grows_and_the_reason_has_the_times() -> None:
    loads = {SOLVER: load_of(16, 4), JUDGE: load_of(16, 4, 4)}
    decided = growth(loads, room=[SOLVER, JUDGE])
    assert decided is not None
    assert decided.policy == SOLVER
    assert decided.because == (
        "'solver' drains last, in 45.0 s; with an instance that serves from 10.0 s on, in 27.5 s"
    )


@pytest.mark.parametrize(
    ("loads", "room"),
    [
        ({SOLVER: load_of(16, 4), JUDGE: load_of(16, 4, 4)}, [JUDGE]),  # room for another does not shorten the step
        ({SOLVER: load_of(0, 4)}, [SOLVER]),  # nothing waits: it would idle
        ({SOLVER: load_of(16, 4, known=False)}, [SOLVER]),  # nothing known of its requests
        ({SOLVER: load_of(16, 4, start_s=45.0)}, [SOLVER]),  # it would serve when all is done
        ({SOLVER: load_of(1, 4)}, [SOLVER]),  # no faster than the request that waits, alone
        ({SOLVER: load_of(16, 4, starting=40)}, [SOLVER]),  # enough are on their way
        ({}, []),
    ],
)
def test_a_policy_does_not_grow_where_it_does_not_pay(loads: Loads, room: list[PolicyName]) -> None:
    assert growth(loads, room=room) is None


def test_an_instance_that_is_being_started_counts_from_the_end_of_its_start_on() -> None:
    assert drain_s(load_of(16, 4, starting=1)) == drain_s(load_of(16, 4), more=1, missed_s=10.0) == 27.5


policy_loads = st.builds(
    load_of,
    st.integers(0, 60),
    st.integers(0, 4),
    st.integers(0, 4),
    start_s=st.floats(0, 200),
    starting=st.integers(0, 3),
    known=st.booleans(),
)
all_loads = st.dictionaries(st.sampled_from([SOLVER, JUDGE, PolicyName("writer")]), policy_loads, max_size=3)


@given(all_loads, st.sets(st.sampled_from([SOLVER, JUDGE])))
@example({SOLVER: load_of(60, 4)}, {SOLVER})
def test_what_grows_has_room_and_drains_sooner_and_last(loads: Loads, room: set[PolicyName]) -> None:
    decided = growth(loads, room=room)
    assert decided == growth(dict(reversed(loads.items())), room=sorted(room)), "the same loads, the same decision"
    if decided is None:
        return
    load = loads[decided.policy]
    before = drain_s(load)
    assert decided.policy in room
    assert load.waiting
    assert all(drain_s(one) <= before for one in loads.values() if one.expected is not None and one.waiting)
    assert load.start_s < before, "it serves before the queue is drained"
    assert drain_s(replace(load, starting=load.starting + 1)) < (1 - LEAST_GAIN) * before


@given(all_loads)
@example({SOLVER: load_of(10_000, 4, start_s=0.0)})
def test_under_constant_load_growth_ends(loads: Loads) -> None:
    """Each further instance saves a twentieth, so there are at most twenty of a policy."""
    grown = dict(loads)
    for _ in range(20 * len(loads) + 1):
        if (decided := growth(grown, room=[*loads])) is None:
            break
        grown[decided.policy] = replace(grown[decided.policy], starting=grown[decided.policy].starting + 1)
    else:
        pytest.fail("it goes on growing")


def test_the_idlest_instance_of_the_policy_with_fewest_waiting_requests_goes_first() -> None:
    busy, idle, other = InstanceId("judge", 4), InstanceId("judge", 3), InstanceId("solver", 9)
    assert first_to_go({busy: 2, idle: 1, other: 0}, {JUDGE: 0, SOLVER: 5}) == idle
    assert first_to_go({busy: 1, idle: 1}, {}) == idle, "of equal ones the first by name"
    assert first_to_go({}, {SOLVER: 5}) is None
