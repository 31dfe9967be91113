"""Decisions of a balancer, made again from its journal."""

from flexmarl.analysis.decided_again import compare_decisions, decided_again, loads_of, recorded
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.serving_events import BalanceDecided
from flexmarl.inference.scaling import Expectation, Move, PolicyLoad
from flexmarl.inference.settings import BalanceSettings
from flexmarl.records import InstanceId, PolicyName

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
WAITS = Expectation(tokens=100.0, tokens_left=1 / 3, tokens_per_s=10.0)
LOADS = {
    SOLVER: PolicyLoad(instances={InstanceId(SOLVER, n): 0 for n in range(3)}, expected=WAITS, kind="a", start_s=0.1),
    JUDGE: PolicyLoad(instances={InstanceId(JUDGE, 0): 1}, waiting=9, expected=WAITS, kind="a"),
}
TO_JUDGE = Move(InstanceId(SOLVER, 0), JUDGE, "'judge' has 9 waiting requests more than 'solver', above the gap of 5")


def written(event: BalanceDecided) -> BalanceDecided:
    """The event as a journal gives it back."""
    events = RememberedEvents()
    events.emit(event)
    return events.of(BalanceDecided)[0]


def test_loads_are_the_same_after_a_journal() -> None:
    assert loads_of(written(BalanceDecided(rule="drain_time", loads=LOADS)).loads) == LOADS
    unknown = {SOLVER: PolicyLoad()}
    assert loads_of(written(BalanceDecided(rule="drain_time", loads=unknown)).loads) == unknown


def test_another_rule_decides_otherwise_and_the_first_difference_is_told() -> None:
    moves = ({"instance": TO_JUDGE.instance, "to": TO_JUDGE.to, "because": "it was so"},)
    event = written(BalanceDecided(rule="queue_gap", loads=LOADS, moves=moves))
    assert recorded(event).moves == (Move(TO_JUDGE.instance, JUDGE, "it was so"),)
    again = decided_again(event, BalanceSettings(rule="queue_gap", gap=5)).moves
    assert [(move.instance, move.to) for move in again] == [(TO_JUDGE.instance, JUDGE)]
    (counts,) = compare_decisions([event, event], BalanceSettings()).values()
    assert (counts.decisions, counts.same, dict(counts.moves)) == (2, 0, {"run": 2, "again": 0})
    assert counts.first == "at 0.00 s: solver/0 to judge; again: nothing"


def test_growth_is_decided_again_where_it_is_allowed() -> None:
    event = written(BalanceDecided(rule="grow", loads=LOADS, room=(JUDGE,), grows=JUDGE))
    assert decided_again(event, BalanceSettings(grow=True)) == recorded(event)
    assert str(decided_again(event, BalanceSettings())) == "nothing"


def test_the_end_of_a_rollout_is_decided_again_by_the_rule_of_the_run() -> None:
    begun = {SOLVER: 2, JUDGE: 2}
    event = written(BalanceDecided(rule="as_configured", loads=LOADS, basis=begun))
    assert str(decided_again(event, BalanceSettings(start="by_share"))) == "solver/0 to judge"
    worked = {SOLVER: 1.0, JUDGE: 9.0}
    event = written(BalanceDecided(rule="by_share", loads=LOADS, basis=worked))
    assert len(decided_again(event, BalanceSettings()).moves) == 2
