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
from flexmarl.errors import ConfigError
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution
from flexmarl.tools import Calculator, Observation, Tool, ToolContext

AS_IS: Final = "as_is"
PURE = (Calculator,)
"""Tools that only compute and never wait: they can be called in virtual time."""


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

    tool: Tool
    twin: ToolTwin
    stream: str

    @property
    def name(self) -> str:
        """The tool's own name."""
        return self.tool.name

    @property
    def description(self) -> str:
        """The tool's own description."""
        return self.tool.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The tool's own parameters."""
        return self.tool.parameters

    def open(self, context: ToolContext) -> AbstractAsyncContextManager["_Twin"]:
        """The twin itself."""
        return nullcontext(self)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Sleeps the call's latency, then answers."""
        said = ",".join(value if isinstance(value, str) else json.dumps(value) for value in arguments.values())
        await asyncio.sleep(self.twin.latency_s.draw(random.Random(f"{self.stream}/{said}")))
        if self.twin.result != AS_IS:
            return Observation(self.twin.result)
        assert isinstance(self.tool, PURE), "the settings were checked"
        return await self.tool.call(arguments)


def twinned(team: TeamSpec, twins: Mapping[str, ToolTwin], seed: int) -> TeamSpec:
    """Returns the team with a twin for each of its tools. Raises ConfigError for a tool that cannot have one.

    `twins` has each tool's model by the name that agents call; a calculator needs none.
    """
    names = {name for agent in team.agents.values() for name in agent.tools}
    if unknown := set(twins) - names:
        raise ConfigError(
            f"simulation.tools.{min(unknown)}: no agent has a tool of that name; there are: "
            f"{', '.join(sorted(names)) or 'none'}"
        )
    return replace(
        team,
        agents={
            name: replace(
                agent,
                tools={
                    tool.name: _Twin(tool, _twin_of(tool, twins), f"{seed}/{name}/{tool.name}")
                    for tool in agent.tools.values()
                },
            )
            for name, agent in team.agents.items()
        },
    )


def _twin_of(tool: Tool, twins: Mapping[str, ToolTwin]) -> ToolTwin:
    pure = isinstance(tool, PURE)
    twin = twins.get(tool.name) or (ToolTwin() if pure else None)
    if twin is None:
        raise ConfigError(
            f"simulation.tools.{tool.name} is missing: '{tool.name}' takes real time, and virtual time cannot wait for "
            f"it; give its twin, e.g. {{latency_s: {{shape: exponential, mean: 0.5}}, result: done}}"
        )
    if twin.result == AS_IS and not pure:
        raise ConfigError(
            f"simulation.tools.{tool.name}.result is '{AS_IS}', which only a tool that just computes can be asked for "
            f"({', '.join(kind.__name__ for kind in PURE)}); give the text that it answers"
        )
    return twin
