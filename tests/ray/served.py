"""What must be true of the calls, loads and moves of a run on real engines, whatever moved or was lost meanwhile."""

import json
from collections import Counter, defaultdict
from typing import Any

from flexmarl.events.event import to_json
from flexmarl.events.group_events import EpisodeLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called, Loaded, Moved
from flexmarl.experience.interface import Row
from flexmarl.experience.store_file import read_store
from flexmarl.records import Purpose
from tests.ray.child_run import Left, assert_same

SAMPLED = ("prompt_ids", "response_ids", "logprobs", "raw_logprobs")


def assert_served_once(run: Left) -> None:
    """Every row was sampled by one answered call, of its own policy, with weights that the instance held.

    A call may be answered twice only if its episode was played again, as the worker that played it was lost.
    """
    rows, calls = turns_of(run), run.events(Called)
    replayed = {event.episode for event in run.events(EpisodeLost)}
    answered = Counter(call.request for call in calls if call.purpose is Purpose.TRAINING)
    assert answered.keys() == rows.keys(), "no request was lost, and none was made up"
    twice = {request for request, count in answered.items() if count > 1}
    assert {call.trajectory for call in calls if call.request in twice} <= replayed
    held, checksums = defaultdict[Any, set[int]](set), defaultdict[Any, set[str]](set)
    for event in run.events(Called, Loaded):
        if isinstance(event, Loaded):
            assert event.instance.policy == event.policy
            held[event.instance].add(event.version)
            checksums[event.policy, event.version].add(event.checksum)
            continue
        assert event.instance.policy == event.policy
        assert event.version in held[event.instance], f"{event.request}: the instance holds {held[event.instance]}"
    for last in {call.request: call for call in calls if call.purpose is Purpose.TRAINING}.values():
        row = rows[last.request]
        assert (row.policy, len(row.values["response_ids"])) == (last.policy, last.sampled_tokens)
    assert all(len(of_one) == 1 for of_one in checksums.values()), "all instances of a version serve the same bytes"


def assert_moves_are_shown(run: Left) -> list[Moved]:
    """Every move has its reason and both of its times, in the journal and in the timeline; returns them."""
    moves = run.events(Moved)
    assert all(move.because and move.seconds > 0 and move.expected_s > 0 for move in moves)
    timeline = json.loads(RunFolder(run.path).timeline.read_text())["traceEvents"]
    drawn = [one for one in timeline if one["name"].startswith(Moved.name)]
    asked = ("instance", "to", "because", "expected_s")
    assert [[one["args"][name] for name in asked] for one in drawn] == [
        [to_json(move)[name] for name in asked] for move in moves
    ]
    assert all(abs(one["dur"] / 1e6 - move.seconds) < 1e-5 for one, move in zip(drawn, moves, strict=True))
    return moves


def assert_same_bits(one: Left, other: Left, *, steps: int) -> None:
    """Both sampled and consumed the same, bit by bit, and ended with the same weights, wherever replies went on."""
    ours, theirs = turns_of(one), turns_of(other)
    assert ours.keys() == theirs.keys()
    for name, row in ours.items():
        for column in SAMPLED:
            assert row.values[column].tobytes() == theirs[name].values[column].tobytes(), f"{name}: {column}"
    assert_same(one, other, steps=steps)


def turns_of(run: Left) -> dict[str, Row]:
    """Every row of every agent, by sample id."""
    with read_store(RunFolder(run.path).store) as store:
        return {row.sample_id: row for agent in store.agents for row in store.rows(agent)}
