"""Twins of tools: a call takes a modelled time, and answers a fixed text or what a tool that only computes answers."""

import asyncio
import json
import random
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import Field

from flexmarl.agents import TeamSpec
from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.seat_tools import SeatTool
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution
from flexmarl.tools import Observation, Tool, ToolContext, is_pure
from flexmarl.tools.interface import max_parallel_of

AS_IS: Final = "as_is"


class ToolTwin(Settings):
    """The model of one tool in a simulation."""

    latency_s: Distribution = Field(
        default=Distribution(mean=0.0), description="What a call takes: a number, or a distribution."
    )
    result: str = Field(
        default=AS_IS, description="What it answers; as_is: what the tool itself says, if it only computes."
    )


@dataclass(frozen=True, slots=True)
class _Twin:
    """A tool in virtual time. The same call by the same agent always takes the same time."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    tool: Tool
    twin: ToolTwin
    stream: str
    max_parallel: int | None

    def open(self, context: ToolContext) -> AbstractAsyncContextManager["_Twin"]:
        """The twin itself."""
        return nullcontext(self)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Sleeps the call's latency, then answers."""
        said = ",".join(value if isinstance(value, str) else json.dumps(value) for value in arguments.values())
        await asyncio.sleep(self.twin.latency_s.draw(random.Random(f"{self.stream}/{said}")))
        if self.twin.result != AS_IS:
            return Observation(self.twin.result)
        bound: Any = self.tool  # A tool that only computes has no state: it need not be opened.
        return await bound.call(arguments)


def fitting_twins(team: TeamSpec, twins: Mapping[str, ToolTwin]) -> tuple[list[str], dict[str, ToolTwin]]:
    """Returns a line for each twin that is missing or wrong, and the twins with those that would do in their place.

    `twins` has each tool's model by the name that agents call; a tool that only computes needs none.
    """
    tools = {tool.name: is_pure(tool) for agent in team.agents.values() for tool in _opened(agent)}
    known = f"there are: {', '.join(sorted(tools)) or 'none'}"
    faults = {name: f": no agent has a tool of that name; {known}" for name in twins if name not in tools}
    instead: dict[str, ToolTwin] = {}
    for name in (name for name, pure in tools.items() if not pure):
        twin = twins.get(name, ToolTwin(latency_s=Distribution(shape="exponential", mean=0.5)))
        if twin.result == AS_IS:
            instead[name] = twin.model_copy(update={"result": "done"})
            faults[name] = (
                f".result is '{AS_IS}', which only a tool that just computes can be asked for (a calculator, a "
                f"function with @tool(pure=True)); give the text that it answers"
                if name in twins
                else f" is missing: '{name}' takes real time, and virtual time cannot wait for it; give its twin, e.g. "
                f"{{latency_s: {{shape: exponential, mean: 0.5}}, result: done}}; if it only computes, mark its "
                f"function with @tool(pure=True)"
            )
    right = {name: twin for name, twin in twins.items() if name not in faults}
    return [f"simulation.tools.{name}{fault}" for name, fault in faults.items()], right | instead


def _opened(agent: AgentSpec) -> list[Tool]:
    """The tools that wait for something outside of the agent's seat."""
    return [tool for tool in agent.tools.values() if not isinstance(tool, SeatTool)]


def twinned(team: TeamSpec, twins: Mapping[str, ToolTwin], seed: int) -> TeamSpec:
    """Returns the team with a twin for each of its tools. `fitting_twins` finds no fault with these twins."""

    def twin_of(tool: Tool, agent: str) -> _Twin:
        twin, stream = twins.get(tool.name, ToolTwin()), f"{seed}/{agent}/{tool.name}"
        return _Twin(tool.name, tool.description, tool.parameters, tool, twin, stream, max_parallel_of(tool))

    agents = {
        name: replace(agent, tools={**agent.tools, **{tool.name: twin_of(tool, name) for tool in _opened(agent)}})
        for name, agent in team.agents.items()
    }
    return replace(team, agents=agents)
