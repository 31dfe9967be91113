"""Which updates are published: the rule, and whole runs in virtual time."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.events.run_events import Evaluated, StepEnded
from flexmarl.events.training_events import PublicationDeferred, Published, Updated
from flexmarl.orchestrator.publication import publication
from flexmarl.orchestrator.settings import PublicationSettings, law_of
from flexmarl.records import PolicyName, RowState
from flexmarl.testing.scripted_run import ScriptedRun

SOLVER = PolicyName("solver")
RULES = st.builds(
    PublicationSettings,
    type=st.sampled_from(["eager", "lazy", "adaptive"]),
    every=st.integers(1, 8),
    waiting_calls=st.floats(0, 10),
    waiting_steps=st.floats(0.1, 10),
)


@given(RULES, st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20), st.booleans()), max_size=60))
def test_no_rule_lets_more_updates_wait_than_its_settings_say(settings, steps):
    waits = 0
    for calls, finished, rests in steps:
        waits += 1
        ruling = publication(settings, unpublished=waits, calls=calls, steps=finished, rests=rests)
        assert ruling.because
        assert ruling.publishes or not rests
        waits = 0 if ruling.publishes else waits
        assert waits <= settings.unpublished


@pytest.mark.parametrize(
    ("calls", "steps", "publishes", "because"),
    [
        (1.0, 0.9, True, "update 1 of 4; 1 calls per instance and groups of 0.9 steps wait"),
        (1.5, 0.0, False, "update 1 of 4; 1.5 calls wait per instance, more than 1"),
        (0.0, 1.0, False, "update 1 of 4; finished groups of 1 steps wait to be trained, at least 1"),
    ],
)
def test_adaptive_defers_while_calls_wait_for_slots_or_groups_for_training(calls, steps, publishes, because):
    adaptive = PublicationSettings(type="adaptive", every=4)
    ruling = publication(adaptive, unpublished=1, calls=calls, steps=steps, rests=False)
    assert (ruling.publishes, ruling.because) == (publishes, because)


def run_of(publish, *, apart_s=0.0, **sections):
    """Task number i thinks for 0.8 s and i times `apart_s`."""

    async def workflow(task, team):
        await asyncio.sleep(0.8 + apart_s * task.data["position"])
        (await team.solver.act(task.prompt)).reward(float(task.data["position"]))

    pipeline = {"publish": publish, **sections.pop("pipeline", {})}
    sections = {"mode": "async", "steps": 6, "checkpoint": {"every": 0}, "seconds_per_sample": 0.5, **sections}
    return ScriptedRun(workflow, pipeline=pipeline, **sections).play()


def published(run):
    return [event.version for event in run.events.of(Published)]


def test_lazy_publishes_every_third_update_and_the_last():
    run = run_of({"type": "lazy", "every": 3}, steps=7)
    assert [event.version for event in run.events.of(Updated)] == [1, 2, 3, 4, 5, 6, 7]
    assert published(run) == [0, 3, 6, 7]
    assert [event.version for event in run.events.of(PublicationDeferred)] == [1, 2, 4, 5]
    assert [event.because for event in run.events.of(Published)][2:] == [
        "update 3 of 3",
        "the run rests after this step",
    ]


def test_eager_publishes_each_update_and_defers_none():
    run = run_of({"type": "eager"})
    assert published(run) == [0, 1, 2, 3, 4, 5, 6]
    assert not run.events.of(PublicationDeferred)
    assert {event.because for event in run.events.of(Published)} == {""}


def test_adaptive_publishes_at_once_where_rollout_waits_for_nobody_and_defers_where_training_is_behind():
    fast = run_of({"type": "adaptive", "every": 3}, seconds_per_sample=0.0, apart_s=0.5)
    slow = run_of({"type": "adaptive", "every": 3}, seconds_per_sample=2.0, pipeline={"lag": 3, "window": 1.0})
    assert published(fast) == [0, 1, 2, 3, 4, 5, 6]
    assert published(slow) == [0, 3, 6]
    assert {"wait to be trained" in event.because for event in slow.events.of(PublicationDeferred)} == {True}


def test_a_deferred_update_frees_the_slots_of_its_groups_so_that_rollout_goes_on():
    late = run_of({"type": "lazy", "every": 6})
    eager = run_of({"type": "eager"})
    assert [event.trained for event in late.events.of(StepEnded)] == [
        event.trained for event in eager.events.of(StepEnded)
    ]
    assert late.events.of(StepEnded)[-1].t <= eager.events.of(StepEnded)[-1].t


def test_tokens_are_trained_on_that_are_older_by_the_deferred_updates_and_no_older():
    run = run_of({"type": "lazy", "every": 4}, steps=12, pipeline={"lag": 1, "window": 0.25})
    lags = {
        row.settled_version - 1 - min(version for _, version in row.values["version_runs"])
        for row in run.rows()
        if row.state is RowState.TRAINED
    }
    law = law_of(run.settings.mode, run.settings.pipeline, groups=2)
    assert 3 < max(lags) <= (law.max_staleness or 0) == 1 + 3
    assert max(values.get("staleness/solver/max", 0.0) for values in run.metrics.values()) == max(lags)


@pytest.mark.parametrize("every", [1, 2])
def test_an_evaluation_plays_the_newest_weights(every):
    run = run_of({"type": "lazy", "every": 8}, evaluate={"tasks": 2, "every": every, "every_tasks": 2}, steps=4)
    assert published(run) == [0, *range(every, 5, every)]
    ends = {event.step + 1: event.versions for event in run.events.of(StepEnded)}
    for event in run.events.of(Evaluated):
        if event.step:
            assert ends[event.step] == {SOLVER: event.step}
