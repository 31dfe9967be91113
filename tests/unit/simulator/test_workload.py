"""Workloads as data: what a plan holds, how it is played, and what a journal gives back."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexmarl.errors import ConfigError
from flexmarl.events.journal import Journal
from flexmarl.events.run_events import RunFailed
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Called
from flexmarl.records import FinishReason, Purpose, split_sample_id
from flexmarl.simulator.plan import DrawnPlan, PlannedCall, WorkloadSettings, draw_plan, plans_in
from flexmarl.simulator.workload import call_graph, planned_task
from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.testing.scripted_run import ScriptedRun
from tests.calls import a_call

TWO = {"planner": 0.75, "writer": 0.25}
THREE_TURNS = {"agents": TWO, "turns_min": 3, "sigma_query": 0.0, "sigma_traj": 0.0, "sigma_call": 0.0}


def plans(number: int, **params: Any) -> list[DrawnPlan]:
    workload = WorkloadSettings(**{"agents": TWO, **params})
    return [draw_plan(workload, 7, index, "train") for index in range(number)]


@given(seed=st.integers(0, 1000), index=st.integers(0, 10**6), trajectory=st.integers(0, 500))
@settings(max_examples=50, deadline=None)
def test_a_plan_depends_on_seed_task_and_trajectory_alone(seed: int, index: int, trajectory: int):
    workload = WorkloadSettings(agents=TWO, turns_extra=2.0)
    plan = draw_plan(workload, seed, index, "train")
    for other in range(3):  # Whatever was drawn before.
        plan.calls(other)
    assert plan.calls(trajectory) == draw_plan(workload, seed, index, "train").calls(trajectory)
    assert plan.calls(trajectory) != plan.calls(trajectory + 1)
    assert plan.calls(trajectory) != draw_plan(workload, seed, index, "held_out").calls(trajectory)


def test_all_episodes_of_a_task_have_as_many_turns_and_tasks_differ_by_the_exponential():
    drawn = plans(2000, turns_min=2, turns_extra=1.0, turns_max=6)
    turns = [{len(plan.calls(trajectory)) for trajectory in range(3)} for plan in drawn]
    assert all(len(numbers) == 1 for numbers in turns)
    numbers = Counter(min(numbers) for numbers in turns)
    # round(Exp(1)) is 0 below 0.5: a share of 1 - exp(-0.5) = 0.393.
    assert numbers[2] / 2000 == pytest.approx(0.393, abs=0.03)
    assert set(numbers) == {2, 3, 4, 5, 6}


def test_agents_are_called_by_their_shares():
    calls = [call for plan in plans(400) for trajectory in range(4) for call in plan.calls(trajectory)]
    counted = Counter(call.agent for call in calls)
    assert counted["planner"] / len(calls) == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(("correlation", "equal"), [(0.0, 0.625), (0.4, 0.685), (1.0, 1.0)])
def test_the_route_is_shared_with_the_chance_of_the_correlation(correlation: float, equal: float):
    """Two episodes call the same agent if both go the common way (c^2), or else by chance (0.75^2 + 0.25^2)."""
    pairs = [
        (one.agent == two.agent)
        for plan in plans(1500, route_correlation=correlation)
        for one, two in zip(plan.calls(0), plan.calls(1), strict=True)
    ]
    assert np.mean(pairs) == pytest.approx(equal, abs=0.03)


def test_lengths_have_their_mean_and_the_effects_they_share():
    drawn = plans(3000, sigma_query=0.4, sigma_traj=0.3, sigma_call=0.5, len_floor=1, len_mean=1000.0)
    logs = np.log([[[call.tokens for call in plan.calls(trajectory)] for trajectory in (0, 1)] for plan in drawn])
    assert np.exp(logs).mean() == pytest.approx(1000, rel=0.03)
    within_query = np.mean((logs[:, 0, 0] - logs[:, 1, 0]) ** 2) / 2
    within_trajectory = np.mean((logs[:, 0, 0] - logs[:, 0, 1]) ** 2) / 2
    assert logs.var() == pytest.approx(0.4**2 + 0.3**2 + 0.5**2, rel=0.1)
    assert within_query == pytest.approx(0.3**2 + 0.5**2, rel=0.1)
    assert within_trajectory == pytest.approx(0.5**2, rel=0.1)


def test_lengths_keep_to_floor_and_cap_and_pauses_to_their_mean():
    calls = [
        call
        for plan in plans(1000, sigma_call=2.0, len_floor=100, len_cap=400, tool_mean_s=2.0)
        for call in plan.calls(0)
    ]
    assert min(call.tokens for call in calls) == 100
    assert max(call.tokens for call in calls) == 400
    assert np.mean([call.pause_s for call in calls]) == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "tasks.params.agents: Field required"),
        ({"agents": {"a": -1.0}}, "tasks.params.agents: shares must be at least 0, and one of them above 0"),
        ({"agents": TWO, "turn_min": 2}, r"tasks.params.turn_min: .*got 2; there are: agents, turns_min,"),
        ({"agents": TWO, "len_mean": 0}, "tasks.params.len_mean: .*greater than 0, got 0"),
        ({"agents": TWO, "route_correlation": 2}, "tasks.params.route_correlation: .*less than or equal to 1, got 2"),
        ({"agents": TWO, "turns_min": 20}, "turns_min is 20, above turns_max, which is 16"),
        ({"recorded": "runs/none"}, "tasks.params.recorded: 'runs/none' is no run folder"),
        ({"recorded": "runs/none", "len_mean": 3}, "tasks.params.len_mean: `recorded` takes everything from the run"),
    ],
)
def test_a_wrong_parameter_is_an_error_that_names_its_key(params: dict[str, Any], message: str):
    source = GeneratorTasks(name="workload", params=params).open(seed=0)
    with pytest.raises(ConfigError, match=message):
        source.train(0)


class Words:
    """Answers `write N tokens` with N characters, the end included."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        """Trajectory, agent and tokens of each call."""

    def __call__(self, prompt: str, request: Any) -> str:
        found = re.search(r"write (\d+) tokens", prompt)
        assert found
        trajectory = split_sample_id(request.request_id)[2]
        self.asked.append((trajectory, request.agent, int(found[1])))
        return "x" * (int(found[1]) - 1)


def play(params: dict[str, Any], **sections: Any) -> tuple[ScriptedRun, Words]:
    words = Words()
    agents = {name: {"policy": name, "sampling": {"max_tokens": 9000}} for name in TWO}
    run = ScriptedRun(
        call_graph,
        words,
        agents={name: name for name in TWO},
        team={"agents": agents, "workflow": {"type": "sequential", "agents": list(TWO)}},
        **sections,
    )
    source = GeneratorTasks(name="workload", params=params).open(seed=run.settings.seed)
    run.blueprint = type(run.blueprint)(settings=run.settings, source=source, team=run.blueprint.team)
    return run.play(), words


def test_an_episode_makes_the_calls_of_its_plan_in_their_order_and_pauses_between_them():
    params = {**THREE_TURNS, "len_mean": 20.0, "tool_mean_s": 3.0}
    run, words = play(
        params, batch={"groups": 1, "episodes": 2}, credit={"estimator": {"type": "grpo"}, "filter": None}
    )
    plan = planned_task(0, 0, "train", **params).data["plan"]
    for trajectory in (0, 1):
        calls = plan.calls(trajectory)
        asked = [(agent, tokens) for name, agent, tokens in words.asked if name == f"g0e{trajectory}a0"]
        assert asked == [(call.agent, call.tokens) for call in calls]
    events = [event for event in run.events.of(Called) if event.request.endswith("g0e1a0")]
    gaps = [after.began - before.t for before, after in itertools.pairwise(events)]
    assert gaps == pytest.approx([call.pause_s for call in plan.calls(1)[:-1]], abs=1e-5)
    assert {event.sampled_tokens for event in events} == {20}
    rewards = {row.sample_id: row.values["reward"] for row in run.rows()}
    assert len(set(rewards.values())) == 2, "one for each episode"


def test_a_recorded_journal_gives_the_plan_back(tmp_path: Path):
    params = {"agents": TWO, "turns_min": 2, "turns_extra": 1.0, "len_mean": 50.0}
    run, _ = play(params, batch={"groups": 2, "episodes": 2}, steps=2)
    run.events.save(RunFolder(tmp_path).journal)
    for index in range(6):
        was = planned_task(0, index % 4, "train", **params).data["plan"]
        recorded = planned_task(5, index, "train", recorded=str(tmp_path)).data["plan"]
        for trajectory in range(3):
            calls, expected = recorded.calls(trajectory), was.calls(trajectory % 2)
            assert [(call.agent, call.tokens) for call in calls] == [(call.agent, call.tokens) for call in expected]
            assert [call.pause_s for call in calls[:-1]] == pytest.approx(
                [call.pause_s for call in expected[:-1]], abs=1e-5
            )


def call(request: str, began: float, ended: float, *, policy: str = "solver", **fields: Any) -> Called:
    return replace(a_call(f"{policy}/0", began=began, ended=ended, **{"sampled_tokens": 5, **fields}), request=request)


def test_of_a_journal_only_answered_calls_of_training_count_and_of_each_group_the_last_attempt():
    events = [
        RunFailed(t=0.0),
        call("task_1_0_g3e0a0", 0.0, 1.0),
        call("task_1_0_g3e0a1", 2.0, 3.0, sampled_tokens=8),
        call("task_1_1_g3e0a1", 2.5, 9.0, policy="verifier"),
        call("task_1_2_g3e0a1", 11.0, 12.0),
        call("task_1_3_g3e0a1", 13.0, 14.0, finish=FinishReason.ERROR),
        call("test_1_0_g1000000000e0a0", 5.0, 6.0, purpose=Purpose.EVALUATION),
        call("task_0_0_g1e0a0", 20.0, 21.0),
    ]
    first, second = plans_in(events)
    assert first.calls(0) == (PlannedCall("solver", 5, 0.0),)
    assert second.calls(7) == (
        PlannedCall("solver", 8, 0.0),  # The next was sent before it ended.
        PlannedCall("verifier", 5, 2.0),
        PlannedCall("solver", 5, 0.0),
    )


def test_a_journal_without_a_call_of_training_is_an_error(tmp_path: Path):
    Journal(RunFolder(tmp_path).journal).close()
    with pytest.raises(ConfigError, match="has no answered call of a training step"):
        planned_task(0, 0, "train", recorded=str(tmp_path))
