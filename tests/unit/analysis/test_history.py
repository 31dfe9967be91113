from dataclasses import replace

from flexmarl.analysis.summary import history_of
from flexmarl.events.event import Timed
from flexmarl.events.journal import read_journal, read_run
from flexmarl.events.run_events import ProcessStarted, RunFailed, StoreRewound, WorkerLost
from flexmarl.events.serving_events import InstanceLost, InstanceReplaced
from flexmarl.events.training_events import MicroBatchDone
from flexmarl.records import WorkerId
from tests.unit.events.runs import STARTED, Hand, events_on, write_command

SOLVER, OTHER = WorkerId("engine", "solver", 0), WorkerId("engine", "solver", 1)
TRAINER = WorkerId.trainer("solver")


def started(t, process, pid, node="a", command=1):
    return ProcessStarted(t=t, command=command, process=process, pid=pid, node=node)


def lost(t, process, command=1):
    return WorkerLost(t=t, command=command, process=process, node="a", pid=1, because="killed")


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    first, second = (write_command(path, steps=steps, first_pid=10) for steps in (2, 3))
    times = [event.t for event in read_run(path)]
    assert times == sorted(times)
    assert times[-1] == first + second
    assert max(event.t for event in read_journal(path)) == second
    assert all(event.began <= event.t for event in read_run(path) if isinstance(event, Timed))
    assert history_of(read_run(path)).earlier_s == first


def test_what_began_by_the_clock_of_a_command_is_moved_with_it(tmp_path):
    path, hand = tmp_path / "journal.jsonl", Hand()
    for _ in range(2):
        hand.time = 0.0
        events = events_on(path, hand)
        events.emit(STARTED)
        hand.time = 2.0
        events.emit(
            MicroBatchDone(
                process=TRAINER, began=0.5, ended=1.75, policy="solver", micro_batch="m", rows=1, tokens=1, duration_s=1
            )
        )
    assert [(e.began, e.ended, e.t) for e in read_run(path) if isinstance(e, Timed)] == [
        (0.5, 1.75, 2.0), (2.5, 3.75, 4.0),
    ]  # fmt: skip


def test_the_processes_are_those_of_the_last_command():
    history = history_of(
        [
            replace(STARTED, t=0.0, command=1),
            started(0.1, SOLVER, 1, "a"),
            replace(STARTED, t=5.0, command=2),
            started(5.1, OTHER, 2, "b", command=2),
        ]
    )
    assert history.processes == {"engine/solver/1": {"pid": 2, "node": "b"}}
    assert (history.lost, history.replaced) == (0, 0)


def test_a_loss_that_the_cluster_and_the_pool_tell_of_is_one():
    history = history_of(
        [
            started(0.1, SOLVER, 1, "a"),
            started(0.2, TRAINER, 2, "a"),
            lost(1.0, SOLVER),
            InstanceLost(t=1.1, instance=SOLVER.instance, because="WorkerError"),
        ]
    )
    assert (history.lost, history.replaced) == (1, 0)
    assert history.processes == {"trainer/solver": {"pid": 2, "node": "a"}}


def test_an_instance_is_replaced_by_one_of_another_name():
    history = history_of(
        [
            started(0.1, SOLVER, 1, "a"),
            InstanceLost(t=1.0, instance=SOLVER.instance, because="it is late"),
            started(1.2, OTHER, 3, "a"),
            InstanceReplaced(
                t=1.3, process=OTHER, began=1.0, ended=1.3, instance=OTHER.instance, replaces=SOLVER.instance, version=0
            ),
        ]
    )
    assert (history.lost, history.replaced) == (1, 1)
    assert history.processes == {"engine/solver/1": {"pid": 3, "node": "a"}}


def test_a_process_is_replaced_by_one_of_the_same_name_and_may_be_lost_again():
    gone = lost(1.0, TRAINER)
    history = history_of([gone, started(1.1, TRAINER, 2, "a"), gone])
    assert (history.lost, history.replaced) == (2, 1)


def test_losses_of_all_commands_add_up():
    assert history_of([lost(1.0, TRAINER, command) for command in (1, 2)]).lost == 2


def test_what_a_command_says_before_it_starts_is_its_own(tmp_path):
    path, hand = tmp_path / "journal.jsonl", Hand()
    for last in (9.0, 4.0):
        hand.time = 2.0
        events = events_on(path, hand)
        events.emit(StoreRewound(next_group=0, replay=(), rows=0))
        events.emit(STARTED)
        hand.time = last
        events.emit(RunFailed())
    assert [(e.command, e.t) for e in read_run(path) if isinstance(e, StoreRewound)] == [(1, 2.0), (2, 11.0)]
    assert history_of(read_run(path)).earlier_s == 9.0


def test_an_empty_journal_has_no_history():
    history = history_of([])
    assert (history.processes, history.lost, history.replaced, history.earlier_s) == ({}, 0, 0, 0.0)
