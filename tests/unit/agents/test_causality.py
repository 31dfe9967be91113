"""What a call depends on follows from how the workflow is written, however long its calls take."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.agents.workflow_tasks import WorkflowTasks
from flexmarl.errors import EngineError
from flexmarl.simulator.virtual_time import run_virtual
from tests.unit.agents.tables import CALCULATOR, context, says, spec

AGENTS = {"solver": {}, "judge": {"context": "full"}}


def after(workflow, script=lambda *_: "ok", agents=AGENTS, seed=0):
    """The hops that each call of a workflow directly depends on, by the label it was sent with."""
    draw = random.Random(seed)
    team = spec(agents).seat(context(script, delay_s=lambda _: draw.choice((0.0, 1.0, 2.5))))

    async def play():
        await WorkflowTasks().start(workflow, team, name="workflow")

    run_virtual(play())
    label_of = {turn.hop: turn.tags.get("label", turn.hop) for turn in team.turns}
    return {label_of[turn.hop]: {label_of[hop] for hop in turn.after} for turn in team.turns}


def test_each_act_of_a_sequence_depends_on_the_one_before():
    async def workflow(team):
        for label in range(3):
            await team.solver.act("a", label=label)

    assert after(workflow) == {0: set(), 1: {0}, 2: {1}}


def test_parallel_acts_depend_on_what_was_before_and_what_follows_on_all_of_them():
    async def workflow(team):
        await team.solver.act("a", label="draft")
        await asyncio.gather(*(team.solver.act("b", label=label) for label in ("left", "right")))
        await team.solver.act("c", label="end")

    assert after(workflow) == {"draft": set(), "left": {"draft"}, "right": {"draft"}, "end": {"left", "right"}}


@pytest.mark.parametrize("seed", range(5))
def test_rounds_of_parallel_acts_follow_one_another_though_no_act_stands_between_them(seed):
    async def speak(team, label):
        await asyncio.sleep(team.rng.random())
        await team.solver.act("a", label=label)

    async def debate(team):
        for number in range(2):
            async with asyncio.TaskGroup() as speakers:
                for side in "ab":
                    speakers.create_task(speak(team, f"{side}{number}"))

    everyone = {"a0", "b0"}
    assert after(debate, seed=seed) == {"a0": set(), "b0": set(), "a1": everyone, "b1": everyone}


def test_a_task_that_goes_on_is_not_known_yet():
    async def workflow(team):
        slow = asyncio.create_task(team.solver.act("a", label="slow"))
        await asyncio.sleep(0)  # It is sent.
        await team.solver.act("b", label="meanwhile")
        await slow
        await team.solver.act("c", label="end")

    assert after(workflow) == {"slow": set(), "meanwhile": set(), "end": {"slow", "meanwhile"}}


def test_what_a_task_was_told_is_known_when_it_has_ended():
    async def twice(team):
        await team.solver.act("a", label="first")
        await asyncio.sleep(100)
        await team.solver.act("b", label="second")

    async def workflow(team):
        going_on = asyncio.create_task(twice(team))
        await asyncio.sleep(50)
        await team.solver.act("c", label="meanwhile")
        await going_on
        await team.solver.act("d", label="end")

    expected = {"first": set(), "second": {"first"}, "meanwhile": set(), "end": {"second", "meanwhile"}}
    assert after(workflow) == expected


def test_the_calls_of_a_tool_loop_are_a_chain():
    async def workflow(team):
        await team.solver.act("1+1")

    script = says("calc(1+1)", "calc(2+1)", "3")
    assert after(workflow, script, {"solver": CALCULATOR}) == {0: set(), 1: {0}, 2: {1}}


def test_a_call_depends_on_the_turn_whose_tokens_it_extends():
    async def workflow(team):
        first = asyncio.create_task(team.judge.act("a", label="first"))
        said = asyncio.Event()
        first.add_done_callback(lambda _: said.set())
        await asyncio.gather(_judge_again(team, said), asyncio.sleep(0))

    async def _judge_again(team, said):
        await said.wait()  # Not the creator of the first task: nothing but the judge's memory tells of it.
        await team.judge.act("b", label="second")

    assert after(workflow) == {"first": set(), "second": {"first"}}


def test_of_a_call_that_fails_nobody_learns_anything():
    async def workflow(team):
        await team.solver.act("a", label="before")
        with pytest.raises(EngineError):
            await team.solver.act("b")
        await team.solver.act("c", label="end")

    assert after(workflow, says("ok", "!gone", "ok")) == {"before": set(), "end": {"before"}}


PROGRAM = st.recursive(
    st.just("act"), lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner), max_leaves=12
)
"""An act; a list: one after the other; a tuple: at once."""


@given(program=PROGRAM, seed=st.integers(0, 99))
def test_any_workflow_depends_as_it_is_written(program, seed):
    expected: dict[int, set[int]] = {}
    labels = iter(range(100))

    def label(step):
        return next(labels) if step == "act" else type(step)(map(label, step))

    def ancestors(step, known):
        """Fills in what every act of the step knows; returns what is known after it."""
        if isinstance(step, int):
            expected[step] = set(known)
            return known | {step}
        if isinstance(step, tuple):
            return known.union(*(ancestors(part, known) for part in step))
        for part in step:
            known = ancestors(part, known)
        return known

    async def play(team, step):
        if isinstance(step, int):
            await team.solver.act("a", label=step)
        elif isinstance(step, tuple):
            await asyncio.gather(*(play(team, part) for part in step))
        else:
            for part in step:
                await play(team, part)

    labelled = label(program)
    ancestors(labelled, frozenset())
    direct = after(lambda team: play(team, labelled), seed=seed)

    def known(call):
        return direct[call].union(*(known(before) for before in direct[call]))

    assert {call: known(call) for call in direct} == expected
    for call, before in direct.items():
        assert not any(one in known(other) for one in before for other in before), f"{call}: {before} is not direct"
