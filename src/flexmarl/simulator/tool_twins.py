"""Twins of tools and of scorers: a call takes a modelled time, and answers a fixed text or what the original answers.

An original that only computes is called in place, any other in real time (`RealTime`).
"""

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from pydantic import Field

from flexmarl.agents import TeamSpec
from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.seat_tools import SeatTool
from flexmarl.records import Task
from flexmarl.sandbox.interface import Sandbox
from flexmarl.settings import Settings
from flexmarl.simulator.plan import Distribution
from flexmarl.simulator.virtual_time import RealTime
from flexmarl.tasks import TaskSource
from flexmarl.tasks.scorers import BoxedScorer
from flexmarl.tools import BoundTool, Observation, Tool, ToolContext, is_pure
from flexmarl.tools.interface import max_parallel_of

AS_IS: Final = "as_is"
REAL: Final = "real"


class ToolTwin(Settings):
    """The model of one tool in a simulation."""

    latency_s: Distribution = Field(
        default=Distribution(mean=0.0), description="What a call takes: a number, or a distribution."
    )
    result: str = Field(
        default=AS_IS,
        description="What it answers; as_is: what the tool itself says, if it only computes; real: what it says when "
        "it is called, boxes and servers included, while virtual time stands still.",
    )

    @property
    def for_real(self) -> bool:
        """True if the tool itself is called."""
        return self.result == REAL


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
    real: RealTime
    bound: BoundTool | None = None
    """The tool as it is open for the seat, if it is called for real."""

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator["_Twin"]:
        """The twin itself, with the open tool if that is called for real."""
        if not self.twin.for_real:
            yield self
            return
        with self.real.opened(self.tool.open(replace(context, deadline=math.inf))) as bound:  # Not of this clock.
            yield replace(self, bound=bound)

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        """Sleeps the call's latency, then answers."""
        said = ",".join(value if isinstance(value, str) else json.dumps(value) for value in arguments.values())
        await asyncio.sleep(self.twin.latency_s.draw(random.Random(f"{self.stream}/{said}")))
        if self.bound is not None:
            return self.real.run(self.bound.call(arguments))
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
                f"function with @tool(pure=True)); give the text that it answers, or {REAL} to call it"
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


def twinned(team: TeamSpec, twins: Mapping[str, ToolTwin], seed: int, real: RealTime) -> TeamSpec:
    """Returns the team with a twin for each of its tools. `fitting_twins` finds no fault with these twins."""

    def twin_of(tool: Tool, agent: str) -> _Twin:
        twin, stream = twins.get(tool.name, ToolTwin()), f"{seed}/{agent}/{tool.name}"
        return _Twin(tool.name, tool.description, tool.parameters, tool, twin, stream, max_parallel_of(tool), real)

    agents = {
        name: replace(agent, tools={**agent.tools, **{tool.name: twin_of(tool, name) for tool in _opened(agent)}})
        for name, agent in team.agents.items()
    }
    return replace(team, agents=agents)


@dataclass(frozen=True, slots=True)
class _TwinScorer:
    """A scorer that needs a box. Its score is computed for real, and takes a modelled time."""

    scorer: Any  # BoxedScorer and Scorer in one.
    seconds: Distribution
    real: RealTime

    def __call__(self, answer: str, reference: str) -> float:
        """Raises what the scorer raises: it must be waited for."""
        return self.scorer(answer, reference)

    async def score_in_box(self, answer: str, reference: str, sandbox: Sandbox) -> float:
        """Sleeps the score's time, then computes it. See `BoxedScorer`."""
        await asyncio.sleep(self.seconds.draw(random.Random(f"{reference}/{answer}")))
        return self.real.run(self.scorer.score_in_box(answer, reference, sandbox))


@dataclass(frozen=True, slots=True)
class TwinnedTasks:
    """The tasks of a source, with twins of the scorers that need boxes."""

    source: TaskSource
    seconds: Distribution
    real: RealTime

    @property
    def num_train(self) -> int | None:
        """See `TaskSource`."""
        return self.source.num_train

    def train(self, index: int) -> Task:
        """See `TaskSource`."""
        return self._twinned(self.source.train(index))

    def held_out(self, n: int) -> tuple[Task, ...]:
        """See `TaskSource`."""
        return tuple(map(self._twinned, self.source.held_out(n)))

    def _twinned(self, task: Task) -> Task:
        boxed = isinstance(task.scorer, BoxedScorer)
        return replace(task, scorer=_TwinScorer(task.scorer, self.seconds, self.real)) if boxed else task
