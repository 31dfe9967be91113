"""What a user's test of a workflow looks like."""

import asyncio

import pytest

from flexmarl.events.run_events import StepEnded
from flexmarl.records import RowState
from flexmarl.simulator.virtual_time import DeadlockError
from flexmarl.testing.scripted_run import ScriptedRun


async def duet(task, team):
    first = await team.solver.act(task.prompt)
    second = await team.verifier.act(first.text)
    for reply in (first, second):
        reply.reward(float("4" in reply.text))


def test_a_team_plays_and_learns_in_five_lines():
    script = lambda prompt, request: "42" if request.policy == "solver" else "I agree"  # noqa: E731
    run = ScriptedRun(duet, script, agents={"solver": "solver", "verifier": "verifier"}, steps=3).play()
    assert {policy: trainer.version for policy, trainer in run.trainers.items()} == {"solver": 3, "verifier": 3}
    assert {row.state for row in run.rows()} == {RowState.TRAINED}
    assert run.metrics[3]["reward/solver"] == 1.0
    assert run.metrics[3]["reward/verifier"] == 0.0


def test_time_is_counted_in_tokens():
    run = ScriptedRun(
        duet, lambda prompt, request: "42", agents={"solver": "a", "verifier": "b"}, seconds_per_token=1.0
    )
    assert run.play().events.of(StepEnded)[0].t == 6.0  # two turns of two characters and an end


def test_what_waits_for_ever_is_an_error():
    async def wait(divisors):
        await asyncio.Event().wait()

    run = ScriptedRun()
    run.trainers["solver"].step = wait
    with pytest.raises(DeadlockError, match=r"deadlock at 0\.2 s: nothing can run; waiting: "):
        run.play()
