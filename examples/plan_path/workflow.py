"""The turns of plan_path: the planner says where to go, the executor goes there, until it has arrived.

    map ──► planner ──► plan, e.g. "NE" ──► executor, with what it sees ──► moves, e.g. "LR" ──► map ...

Each is rewarded for what its own words changed. A plan earns what it promises: the worth of the place that it leads to,
less that of the place before; and it pays for each wall in its way. Moves pay for what was promised and not gained, and
for ending elsewhere than the plan does. So in no round do the two earn more than the environment gives.
"""

from typing import Any

from flexmarl.agents.patterns import turn
from flexmarl.agents.team import Team
from flexmarl.records import Task

BLOCKED = 0.5
"""For each wall in the way of a plan."""
ASTRAY = 1.0
"""For moves that end elsewhere than the plan."""


@turn("plan_path")
async def plan_or_move(task: Task, team: Team) -> bool:
    """The planner's turn if there is no plan, else the executor's. True when the play is over."""
    world: Any = team.environment
    heard = team.executor.state
    if "plan" not in heard:
        said = await team.planner.act(world.map())
        promised, _, walls = world.promise(said.text)
        said.reward(promised - BLOCKED * walls)
        heard["plan"] = said.text
        return False
    plan = heard.pop("plan")
    promised, target, _ = world.promise(plan)
    moves = await team.executor.act(told(plan, world.observe()))
    result = world.step(moves.text)
    moves.reward(min(0.0, result.reward - promised) - ASTRAY * (world.place != target))
    team.report(success=float(world.arrived), left=world.distance)
    return result.done


def told(plan: str, view: str) -> str:
    """What the executor is told, in fixed widths: `NE|E.#..` is a plan, where it faces, and what is beside it."""
    return f"{plan[:2]:<2}|{view}"
