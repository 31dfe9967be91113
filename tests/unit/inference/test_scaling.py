"""The rules that move instances between policies, on queues that fit in a line."""

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flexmarl.inference.scaling import (
    RULES,
    BalanceRule,
    DrainTime,
    Expectation,
    Move,
    PolicyLoad,
    QueueGap,
    allocation,
    drain_s,
    moves_back,
    start_moves,
)
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import PolicyName

SOLVER, JUDGE, WRITER = PolicyName("solver"), PolicyName("judge"), PolicyName("writer")
EXPECTED = Expectation(tokens=100.0, tokens_left=50.0, tokens_per_s=10.0)


def load_of(waiting: int, *running: int, name: str = "x", expected: Expectation | None = EXPECTED) -> PolicyLoad:
    """Its instances are named x0, x1 ...; each runs so many requests, of at most 4."""
    instances = {f"{name}{number}": count for number, count in enumerate(running)}
    return PolicyLoad(instances=instances, waiting=waiting, slots=4, expected=expected)


def test_queue_gap_moves_the_idlest_instance_of_the_shortest_queue_to_the_longest() -> None:
    loads = {SOLVER: load_of(9, 4), JUDGE: load_of(1, 4, 4), WRITER: load_of(0, 3, 1, name="w")}
    because = "9 requests wait for 'solver' and 0 for 'writer', more than 5 apart"
    assert QueueGap(gap=5).decide(loads, move_s=2.5) == [Move("w1", SOLVER, because)]


@pytest.mark.parametrize("waiting", [5, 6])
def test_queue_gap_moves_only_beyond_the_gap(waiting: int) -> None:
    loads = {SOLVER: load_of(waiting, 4), JUDGE: load_of(0, 0, 0)}
    assert len(QueueGap(gap=5).decide(loads, move_s=2.5)) == (waiting > 5)


def test_the_literal_rule_moves_as_many_as_the_queues_differ_but_leaves_one() -> None:
    loads = {SOLVER: load_of(7, 4), JUDGE: load_of(0, *[0] * 4)}
    moves = QueueGap(gap=5, literal=True).decide(loads, move_s=2.5)
    assert [move.instance for move in moves] == ["x0", "x1", "x2"]


def test_the_drain_time_is_queued_tokens_over_what_all_instances_sample() -> None:
    load = load_of(12, 4, 4)
    assert drain_s(load) == pytest.approx((12 * 100 + 8 * 50) / (2 * 4 * 10))
    assert drain_s(load, more=-1) == pytest.approx(40)
    assert drain_s(load, more=1, missed_s=3.0) == pytest.approx((40 + 3) / 3)
    assert drain_s(load, missed_s=6.0) == pytest.approx((40 + 6) / 2)


def test_nothing_drains_faster_than_a_request_takes_alone() -> None:
    assert drain_s(load_of(0, 1)) == pytest.approx(50 / 10)
    assert drain_s(load_of(1, 1)) == pytest.approx(100 / 10)
    assert drain_s(load_of(0, 0)) == 0


def test_drain_time_moves_where_both_will_have_drained_sooner() -> None:
    loads = {SOLVER: load_of(12, 4, 4), JUDGE: load_of(0, 2, 0)}
    because = "'solver' drains in 20.0 s; with one instance of 'judge' both will have in 14.2 s"
    assert DrainTime().decide(loads, move_s=2.5) == [Move("x1", SOLVER, because)]


def test_drain_time_makes_as_many_moves_at_once_as_pay_each_by_itself() -> None:
    loads = {SOLVER: load_of(40, 4, 4, name="s"), JUDGE: load_of(0, 2, 0, 1, 0, 3, 0, name="j")}
    moves = DrainTime(most=0.5).decide(loads, move_s=1.0)
    assert [move.instance for move in moves] == ["j1", "j3", "j5", "j2"]
    assert {move.to for move in moves} == {SOLVER}
    drains = [float(move.because.split("drains in ")[1].split(" s")[0]) for move in moves]
    assert drains == sorted(drains, reverse=True)
    assert drains[0] == pytest.approx((40 * 100 + 8 * 50) / (2 * 4 * 10))
    assert drains[1] == pytest.approx((4400 / 40 + 1) / 3, abs=0.05)  # As if the first had been made, on its way.
    assert DrainTime(most=0.25).decide(loads, move_s=1.0) == moves[:2]
    assert DrainTime(most=0.0).decide(loads, move_s=1.0) == moves[:1]


@pytest.mark.parametrize(
    ("loads", "move_s"),
    [
        ({SOLVER: load_of(12, 4, 4), JUDGE: load_of(11, 4, 4)}, 2.5),  # the donor would be the longest
        ({SOLVER: load_of(12, 4, 4), JUDGE: load_of(0, 0, 0)}, 10.0),  # 20 s: not made up for before it is done
        ({SOLVER: load_of(12, 4, 4), JUDGE: load_of(0, 0)}, 2.5),  # the donor's last
        ({SOLVER: load_of(0, 4, 4), JUDGE: load_of(0, 0, 0)}, 0.0),  # nothing waits: a new one would idle
        ({SOLVER: load_of(99, 4, expected=None), JUDGE: load_of(0, 0, 0)}, 2.5),  # nothing known of its requests
    ],
)
def test_drain_time_stays_where_a_move_does_not_pay(loads: dict[PolicyName, PolicyLoad], move_s: float) -> None:
    assert not DrainTime().decide(loads, move_s=move_s)


UNLIKE = "an engine of another kind"


def test_drain_time_weighs_a_move_by_what_it_takes_there() -> None:
    """A start takes 9 s, a load 1 s. Both donors are idle; without the one of its kind, the other goes if it pays."""
    to = replace(load_of(12, 4, 4, name="s"), start_s=9.0)
    loads = {SOLVER: to, JUDGE: replace(load_of(0, 0, 0, name="j"), kind=UNLIKE), WRITER: load_of(0, 0, 0, name="w")}
    (first,) = DrainTime(most=0.0).decide(loads, move_s=1.0)
    assert first.instance.startswith("w"), "it only loads weights"
    (second,) = DrainTime(most=0.0).decide({SOLVER: to, JUDGE: loads[JUDGE]}, move_s=1.0)
    assert second.because == "'solver' drains in 20.0 s; with one instance of 'judge' both will have in 16.3 s"
    slow = {SOLVER: replace(to, start_s=10.0), JUDGE: loads[JUDGE]}
    assert not DrainTime().decide(slow, move_s=1.0), "the start is not made up for in 20 s"


def test_instances_go_back_to_a_policy_of_their_kind_first() -> None:
    kinds = {SOLVER: "", JUDGE: UNLIKE, WRITER: "", PolicyName("critic"): UNLIKE}
    held = {SOLVER: 1, JUDGE: 1, WRITER: 2, PolicyName("critic"): 2}
    loads = {p: replace(load_of(0, *[0] * held[p], name=p[0]), kind=kind) for p, kind in kinds.items()}
    wanted = {SOLVER: 2, JUDGE: 2, WRITER: 1, PolicyName("critic"): 1}
    moves = moves_back(wanted, loads)
    assert {(move.instance[0], move.to) for move in moves} == {("w", SOLVER), ("c", JUDGE)}


queues = st.builds(
    lambda waiting, running: (waiting, running), st.integers(0, 60), st.lists(st.integers(0, 4), min_size=1, max_size=6)
)


def loads_of(drawn: list[tuple[int, list[int]]]) -> dict[PolicyName, PolicyLoad]:
    return {
        PolicyName(f"p{number}"): load_of(waiting, *running, name=f"p{number}/")
        for number, (waiting, running) in enumerate(drawn)
    }


def moved(loads: dict[PolicyName, PolicyLoad], move: Move) -> dict[PolicyName, PolicyLoad]:
    """The same queues after the move; what the instance ran waits again."""
    after = {}
    for policy, load in loads.items():
        instances, waiting = dict(load.instances), load.waiting
        if move.instance in instances:
            waiting += instances.pop(move.instance)
        if policy == move.to:
            instances[move.instance] = 0
        after[policy] = PolicyLoad(instances=instances, waiting=waiting, slots=load.slots, expected=load.expected)
    return after


@pytest.mark.parametrize("rule", RULES)
@given(st.lists(queues, min_size=1, max_size=5))
def test_every_policy_keeps_an_instance(rule: str, drawn: list[tuple[int, list[int]]]) -> None:
    loads = loads_of(drawn)
    decider: BalanceRule = RULES[rule](BalanceSettings(gap=3))
    for move in decider.decide(loads, move_s=1.0):
        loads = moved(loads, move)
    assert all(load.instances for load in loads.values())


@example(
    [(0, [4, 4]), (4, [1])]
)  # What the mover ran waits again: without it the donor has most to do, and takes it back.
@given(st.lists(queues, min_size=2, max_size=5))
def test_under_constant_load_drain_time_moves_no_instance_twice_and_comes_to_rest(
    drawn: list[tuple[int, list[int]]],
) -> None:
    loads = loads_of(drawn)
    instances = [name for load in loads.values() for name in load.instances]
    seen: list[str] = []
    while moves := DrainTime().decide(loads, move_s=1.0):
        for move in moves:
            loads = constant(loads, move)
            seen.append(move.instance)
    assert len(seen) == len(set(seen)) <= len(instances)


def constant(loads: dict[PolicyName, PolicyLoad], move: Move) -> dict[PolicyName, PolicyLoad]:
    """The move, while every queue stays as long as it is."""
    after = {}
    for policy, load in loads.items():
        instances = {name: count for name, count in load.instances.items() if name != move.instance}
        waiting = load.waiting + load.running - sum(instances.values())
        if policy == move.to:
            instances[move.instance] = 0
        after[policy] = PolicyLoad(instances=instances, waiting=waiting, slots=load.slots, expected=load.expected)
    return after


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=6), st.integers(0, 20))
def test_the_start_allocation_has_the_least_work_on_the_busiest_instance(work: list[float], more: int) -> None:
    wanted = {PolicyName(str(number)): seconds for number, seconds in enumerate(work)}
    given_to = allocation(wanted, len(work) + more)
    assert sum(given_to.values()) == len(work) + more
    assert min(given_to.values()) >= 1
    busiest = max(wanted[policy] / given_to[policy] for policy in wanted)
    for policy in wanted:  # Who has one to give would be as busy as the busiest without it.
        if given_to[policy] > 1:
            assert wanted[policy] / (given_to[policy] - 1) >= busiest


def test_a_step_starts_with_instances_in_proportion_to_the_last_steps_work() -> None:
    loads = {SOLVER: load_of(0, 0, name="s"), JUDGE: load_of(0, 2, 0, 1, 0, name="j")}
    moves = start_moves({SOLVER: 60.0, JUDGE: 20.0}, loads)
    because = "'solver' had 75% of the last steps' work, which is 4 instances"
    assert moves == [Move(name, SOLVER, because) for name in ("j2", "j3", "j1")]


@pytest.mark.parametrize("work", [{}, {SOLVER: 60.0, JUDGE: 61.0}])
def test_a_step_starts_as_it_is_where_little_can_be_gained(work: dict[PolicyName, float]) -> None:
    loads = {SOLVER: load_of(0, 0, 0, name="s"), JUDGE: load_of(0, 0, 0, name="j")}
    assert not start_moves(work, loads)


def test_instances_go_back_to_what_was_configured_and_of_fewer_in_proportion() -> None:
    loads = {SOLVER: load_of(0, 0, 0, 0, 0, name="s"), JUDGE: load_of(0, 0, name="j")}
    assert [move.to for move in moves_back({SOLVER: 2, JUDGE: 3}, loads)] == [JUDGE, JUDGE]
    assert moves_back({SOLVER: 4, JUDGE: 1}, loads) == []
    assert moves_back({SOLVER: 8, JUDGE: 2}, loads) == [], "five are left of ten"
    assert moves_back({SOLVER: 2, JUDGE: 1}, loads) == [], "further ones stay where they grew"
    (move,) = moves_back({SOLVER: 2, JUDGE: 2}, loads)
    assert move.to == JUDGE, "one of the further two stays"
    (move,) = moves_back({SOLVER: 3, JUDGE: 2}, loads)
    assert move.because == "each step begins as configured, 'judge' with 2"


def test_while_a_policy_waits_for_the_replacement_of_its_last_instance_none_moves():
    loads = {SOLVER: PolicyLoad(), JUDGE: PolicyLoad(instances={"judge/0": 0, "judge/1": 0})}
    assert moves_back({SOLVER: 1, JUDGE: 1}, loads) == ()
    assert start_moves({SOLVER: 5.0, JUDGE: 1.0}, loads) == ()
