"""The turns of plan_path: the planner says where to go, the executor goes there, until it has arrived.

    map ──► planner ──► plan, e.g. "NE" ──► executor, with what it sees ──► moves, e.g. "LR" ──► map ...

Each is rewarded for what its own words changed. Take the place that a plan leads to as the state after the planner's
turn; then a plan earns the worth of that place less that of the place before, and the moves earn the worth of where
they led less that of where the plan would have led. Besides, each pays for its own faults: the planner for a plan that
runs into a wall, the executor for running into one. In each round the two rewards add up to the environment's own.
"""

from typing import Any

from flexmarl.agents.team import Team
from flexmarl.agents.tree_sampling import turn
from flexmarl.records import Task

BLOCKED = 0.5
"""For each wall in the way of a plan."""


@turn("plan_path")
async def plan_or_move(task: Task, team: Team) -> bool:
    """The planner's turn if there is no plan, else the executor's. True when the play is over."""
    world: Any = team.environment
    heard = team.executor.state
    if "plan" not in heard:
        said = await team.planner.act(world.map())
        promised, walls = world.promise(said.text)
        said.reward(promised - BLOCKED * walls)
        heard["plan"] = said.text
        return False
    plan = heard.pop("plan")
    promised, _ = world.promise(plan)
    moves = await team.executor.act(told(plan, world.observe()))
    result = world.step(moves.text)
    moves.reward(result.reward - promised)
    team.report(success=float(world.arrived), left=world.distance)
    return result.done


def told(plan: str, view: str) -> str:
    """What the executor is told, in fixed widths: `NE|E.#..` is a plan, where it faces, and what is beside it."""
    return f"{plan[:2]:<2}|{view}"
