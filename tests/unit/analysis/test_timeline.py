import json
import tracemalloc
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.analysis.timeline import render_timeline, trace_events
from flexmarl.events.event import Timed
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from tests.calls import a_call
from tests.unit.events.runs import write_command


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def timeline(folder):
    return json.loads(render_timeline(folder.path).read_text())["traceEvents"]


def check_format(events):
    """Chrome's Trace Event Format, as far as we use it; and no two slices of one lane overlap."""
    named, lanes = set(), defaultdict(list)
    for event in events:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= event.keys()
        assert all(type(event[key]) is int for key in ("ts", "pid", "tid"))
        assert type(event["name"]) is str
        assert event["ts"] >= 0
        match event["ph"]:
            case "X":
                assert type(event["dur"]) is int
                assert event["dur"] >= 0
                lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] == "t"
            case "C":
                assert event["args"]
                assert all(isinstance(value, (int, float)) for value in event["args"].values())
            case "M":
                assert event["name"] in {
                    "process_name", "process_sort_index", "thread_name", "thread_sort_index"
                }  # fmt: skip
                named.add((event["name"], event["pid"], event["tid"]))
            case other:
                raise AssertionError(f"ph {other!r} is none of ours")
    for (pid, tid), spans in lanes.items():
        assert ("process_name", pid, 0) in named
        assert ("thread_name", pid, tid) in named
        assert all(first[1] <= second[0] for first, second in pairwise(sorted(spans)))
    assert len({tid for _, _, tid in named} - {0}) == sum(name == "thread_name" for name, _, _ in named)


def rows(events):
    """Names of the processes, from top to bottom."""
    meta = [event for event in events if event["ph"] == "M"]
    names = {event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"}
    places = {event["pid"]: event["args"]["sort_index"] for event in meta if event["name"] == "process_sort_index"}
    return [names[pid] for pid in sorted(names, key=places.__getitem__)]


def test_a_timeline_is_in_the_format_that_perfetto_reads(folder):
    write_command(folder.journal, steps=3, first_pid=10)
    check_format(timeline(folder))


def test_every_process_has_a_row_that_says_where_it_runs(folder):
    write_command(folder.journal, steps=1, first_pid=10)
    assert rows(timeline(folder)) == [
        "controller (pid 10 on 10.0.0.1)",
        "trainer/solver (pid 13 on 10.0.0.1)",
        "trainer/verifier (pid 14 on 10.0.0.1)",
        "engine/solver/0 (pid 11 on 10.0.0.1)",
        "engine/verifier/0 (pid 12 on 10.0.0.1)",
    ]


def test_a_replaced_process_keeps_its_row(folder):
    write_command(folder.journal, steps=1, first_pid=10, lost=True)
    assert "engine/solver/0 (pid 11 on 10.0.0.1, then pid 110 on 10.0.0.1)" in rows(timeline(folder))


def test_every_event_that_took_time_is_a_slice_with_its_fields(folder):
    write_command(folder.journal, steps=2, first_pid=10)
    took_time = [event for event in read_run(folder.journal) if isinstance(event, Timed)]
    slices = [event for event in timeline(folder) if event["ph"] == "X"]
    assert len(slices) == len(took_time) == 2 * (48 + 8 + 2 + 2)
    micro_batch = next(event for event in slices if event["name"] == "micro_batch")
    assert (micro_batch["ts"], micro_batch["dur"]) == (2_000_000, 400_000)
    assert micro_batch["args"] == {
        "process": "trainer/solver", "policy": "solver", "rows": 8, "tokens": 96.0, "micro_batch": "solver/0/0",
        "duration_s": 0.39,
    }  # fmt: skip
    assert {event["name"] for event in slices} == {"call", "micro_batch", "updated", "rollout", "step"}


def test_decisions_are_marks_and_what_only_happened_is_not(folder):
    write_command(folder.journal, steps=1, first_pid=10, lost=True)
    marks = [event for event in timeline(folder) if event["ph"] == "i"]
    assert {event["name"] for event in marks} == {"run_started", "group_ready", "instance_lost", "worker_lost"}
    assert marks[-1]["args"] == {
        "because": "killed by signal 9", "process": "engine/solver/0", "node": "10.0.0.1", "pid": 11
    }  # fmt: skip


def test_counters_show_queues_lag_and_rows_that_wait_for_training(folder):
    write_command(folder.journal, steps=1, first_pid=10)
    counters = defaultdict(list)
    for event in timeline(folder):
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"])
    assert counters["queued calls"][0] == {"solver": 12, "verifier": 0}
    assert counters["running calls"][1] == {"solver": 22, "verifier": 7}
    assert counters["event loop lag (ms)"][0] == {"worst": 1.5}
    waiting = [args["solver"] for args in counters["untrained rows"]]
    assert (max(waiting), waiting[-1]) == (16, 0)


def test_lanes_say_what_they_show(folder):
    write_command(folder.journal, steps=2, first_pid=10)
    meta = [event for event in timeline(folder) if event["ph"] == "M"]
    rows = {event["pid"]: event["args"]["name"].split()[0] for event in meta if event["name"] == "process_name"}
    lanes = {(rows[event["pid"]], event["args"]["name"]) for event in meta if event["name"] == "thread_name"}
    assert {name for row, name in lanes if row == "controller"} == {"decisions", "rollout", "step"}
    assert {name for row, name in lanes if row == "trainer/solver"} == {"micro_batch", "updated"}
    calls = {name for row, name in lanes if row == "engine/solver/0"}
    assert calls == {"call", *(f"call {number}" for number in range(2, len(calls) + 1))}


def test_a_resumed_run_is_one_timeline(folder):
    ends = [write_command(folder.journal, steps=2, first_pid=pid) for pid in (10, 20)]
    events = timeline(folder)
    check_format(events)
    assert [event["ts"] for event in events if event["name"] == "run_started"] == [0, ends[0] * 1_000_000]
    assert max(event["ts"] + event.get("dur", 0) for event in events) == sum(ends) * 1_000_000
    assert rows(events)[0] == "controller (pid 10 on 10.0.0.1, then pid 20 on 10.0.0.1)"


@given(cut=st.integers(min_value=0, max_value=20_000))
@settings(max_examples=30, deadline=None)
def test_a_journal_torn_anywhere_has_a_timeline(tmp_path_factory, cut):
    folder = RunFolder(tmp_path_factory.mktemp("torn"))
    write_command(folder.journal, steps=1, first_pid=10)
    folder.journal.write_bytes(folder.journal.read_bytes()[:cut])
    events = timeline(folder)
    check_format(events)
    assert len([e for e in events if e["ph"] == "X"]) == sum(
        isinstance(event, Timed) for event in read_run(folder.journal)
    )


def test_a_slice_never_ends_before_it_begins():
    call = a_call("a/0", began=1.000001, ended=1.0)
    call.happen(1.0)
    (slice_, *_) = trace_events([call])
    assert (slice_["ts"], slice_["dur"]) == (1_000_000, 0)


def test_a_run_without_processes_of_its_own_has_rows_without_places():
    calls = [a_call("a/10", began=0.5, ended=1.0), a_call("a/9", began=0.5, ended=2.0)]
    events = list(trace_events(calls))
    assert rows(events) == ["controller", "engine/a/9", "engine/a/10"]


def test_the_length_of_a_run_is_not_held_in_memory(folder):
    def peak(steps):
        folder.journal.unlink(missing_ok=True)
        write_command(folder.journal, steps=steps, first_pid=10)
        render_timeline(folder.path)
        tracemalloc.start()
        try:
            render_timeline(folder.path)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(40) < 1.5 * peak(4)
