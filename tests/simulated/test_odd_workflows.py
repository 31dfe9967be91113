"""Workflows that misbehave, in every mode: the odd episode is lost, with a reason, and nothing else is."""

from collections import Counter
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import pytest

from flexmarl.events.group_events import EpisodeFailed, GroupAdmitted, GroupExpired, GroupFailed, GroupFiltered
from flexmarl.events.run_events import StepEnded
from flexmarl.records import ROW_TERMINAL, split_sample_id
from flexmarl.testing.scripted_run import ScriptedRun
from tests.odd_workflows import FINISHED, ODDITIES, kind_of, odd_workflow

EPISODES, GROUPS = 4, 4
KINDS = tuple(kind for kind, oddity in ODDITIES.items() if oddity.virtual)
MODES: Mapping[str, Mapping[str, Any]] = {
    "sync": {"mode": "sync"},
    "microbatch": {"mode": "microbatch"},
    "colocated": {"mode": "colocated"},
    "ahead": {"mode": "microbatch", "pipeline": {"ahead": True}},
    "streaming": {"mode": "microbatch", "credit": {"streaming": "linear", "filter": None, "invalid_action": None}},
    "by episode": {
        "mode": "microbatch",
        "credit": {"ready": "trajectory", "estimator": {"type": "reinforce"}, "filter": None},
    },
    "greedy play": {"mode": "microbatch", "credit": {"estimator": {"type": "remax"}, "filter": None}},
    "one_step_off": {"mode": "one_step_off"},
    "async": {"mode": "async"},
    "fifo": {"mode": "fifo"},
    "greedy": {"mode": "greedy"},
    "per policy": {"mode": "async", "pipeline": {"updates": "per_policy"}},
}


def check(kind: str, mode: str) -> None:
    """Plays the kind in the mode and compares all that became of it with what should."""
    run = ScriptedRun(
        odd_workflow(kind, episodes=EPISODES),
        agents={"solver": "solver", "writer": "writer"},
        steps=2,
        batch={"groups": GROUPS, "episodes": EPISODES},
        rollout={"episode_timeout_s": 9.0, "cancel_grace_s": 2.0},
        **MODES[mode],
    ).play()
    assert run.outcome is not None
    check_groups(run)
    rows = run.rows()
    assert {row.state for row in rows} <= ROW_TERMINAL
    failed, oddity = run.events.of(EpisodeFailed), ODDITIES[kind]
    for event in failed:
        assert kind_of(event.episode, [kind], EPISODES) == kind, f"a good episode failed: {event.because}"
        assert (event.status, oddity.because in event.because) == (oddity.ends, True), event.because
    lost = {event.episode for event in failed}
    assert bool(lost) == (oddity.ends is not FINISHED)
    trained = {split_sample_id(row.sample_id)[2] for row in rows if row.state == "trained"}
    assert trained
    assert not trained & lost


def check_groups(run: ScriptedRun) -> None:
    """Law 1."""
    ends = (GroupFailed, GroupFiltered, GroupExpired)
    ended = Counter(event.group for event in run.events.of(*ends))
    ended.update(group for event in run.events.of(StepEnded) for group in event.trained)
    assert ended == Counter(event.group for event in run.events.of(GroupAdmitted))


@pytest.mark.parametrize(("kind", "mode"), list(zip(KINDS, cycle(MODES), strict=False)))
def test_an_odd_workflow_loses_its_own_episodes_and_nothing_else(kind, mode):
    check(kind, mode)


@pytest.mark.deep
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_odd_workflow_loses_its_own_episodes_and_nothing_else_in_every_mode(kind, mode):
    check(kind, mode)


def test_there_are_forty_kinds_of_oddness():
    assert len(ODDITIES) >= 40
    assert {oddity.ends for oddity in ODDITIES.values()} == {"finished", "failed", "timed_out"}
