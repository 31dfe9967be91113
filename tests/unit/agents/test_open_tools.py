"""Tools are opened once per seat and episode, called at once, and closed with the episode whatever becomes of it."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexmarl.errors import EpisodeError
from flexmarl.records import EpisodeStatus, GroupId, GroupRecord, Spoken, Task
from flexmarl.rollout.player import Player
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.agents import ScriptedModel
from flexmarl.testing.scripted_run import ScriptedRun
from flexmarl.tools import Observation, ToolContext
from flexmarl.tools.interface import max_parallel_of
from flexmarl.tools.open_tools import RunningCalls
from tests.unit.agents.tables import TASK, TOKENIZER, context, says, spec, text

AGENT = {"tools": [{"type": "calculator"}], "syntax": {"type": "tag"}, "tell_tools": "none"}


class Counter:
    """A tool with a state per episode: the number of its calls. It writes down what happens to it."""

    name, description = "calculator", "counts"
    parameters: ClassVar = {"type": "object", "properties": {"s": {"type": "number"}}}

    def __init__(self, *, closing_s: float = 0.0, fault: str = "", max_parallel: int | None = None) -> None:
        self.log: list[Any] = []
        self.closing_s, self.fault, self.max_parallel = closing_s, fault, max_parallel
        self.running = self.most = 0
        self.lasting: list[float] = []
        """Seconds of the calls that are running."""
        self.kinds = 0
        """Most calls of different length that ran at once."""

    @asynccontextmanager
    async def open(self, context: ToolContext) -> AsyncIterator["Bound"]:
        if self.fault == "open":
            raise OSError("no server")
        opener = asyncio.current_task()
        self.log.append(context)
        try:
            yield Bound(self)
        finally:
            assert asyncio.current_task() is opener, "the task that entered a context leaves it"
            await asyncio.sleep(self.closing_s)
            self.log.append("closed")
            if self.fault == "close":
                raise OSError("cannot close")


class Bound:
    def __init__(self, of: Counter) -> None:
        self.of, self.calls = of, 0

    async def call(self, arguments: dict[str, Any]) -> Observation:
        self.calls += 1
        number = self.calls
        self.of.running += 1
        self.of.most = max(self.of.most, self.of.running)
        seconds = arguments.get("s", 0.0)
        self.of.lasting.append(seconds)
        self.of.kinds = max(self.of.kinds, len(set(self.of.lasting)))
        try:
            await asyncio.sleep(seconds)
        finally:
            self.of.running -= 1
            self.of.lasting.remove(seconds)
        return Observation(f"call {number}", data={"number": number})


def call(seconds: float = 0.0) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"s": {seconds}}}}}</tool_call>'


def team_with(tool: Counter, **agent: Any) -> Any:
    team_spec = spec({"solver": {**AGENT, **agent}})
    team_spec.agents["solver"].tools["calculator"] = tool
    return team_spec


def played(tool: Counter, *replies: str, timeout_s: float = 60.0, task: Task = TASK) -> Any:
    async def run(task: Task, team: Any) -> None:
        for _ in range(2):
            await team.solver.act(task.prompt)
        team.solver.reward(1.0)

    team_spec = replace(team_with(tool), run=run)
    model = ScriptedModel(TOKENIZER, says(*replies))
    player = Player(team=team_spec, generate=model, run_seed=1, timeout_s=timeout_s)
    return run_virtual(player.play(GroupRecord(group=GroupId(0), task=task, step=0), 0))


def test_a_tool_is_opened_at_its_first_call_and_closed_at_the_end_of_the_episode() -> None:
    tool = Counter()
    task = Task(input_id="x", prompt="1", data={"files": {"a.txt": "A"}})
    episode = played(tool, call(), "1", call(), "2", task=task)
    assert episode.finished, episode.reason
    opened, closed = tool.log
    assert (opened.episode, opened.files, opened.deadline, closed) == ("g0e0a0", {"a.txt": "A"}, 60.0, "closed")
    idle = Counter()
    assert played(idle, "1", "2").finished
    assert idle.log == [], "a tool that nobody calls is not opened"


def test_the_calls_of_a_message_run_at_once_and_results_keep_their_order() -> None:
    tool = Counter()
    team = team_with(tool).seat(context(says(call(3.0) + call(1.0) + call(2.0), "so")))

    async def timed() -> Any:
        async with team.context.tools.block(1.0):
            reply = await team.solver.act("go")
            return reply, asyncio.get_running_loop().time()

    reply, seconds = run_virtual(timed())
    assert (tool.most, seconds) == (3, 3.0)
    assert [(use.result, use.data) for use in reply.calls] == [(f"call {n}", {"number": n}) for n in (1, 2, 3)]
    shown = text(team.turns[1].prompt_ids)
    assert shown.index("call 1") < shown.index("call 2") < shown.index("call 3")
    assert "number" not in shown, "data never goes into a prompt"
    assert [turn.tool_s for turn in team.turns] == [0.0, 3.0]


@pytest.mark.parametrize("closing_s", [0.0, 1.0, 1000.0])
def test_an_episode_that_is_out_of_time_in_a_call_closes_its_tools(closing_s: float) -> None:
    tool = Counter(closing_s=closing_s)
    episode = played(tool, call(100.0), timeout_s=10.0)
    assert episode.status is EpisodeStatus.TIMED_OUT
    assert tool.running == 0, "the call was cancelled"
    assert len(tool.log) == (1 if closing_s == 1000.0 else 2), "one that does not close in its grace period is cut"


def test_a_tool_that_cannot_be_opened_fails_the_episode() -> None:
    episode = played(Counter(fault="open"), call())
    assert episode.status is EpisodeStatus.FAILED
    assert episode.reason == "tool 'calculator' of agent 'solver': OSError: no server"


def test_a_tool_that_fails_when_it_is_closed_fails_the_episode() -> None:
    episode = played(Counter(fault="close"), call(), "1", "2")
    assert episode.status is EpisodeStatus.FAILED
    assert episode.reason == "a tool failed when it was closed: OSError: cannot close"


def test_one_of_several_calls_that_fails_fails_the_act_with_its_error() -> None:
    class Torn(Counter):
        @asynccontextmanager
        async def open(self, context: ToolContext) -> AsyncIterator[Bound]:
            bound = Bound(self)

            async def torn(arguments: dict[str, Any]) -> Observation:
                if arguments.get("s") == 2.0:
                    raise OSError("torn")
                await asyncio.sleep(9.0)
                raise AssertionError("it was cancelled")

            bound.call = torn  # type: ignore[method-assign]
            yield bound

    team = team_with(Torn()).seat(context(says(call(1.0) + call(2.0))))
    with pytest.raises(EpisodeError, match=r"tool 'calculator' of agent 'solver': OSError: torn"):
        run_virtual(team.solver.act("go"))


def test_sixty_four_calls_of_one_message_are_all_answered() -> None:
    tool = Counter()
    team = team_with(tool, max_tool_calls=8).seat(context(says(call() * 64, "so"), sampling={"max_tokens": 10_000}))
    reply = run_virtual(team.solver.act("go"))
    assert [use.run for use in reply.calls] == [True] * 8 + [False] * 56
    assert dict(team.signals()[team.turns[0].sample_id]) == {"dropped_tool_calls": 56 / 64, "tool_calls": 8.0}


def test_files_that_are_none_fail_the_episode() -> None:
    episode = played(Counter(), call(), task=Task(input_id="x", prompt="1", data={"files": ["a"]}))
    assert "its field 'files' must map names to texts or bytes" in episode.reason


class Says:
    """A tool that says what it is told, at a cost of half a unit."""

    name, description = "calculator", "says"
    parameters: ClassVar = {"type": "object", "properties": {"s": {"type": "string"}}}

    def open(self, context: ToolContext) -> Any:
        return nullcontext(self)

    async def call(self, arguments: dict[str, Any]) -> Observation:
        return Observation(arguments["s"], cost=math.nan if arguments["s"] == "nan" else 0.5, dropped=3)


def used(*results: str, **settings: Any) -> tuple[Any, Any]:
    """The calls that an agent makes in one message, and the team."""
    calls = "".join(TAG.format(json.dumps({"s": result})) for result in results)
    team = team_with(Says(), **settings).seat(context(says(calls, "so"), sampling={"max_tokens": 100_000}))
    return run_virtual(team.solver.act("go")).calls, team


TAG = '<tool_call>{{"name": "calculator", "arguments": {0}}}</tool_call>'


@given(length=st.integers(0, 400), most=st.integers(64, 200))
def test_a_long_result_keeps_head_and_tail_and_says_how_much_is_left_out(length: int, most: int) -> None:
    result = "".join(chr(ord("a") + number % 26) for number in range(length))
    ((use,), team) = used(result, max_result_chars=most)
    assert len(use.result) <= most or length <= most
    assert use.result in text(team.turns[-1].prompt_ids)
    if length <= most:
        assert (use.result, use.dropped) == (result, 3)
        return
    head, note, tail = re.split(r"( \.\.\. \[\d+ characters left out\] \.\.\. )", use.result)
    left_out = int(re.findall(r"\d+", note)[0])
    assert use.dropped == 3 + left_out == 3 + length - len(head) - len(tail)
    assert result.startswith(head)
    assert result.endswith(tail)
    assert abs(len(head) - len(tail)) <= 1


def test_what_the_calls_of_a_message_cost_is_a_signal_of_the_turn_that_made_them() -> None:
    (calls, team) = used("a", "b", "c")
    assert [use.cost for use in calls] == [0.5, 0.5, 0.5]
    assert [dict(found) for found in team.signals().values()] == [{"tool_calls": 3.0, "tool_cost": 1.5}, {}]
    with pytest.raises(EpisodeError, match="the cost of a call must be a finite number, got nan"):
        used("nan")


@pytest.mark.parametrize(
    ("at_once", "of_the_tool", "most"),
    [(None, None, 12), (5, None, 5), (1, None, 1), (None, 3, 3), (5, 3, 3), (2, 3, 2)],
)
def test_no_more_calls_run_at_once_than_the_run_and_the_tool_allow(
    at_once: int | None, of_the_tool: int | None, most: int
) -> None:
    """Three episodes make four calls each in one message. All are answered."""
    tool = Counter(max_parallel=of_the_tool)

    async def act(task: Task, team: Any) -> None:
        reply = await team.solver.act(task.prompt)
        assert [use.run for use in reply.calls] == [True] * 4
        team.solver.reward(1.0)

    def answer(prompt: str, request: Any) -> str:
        return "so" if "<|tool|>" in prompt else call(1.0) * 4

    player = Player(
        team=replace(team_with(tool, sampling={"max_tokens": 10_000}), run=act),
        generate=ScriptedModel(TOKENIZER, answer),
        run_seed=0,
        timeout_s=600.0,
        running=RunningCalls(at_once),
    )
    group = GroupRecord(group=GroupId(0), task=TASK, step=0)

    async def play() -> list[Any]:
        return await asyncio.gather(*(player.play(group, index) for index in range(3)))

    episodes = run_virtual(play())
    assert [episode.reason for episode in episodes] == [""] * 3
    assert tool.most == most


BOUNDS = st.none() | st.integers(1, 3)


@given(
    at_once=BOUNDS,
    bounds=st.tuples(BOUNDS, BOUNDS),
    calls=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=24),
)
def test_calls_keep_every_bound_and_none_waits_longer_than_all_others_run(
    at_once: int | None, bounds: tuple[int | None, int | None], calls: list[tuple[int, int, int]]
) -> None:
    """A call is (tool, second of its arrival, seconds). Calls of one tool begin in the order of their arrival."""
    places, tools = RunningCalls(at_once), [Counter(max_parallel=bound) for bound in bounds]
    for number, tool in enumerate(tools):
        tool.name = f"tool_{number}"
    begun: dict[int, list[int]] = {0: [], 1: []}

    async def use(number: int, index: int, arrives: int, seconds: int) -> None:
        tool = tools[number]
        await asyncio.sleep(arrives)
        async with (
            places.place(tool.name, max_parallel_of(tool)),
            tool.open(ToolContext(episode="g0e0a0", seed=0)) as bound,
        ):
            waited = asyncio.get_running_loop().time() - arrives
            assert waited <= sum(other for at, (_, _, other) in enumerate(calls) if at != index)
            begun[number].append(index)
            await bound.call({"s": seconds})
            assert at_once is None or tools[0].running + tools[1].running < at_once

    async def play() -> None:
        async with asyncio.TaskGroup() as group:
            for index, (number, arrives, seconds) in enumerate(calls):
                group.create_task(use(number, index, arrives, seconds))

    run_virtual(play())
    for number, (tool, bound) in enumerate(zip(tools, bounds, strict=True)):
        in_order = sorted((arrives, index) for index, (of, arrives, _) in enumerate(calls) if of == number)
        assert begun[number] == [index for _, index in in_order]
        assert tool.most <= min(bound or len(calls), at_once or len(calls))


def test_calls_in_the_line_of_one_tool_keep_no_other_tool_waiting() -> None:
    """Two calls run at once. Of the slow tool one: the other place is free for the quick tool all the time."""
    places, slow, quick = RunningCalls(2), Counter(max_parallel=1), Counter()
    quick.name = "quick"

    async def use(tool: Counter, seconds: float) -> float:
        async with places.place(tool.name, max_parallel_of(tool)):
            await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    async def play() -> list[float]:
        return await asyncio.gather(*[use(slow, 10.0) for _ in range(3)], *[use(quick, 1.0) for _ in range(3)])

    assert run_virtual(play()) == [10.0, 20.0, 30.0, 1.0, 2.0, 3.0]


def test_an_episode_that_is_out_of_time_leaves_the_line_of_its_tool() -> None:
    """The first call runs for 9 s, the second waits for 5 s and is given up, and the third begins at 9 s."""
    tool, places = Counter(max_parallel=1), RunningCalls()
    group = GroupRecord(group=GroupId(0), task=TASK, step=0)

    async def act(task: Task, team: Any) -> None:
        await team.solver.act(task.prompt)
        team.solver.reward(1.0)

    def player(timeout_s: float) -> Player:
        model = ScriptedModel(TOKENIZER, lambda prompt, _: "so" if "<|tool|>" in prompt else call(9.0))
        return Player(
            team=replace(team_with(tool), run=act), generate=model, run_seed=0, timeout_s=timeout_s, running=places
        )

    async def play() -> tuple[list[EpisodeStatus], float]:
        limits = (60.0, 5.0, 60.0)
        episodes = await asyncio.gather(*(player(limit).play(group, index) for index, limit in enumerate(limits)))
        return [episode.status for episode in episodes], asyncio.get_running_loop().time()

    statuses, ended = run_virtual(play())
    assert statuses == [EpisodeStatus.FINISHED, EpisodeStatus.TIMED_OUT, EpisodeStatus.FINISHED]
    assert (tool.most, ended) == (1, 18.0)


@pytest.mark.parametrize(("max_parallel", "most"), [(None, 4), (3, 3)])
def test_the_bound_of_a_tool_holds_for_the_whole_run_evaluations_included(max_parallel: int | None, most: int) -> None:
    tool = Counter(max_parallel=max_parallel)

    async def act(task: Task, team: Any) -> None:
        reply = await team.solver.act(task.prompt)
        reply.reward(1.0)
        team.report(success=1.0)

    run = ScriptedRun(
        act,
        lambda prompt, _: "so" if "<|tool|>" in prompt else call(2.0 if "test" in prompt else 3.0),
        steps=4,
        mode="async",
        batch={"groups": 2, "episodes": 2},
        evaluate={"tasks": 4, "every": 1},
        team={"agents": {"solver": {"policy": "solver", **AGENT}}, "workflow": {"type": "custom", "name": "scripted"}},
    )
    run.blueprint.team.agents["solver"].tools["calculator"] = tool
    run.play()
    assert tool.kinds == 2, "calls of training and of evaluations ran at the same time"
    assert tool.most == most if max_parallel else tool.most >= most
    assert [run.metrics[step]["eval/team/success"] for step in range(5)] == [1.0] * 5
    assert run.outcome is not None
    assert run.outcome.steps == 4


OPENING = (Spoken("system", "In metres."), Spoken("user", "Hi"), Spoken("assistant", "Hello"))


@pytest.mark.parametrize("remembers", ["none", "full", {"last": 1}])
def test_a_conversation_begins_with_what_the_task_says_before_its_prompt(remembers: Any) -> None:
    agents = {"solver": {"system": "Solve.", "context": remembers}, "judge": {"system": "Judge.", "hears_task": False}}
    task = Task(input_id="x", prompt="How high?", opening=OPENING)
    team = spec(agents).seat(context(says("3", "4", "yes"), task=task))

    async def acts() -> None:
        for name in ("solver", "solver", "judge"):
            await team[name].act(task.prompt)

    run_virtual(acts())
    first, second, judged = (text(turn.prompt_ids) for turn in team.turns)
    opening = "<|system|>Solve.\n\nIn metres.<|im_end|><|user|>Hi<|im_end|><|assistant|>Hello<|im_end|>"
    asked = "<|user|>How high?<|im_end|><|assistant|>"
    assert first == opening + asked
    assert second == opening + (asked + "3<|im_end|>" if remembers != "none" else "") + asked
    assert judged == f"<|system|>Judge.<|im_end|>{asked}"
