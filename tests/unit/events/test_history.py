from flexmarl.analysis.summary import history_of
from flexmarl.events.journal import Journal, read_journal, read_run
from tests.unit.events.runs import Hand, write_command


def entry(t, event, command=1, **fields):
    return {"t": t, "event": event, "command": command, **fields}


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    path = tmp_path / "journal.jsonl"
    first, second = (write_command(path, steps=steps, first_pid=10) for steps in (2, 3))
    times = [entry["t"] for entry in read_run(path)]
    assert times == sorted(times)
    assert times[-1] == first + second
    assert max(entry["t"] for entry in read_journal(path)) == second
    assert all(entry["began"] <= entry["t"] for entry in read_run(path) if "began" in entry)
    assert history_of(read_run(path)).earlier_s == first


def test_what_began_by_the_clock_of_a_command_is_moved_with_it(tmp_path):
    path, hand = tmp_path / "journal.jsonl", Hand()
    for _ in range(2):
        hand.time = 0.0
        journal = Journal(path, hand)
        journal.event("run_started")
        hand.time = 2.0
        journal.event("micro_batch", began=0.5, ended=1.75)
    assert [(e["began"], e["ended"], e["t"]) for e in read_run(path) if "began" in e] == [
        (0.5, 1.75, 2.0), (2.5, 3.75, 4.0),
    ]  # fmt: skip


def test_the_processes_are_those_of_the_last_command():
    history = history_of(
        [
            entry(0.0, "run_started"),
            entry(0.1, "process_started", process="engine/solver/0", pid=1, node="a"),
            entry(5.0, "run_started", command=2),
            entry(5.1, "process_started", command=2, process="engine/solver/1", pid=2, node="b"),
        ]
    )
    assert history.processes == {"engine/solver/1": {"pid": 2, "node": "b"}}
    assert (history.lost, history.replaced) == (0, 0)


def test_a_loss_that_the_cluster_and_the_pool_tell_of_is_one():
    history = history_of(
        [
            entry(0.1, "process_started", process="engine/solver/0", pid=1, node="a"),
            entry(0.2, "process_started", process="trainer/solver", pid=2, node="a"),
            entry(1.0, "worker_lost", process="engine/solver/0", because="killed"),
            entry(1.1, "instance_lost", instance="solver/0", because="WorkerError"),
        ]
    )
    assert (history.lost, history.replaced) == (1, 0)
    assert history.processes == {"trainer/solver": {"pid": 2, "node": "a"}}


def test_an_instance_is_replaced_by_one_of_another_name():
    history = history_of(
        [
            entry(0.1, "process_started", process="engine/solver/0", pid=1, node="a"),
            entry(1.0, "instance_lost", instance="solver/0", because="it is late"),
            entry(1.2, "process_started", process="engine/solver/1", pid=3, node="a"),
            entry(1.3, "instance_replaced", instance="solver/1", replaces="solver/0"),
        ]
    )
    assert (history.lost, history.replaced) == (1, 1)
    assert history.processes == {"engine/solver/1": {"pid": 3, "node": "a"}}


def test_a_process_is_replaced_by_one_of_the_same_name_and_may_be_lost_again():
    lost = entry(1.0, "worker_lost", process="trainer/solver", because="killed")
    history = history_of([lost, entry(1.1, "process_started", process="trainer/solver", pid=2, node="a"), lost])
    assert (history.lost, history.replaced) == (2, 1)


def test_losses_of_all_commands_add_up():
    lost = [entry(1.0, "worker_lost", command, process="trainer/solver", because="killed") for command in (1, 2)]
    assert history_of(lost).lost == 2


def test_what_a_command_says_before_it_starts_is_its_own(tmp_path):
    path, hand = tmp_path / "journal.jsonl", Hand()
    for last in (9.0, 4.0):
        hand.time = 2.0
        journal = Journal(path, hand)
        journal.event("store_rewound")
        journal.event("run_started")
        hand.time = last
        journal.event("run_failed")
    assert [(e["command"], e["t"]) for e in read_run(path) if e["event"] == "store_rewound"] == [(1, 2.0), (2, 11.0)]
    assert history_of(read_run(path)).earlier_s == 9.0


def test_an_empty_journal_has_no_history():
    history = history_of([])
    assert (history.processes, history.lost, history.replaced, history.earlier_s) == ({}, 0, 0, 0.0)
