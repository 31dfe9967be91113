"""Conformance checks of task sources, tools, syntaxes of tool calls, and environments; small ones to write tests with.

    check_task_source(lambda: MySource(seed=0))
    check_tool(MyTool(), good=[{"expression": "2+2"}])
    check_syntax(MySyntax(), call=ToolCall("calculator", {"expression": "2+2"}))
    check_environment(FakeEnvironment, actions=["left", "right"])

They run without a test framework.
"""

import asyncio
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.tasks import Environment, SourceExhausted, StepResult, TaskSource, check_disjoint
from flexmarl.tools import Incomplete, Malformed, Observation, Syntax, Tool, ToolCall, ToolContext
from flexmarl.tools.arguments import BadArguments, check_schema, fitted


def check_task_source(make: Callable[[], TaskSource], *, num_tasks: int = 100) -> None:
    """Raises AssertionError naming the law that the source breaks in its first `num_tasks` tasks."""
    source = make()
    n = num_tasks if source.num_train is None else min(num_tasks, source.num_train)
    tasks = [source.train(index) for index in range(n)]
    assert [source.train(index) for index in reversed(range(n))] == tasks[::-1], "the position alone decides"
    assert [make().train(index) for index in (0, n - 1)] == [tasks[0], tasks[-1]], "so it does in another instance"
    held_out = source.held_out(num_tasks)
    assert make().held_out(num_tasks) == held_out, "the same tasks are held out in another instance"
    assert source.held_out(1) == held_out[:1], "fewer held-out tasks are the first of more"
    assert len({task.input_id for task in held_out}) == len(held_out), "held-out tasks have ids of their own"
    for task in (*tasks, *held_out):
        assert pickle.loads(pickle.dumps(task)) == task, f"task {task.input_id} crosses processes"
    check_disjoint(source, num_train=n, num_held_out=num_tasks)
    if source.num_train is not None:
        _check_end(source, source.num_train)


def _check_end(source: TaskSource, end: int) -> None:
    try:
        source.train(end)
    except SourceExhausted as error:
        message = str(error)
    else:
        message = "nothing"
    assert str(end) in message, f"past the end is SourceExhausted naming position {end}; the source said {message}"


class FakeTasks:
    """Finite or endless sums: `0+1`, `1+1`, ...; held-out ones have another second term."""

    def __init__(self, num_train: int | None = None) -> None:
        self.num_train = num_train

    def train(self, index: int) -> Task:
        """Returns the task `{index}+1`. Raises SourceExhausted past the end."""
        if self.num_train is not None and index >= self.num_train:
            raise SourceExhausted(f"there are {self.num_train} tasks, none at position {index}")
        return Task(input_id=f"sum-{index}", prompt=f"{index}+1", reference=str(index + 1))

    def held_out(self, n: int) -> tuple[Task, ...]:
        """Returns the first `n` tasks `{index}+2`."""
        return tuple(
            Task(input_id=f"held-out-{index}", prompt=f"{index}+2", reference=str(index + 2)) for index in range(n)
        )


HOSTILE = ("", " ", "\x00", "(" * 10_000, "9" * 10_000, "9**9**9**9", "__import__('os')", "{}", "☃", "\n" * 100)


def check_tool(tool: Tool, *, good: Sequence[Mapping[str, Any] | str]) -> None:
    """Raises AssertionError naming the law that the tool breaks; `good` are arguments that it must understand."""
    assert tool.name.isidentifier(), f"an agent calls a tool by an identifier, not {tool.name!r}"
    assert tool.description.strip(), "a tool says what it does"
    check_schema(tool)
    given = [*good, *HOSTILE]
    arguments = [fitted(one, tool.parameters) for one in given]
    bad = [(one, fit) for one, fit in zip(good, arguments, strict=False) if isinstance(fit, BadArguments)]
    assert not bad, f"{bad[0][0]!r} fits the parameters, but {bad[0][1].reason}"
    asked = [fit for fit in arguments if not isinstance(fit, BadArguments)]
    answers = asyncio.run(_call_at_once(tool, asked))
    for argument, answer in zip(asked, answers, strict=True):
        assert isinstance(answer, Observation), f"a call gives an Observation, not {answer!r}"
        assert isinstance(answer.text, str), f"an observation is text, not {answer.text!r}, for {str(argument)[:40]}"
    for argument, answer in zip(good, answers, strict=False):
        assert answer.ok, f"{argument!r} is understood, but the tool said {answer.shown!r}"


async def _call_at_once(tool: Tool, arguments: Sequence[Mapping[str, Any]]) -> list[Observation]:
    """Calls the tool in two episodes at once."""
    episodes = [ToolContext(episode=f"g0e{index}a0", seed=index) for index in range(2)]
    async with tool.open(episodes[0]) as first, tool.open(episodes[1]) as second:
        answers = await asyncio.gather(*(bound.call(one) for bound in (first, second) for one in arguments))
    return answers[: len(arguments)]


def check_syntax(syntax: Syntax, *, call: ToolCall) -> None:
    """Raises AssertionError naming the law that the syntax breaks; `call` is any call that it can express."""
    text = syntax.render(call)
    assert syntax.parse(f"Let me see. {text}") == (call,), "what is rendered is parsed back"
    assert syntax.parse(f"{syntax.render(call, call)}\n") == (call, call), "so are several calls of one message"
    assert not syntax.stop or text.endswith(syntax.stop), "the engine stops at the end of a call"
    assert syntax.parse("Let me see.") == (), "ordinary text holds no call"
    whole = len(text.removesuffix(syntax.optional_end))
    assert syntax.parse(text[:whole]) == (call,), "without its optional end a call is whole"
    for end in range(whole):
        read = [one for one in syntax.parse(text[:end]) if isinstance(one, ToolCall)]
        assert not read, f"{text[:end]!r} is cut, and was read as the call {read[0]}"
    for nonsense in HOSTILE:
        for around in (nonsense, text[: len(text) // 2] + nonsense, nonsense + text):
            found = syntax.parse(around)
            assert all(isinstance(one, ToolCall | Incomplete | Malformed) for one in found), "any text has an answer"
            assert not any(isinstance(one, Incomplete) for one in found[:-1]), "only the last call may be incomplete"


def check_environment(
    make: Callable[[], Environment[Any]], *, actions: Sequence[str], num_plays: int = 20, max_steps: int = 50
) -> None:
    """Plays `actions` and nonsense at random; raises AssertionError naming the law that the environment breaks."""
    for seed in range(num_plays):
        rng = random.Random(seed)
        script = [rng.choice((*actions, "", "no such action \N{SNOWMAN}")) for _ in range(max_steps)]
        environment, other = make(), make()
        environment.reset(seed)
        assert environment.observe() == environment.observe(), "observe changes nothing"
        play = _play(environment, script)
        environment.reset(seed)
        assert _play(environment, script) == play, "the same seed and actions give the same play, in the same instance"
        other.reset(seed)
        assert _play(other, script) == play, "the same seed and actions give the same play, in another instance"
        cut = rng.randrange(len(play))
        environment.reset(seed)
        _play(environment, script[:cut])
        _check_snapshot(environment, make(), script[cut:], play[cut:])


def _check_snapshot(
    environment: Environment[Any], other: Environment[Any], script: Sequence[str], future: Sequence[object]
) -> None:
    snapshot, now = environment.snapshot(), environment.observe()
    digest, frozen = hash(snapshot), pickle.dumps(snapshot)
    assert _play(environment, script) == future, "taking a snapshot changes nothing"
    environment.restore(snapshot)
    assert environment.observe() == now, "a restored play looks as it did"
    assert _play(environment, script) == future, "a restored play has the same future"
    other.restore(pickle.loads(frozen))
    assert other.observe() == now, "a snapshot restored elsewhere looks as it did"
    assert _play(other, script) == future, "a snapshot restored elsewhere has the same future"
    assert (hash(snapshot), pickle.dumps(snapshot)) == (digest, frozen), "playing on changes no snapshot"


def _play(environment: Environment[Any], script: Sequence[str]) -> list[tuple[StepResult, str]]:
    """Returns the result of each action and the observation after it, until the play or the script ends."""
    seen = []
    for action in script:
        result = environment.step(action)
        seen.append((result, environment.observe()))
        if result.done:
            break
    return seen


class FakeEnvironment:
    """A corridor: `left` and `right` move, and a seeded wind sometimes cancels a move. Either end finishes the play.

    The right end pays 1. An action that is not understood costs 0.1.
    """

    LENGTH = 7

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> None:
        """Starts in the middle. The seed decides the wind."""
        self._state = (seed, 0, self.LENGTH // 2, "")

    def observe(self) -> str:
        """Says where the agent is, and what was wrong with its last action."""
        _, _, place, complaint = self._state
        return f"You are at {place} of {self.LENGTH}.{complaint}"

    def step(self, action: str) -> StepResult:
        """Moves one place. Raises EpisodeError if the play is over."""
        seed, time, place, _ = self._state
        if place in (0, self.LENGTH):
            raise EpisodeError("the play is over; reset or restore the environment")
        move = {"left": -1, "right": 1}.get(action, 0)
        wind = -move if random.Random(f"{seed}/{time}").random() < 0.2 else 0
        place += move + wind
        self._state = (seed, time + 1, place, "" if move else " Say left or right.")
        return StepResult(float(place == self.LENGTH) - (0.0 if move else 0.1), place in (0, self.LENGTH))

    def snapshot(self) -> tuple[int, int, int, str]:
        """Returns the state, which is one immutable tuple."""
        return self._state

    def restore(self, snapshot: tuple[int, int, int, str]) -> None:
        """Sets the state to a snapshot."""
        self._state = snapshot
