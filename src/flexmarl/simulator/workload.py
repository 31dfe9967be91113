"""Workload as tasks and a workflow: each task holds a plan of calls, and the workflow makes these calls.

    tasks: {type: generator, name: workload, params: {agents: {planner: 0.7, writer: 0.3}, turns_min: 2, len_mean: 300}}
    team: {workflow: {type: custom, name: call_graph}, agents: {planner: {policy: planner}, writer: {policy: writer}}}

`params: {recorded: runs/NAME}` plays the calls of a run's journal instead (plan.py). Each prompt asks for a length in
words, `write 313 tokens`, and simulated replies of `type: asked` have that length.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexmarl.agents import Team, workflow
from flexmarl.errors import ConfigError
from flexmarl.records import Task, split_trajectory_id
from flexmarl.simulator.plan import Plan, WorkloadSettings, draw_plan, recorded_plan
from flexmarl.tasks import Split, task_generator


@task_generator("workload")
def planned_task(seed: int, index: int, split: Split, **params: Any) -> Task:
    """Makes task number `index`. `params` are those of WorkloadSettings, or `recorded`, the folder of a run."""
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=f"{split} query {index}",
        data={"plan": plan_of(params, seed, index, split)},
    )


def plan_of(params: Mapping[str, Any], seed: int, index: int, split: Split) -> Plan:
    """Returns the plan of one task. Raises ConfigError naming the key under `tasks.params`."""
    if "recorded" in params:
        if others := sorted(params.keys() - {"recorded"}):
            raise ConfigError(f"tasks.params.{others[0]}: `recorded` takes everything from the run; leave it out")
        return recorded_plan(Path(params["recorded"]), index)
    return draw_plan(settings_of(params), seed, index, split)


def settings_of(params: Mapping[str, Any]) -> WorkloadSettings:
    """Reads the workload in `tasks.params`. Raises ConfigError naming the first wrong key."""
    try:
        return WorkloadSettings.model_validate(params)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(["tasks.params", *map(str, first["loc"])])
        shown = "" if first["type"] == "missing" else f", got {first['input']!r}"
        known = f"; there are: {', '.join(WorkloadSettings.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{key}: {first['msg'].removeprefix('Value error, ')}{shown}{known}") from None


@workflow("call_graph")
async def call_graph(task: Task, team: Team) -> None:
    """Makes the calls of the task's plan, one after another.

    Nothing can be learned: every call of an episode gets the same random reward.
    """
    plan: Plan = task.data["plan"]
    _, trajectory, _ = split_trajectory_id(team.context.trajectory_id)
    reward = team.rng.random()
    for call in plan.calls(trajectory):
        reply = await team[call.agent].act(f"{task.prompt}: write {call.tokens} tokens")
        reply.reward(reward)
        await asyncio.sleep(call.pause_s)
    team.report(success=reward)
