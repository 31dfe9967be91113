import asyncio
import math
import re
import threading
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.agents import TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.errors import EpisodeError
from flexmarl.records import AgentName, PolicyName
from flexmarl.simulator.tool_twins import ToolTwin, fitting_twins
from flexmarl.simulator.tool_twins import twinned as twinned_for_real
from flexmarl.simulator.virtual_time import RealTime, run_virtual
from flexmarl.tools import TOOLS, BoundTool, Calculator, Observation, Tool, ToolContext
from flexmarl.tools.interface import max_parallel_of

SOLVER = AgentName("solver")


def twinned(team: TeamSpec, twins: Mapping[str, ToolTwin], seed: int) -> TeamSpec:
    """A team whose twins call nothing for real."""
    return twinned_for_real(team, twins, seed, RealTime())


class Search:
    """A tool that needs the world."""

    name = "search"
    description = "Asks a server."

    parameters: Mapping[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}

    def open(self, context: ToolContext) -> AbstractAsyncContextManager[BoundTool]:
        raise AssertionError("virtual time has no servers")


def team(*others: Tool) -> TeamSpec:
    settings = TeamSettings.model_validate(
        {
            "agents": {
                "solver": {
                    "policy": "p",
                    "tools": [{"type": "calculator"}],
                    "syntax": {"type": "tag"},
                }
            },
            "workflow": {"type": "sequential", "agents": ["solver"]},
        }
    )
    built = TeamSpec.build(settings, {PolicyName("p"): character_renderer()}, [PolicyName("p")])
    agent = built.agents[SOLVER]
    return replace(
        built, agents={SOLVER: replace(agent, tools={**agent.tools, **{tool.name: tool for tool in others}})}
    )


def twins(**settings: Any) -> dict[str, ToolTwin]:
    return {name: ToolTwin.model_validate(twin) for name, twin in settings.items()}


def call(spec: TeamSpec, tool: str, argument: Any) -> tuple[str, float]:
    async def timed() -> tuple[str, float]:
        called = spec.agents[SOLVER].tools[tool]
        (key,) = called.parameters["properties"]
        async with called.open(ToolContext(episode="g0e0a0", seed=0)) as bound:
            said = (await bound.call({key: argument})).shown
        return said, asyncio.get_running_loop().time()

    return run_virtual(timed())


def test_a_calculator_computes_in_no_time() -> None:
    assert call(twinned(team(), {}, seed=0), "calculator", "12*(3+4)") == ("84", 0.0)


def test_a_twin_takes_its_time_and_says_what_it_is_told() -> None:
    spec = twinned(team(Search()), twins(search={"latency_s": 2.5, "result": "nothing found"}), seed=0)
    assert call(spec, "search", "meaning of life") == ("nothing found", 2.5)
    assert spec.agents[SOLVER].tools["search"].description == "Asks a server."


def test_a_twin_has_the_bound_of_its_tool() -> None:
    assert max_parallel_of(twinned(team(), {}, seed=0).agents[SOLVER].tools["calculator"]) is None
    bounded = replace(team().agents[SOLVER], tools={"calculator": Calculator(max_parallel=3)})
    (twin,) = twinned(replace(team(), agents={SOLVER: bounded}), {}, seed=0).agents[SOLVER].tools.values()
    assert max_parallel_of(twin) == 3


def test_the_latency_is_that_of_the_call_and_the_seed() -> None:
    latency = {"shape": "lognormal", "mean": 1.0, "cap": 9.0}
    took = {
        (seed, argument): call(
            twinned(team(), twins(calculator={"latency_s": latency}), seed=seed), "calculator", argument
        )
        for seed in (0, 1)
        for argument in ("1+1", "2+2")
        for _ in range(2)
    }
    again = call(twinned(team(), twins(calculator={"latency_s": latency}), seed=0), "calculator", "1+1")
    assert took[0, "1+1"] == again
    assert len({seconds for _, seconds in took.values()}) == 4


class Counted:
    """A tool with a task, a process and a state of its own, none of which virtual time has."""

    name = "counted"
    description = "Counts words."
    parameters: Mapping[str, Any] = {"type": "object", "properties": {"text": {"type": "string"}}}

    def __init__(self) -> None:
        self.open_in: list[object] = []
        self.calls = 0

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator[BoundTool]:
        assert context.deadline == math.inf, "an instant of another clock"
        async with asyncio.timeout(60):  # Raises RuntimeError if another task leaves the block.
            self.open_in.append(asyncio.current_task())
            yield self
            self.open_in.append(asyncio.current_task())

    async def call(self, arguments: Mapping[str, Any]) -> Observation:
        self.calls += 1
        if arguments["text"] == "lost":
            raise EpisodeError("the server is lost")
        started = await asyncio.create_subprocess_exec("wc", "-w", stdin=PIPE, stdout=PIPE)
        said, _ = await started.communicate(arguments["text"].encode())
        return Observation(said.decode().strip(), data={"call": self.calls})


def test_a_tool_that_is_called_for_real_says_what_it_says_in_the_modelled_time() -> None:
    tool, real_twins = Counted(), twins(counted={"latency_s": 2.5, "result": "real"})
    assert fitting_twins(team(tool), real_twins) == ([], real_twins)
    with RealTime() as real:
        spec = twinned_for_real(team(tool), real_twins, 0, real)
        assert call(spec, "counted", "three words here") == ("3", 2.5)
        assert call(spec, "counted", "two words") == ("2", 2.5)
        with pytest.raises(EpisodeError, match="the server is lost"):
            call(spec, "counted", "lost")
        assert len(tool.open_in) == 5, "the block that failed was left by its error"
        first, left, second, *_ = tool.open_in
        assert first is left is not second, "each block is left by the task that entered it"
        assert any(thread.name == "real time" for thread in threading.enumerate())
    assert all(thread.name != "real time" for thread in threading.enumerate())


def test_a_tool_that_cannot_be_opened_for_real_fails_the_episode() -> None:
    with RealTime() as real:
        spec = twinned_for_real(team(Search()), twins(search={"result": "real"}), 0, real)
        with pytest.raises(AssertionError, match="virtual time has no servers"):
            call(spec, "search", "x")


def test_real_time_ends_what_was_begun_in_it() -> None:
    ended: list[str] = []

    async def begun() -> asyncio.Task[None]:
        async def lasting() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append("ended")

        task = asyncio.ensure_future(lasting())
        await asyncio.sleep(0)
        return task

    with RealTime() as real:
        task = real.run(begun())
        assert not task.done()
    assert ended == ["ended"]


def doubled(number: int) -> int:
    """Doubles a number."""
    return 2 * number


def pure_tool(function: Callable[..., Any]) -> Tool:
    TOOLS.register(function.__name__, pure=True)(function)
    return TOOLS[function.__name__]()  # type: ignore[call-arg]


def test_a_function_that_only_computes_is_called_in_no_time_or_in_the_time_of_its_twin() -> None:
    spec = team(pure_tool(doubled))
    assert fitting_twins(spec, {}) == ([], {})
    assert call(twinned(spec, {}, seed=0), "doubled", 21) == ("42", 0.0)
    timed = twins(doubled={"latency_s": 1.5})
    assert fitting_twins(spec, timed) == ([], timed)
    assert call(twinned(spec, timed, seed=0), "doubled", 21) == ("42", 1.5)
    assert call(twinned(spec, twins(doubled={"result": "none"}), seed=0), "doubled", 21) == ("none", 0.0)


def test_a_tool_without_a_twin_is_an_error_that_says_what_would_work() -> None:
    (line,), fitting = fitting_twins(team(Search()), {})
    assert re.match(r"simulation\.tools\.search is missing: .*latency_s.*@tool\(pure=True\)", line)
    assert fitting_twins(team(Search()), fitting) == ([], fitting)


def test_a_tool_that_needs_the_world_cannot_be_asked_as_it_is() -> None:
    (line,), fitting = fitting_twins(team(Search()), twins(search={"latency_s": 1.0}))
    assert line.startswith("simulation.tools.search.result is 'as_is'")
    assert fitting["search"].latency_s.mean == 1.0


def test_a_twin_of_nothing_is_an_error_that_names_the_tools() -> None:
    (line,), fitting = fitting_twins(team(), twins(serach={"result": "x"}))
    assert re.match(r"simulation\.tools\.serach: no agent has .*there are: calculator", line)
    assert fitting == {}


NAMES = ["calculator", "search", "serach"]


@given(st.dictionaries(st.sampled_from(NAMES), st.sampled_from([{}, {"result": "x"}, {"latency_s": 2.0}])))
def test_each_wrong_twin_has_a_line_and_the_twins_that_would_do_do(given_: dict[str, Any]) -> None:
    settings = twins(**given_)
    lines, fitting = fitting_twins(team(Search()), settings)
    answers = "result" in given_.get("search", {})
    wrong = ({"serach"} & given_.keys()) | (set() if answers else {"search"})
    assert {line.split(".")[2].split(":")[0].split(" ")[0] for line in lines} == wrong
    assert len(lines) == len(wrong)
    assert fitting_twins(team(Search()), fitting) == ([], fitting)
    assert {name: fitting[name] for name in settings.keys() - wrong} == {
        name: settings[name] for name in settings.keys() - wrong
    }
