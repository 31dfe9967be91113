"""What a workflow is, and the table of those that a config can name."""

from collections.abc import Awaitable, Callable

from flexmarl.agents.team import Team
from flexmarl.records import Task
from flexmarl.tasks.registry import Registry

Workflow = Callable[[Task, Team], Awaitable[None]]
"""`async def run(task, team)`: how the agents interact on one task; an exception in it fails the episode."""

WORKFLOWS: Registry[Workflow] = Registry("workflow", setting="team.workflow.name")


def workflow(name: str) -> Callable[[Workflow], Workflow]:
    """Decorator that puts a workflow into the table.

    @workflow("echo")
    async def echo(task: Task, team: Team) -> None:
        reply = await team.solver.act(task.prompt)
        team.solver.reward(task.score(reply.text))
    """
    return WORKFLOWS.register(name)
