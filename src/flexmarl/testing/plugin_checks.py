"""Conformance checks of task sources, tools, syntaxes of tool calls, and environments; small ones to write tests with.

    check_task_source(lambda: MySource(seed=0))
    check_tool(MyTool(), good=["2+2"])
    check_syntax(MySyntax(), call=ToolCall("calculator", "2+2"))
    check_environment(FakeEnvironment, actions=["left", "right"])

They run without a test framework.
"""

import asyncio
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.tasks import Environment, SourceExhausted, StepResult, TaskSource, check_disjoint
from flexmarl.tools import Incomplete, Malformed, Tool, ToolCall
from flexmarl.tools.syntax import Syntax


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


HOSTILE = (
    "",
    " ",
    "\x00",
    "(" * 10_000,
    "9" * 10_000,
    "9**9**9**9",
    "__import__('os')",
    "{}",
    "☃",
    "\n" * 100,
)


def check_tool(tool: Tool, *, good: Sequence[str]) -> None:
    """Raises AssertionError naming the law that the tool breaks; `good` are arguments that it must understand."""
    assert tool.name.isidentifier(), f"an agent calls a tool by an identifier, not {tool.name!r}"
    assert tool.description.strip(), "a tool says what it does"
    answers = asyncio.run(_call_at_once(tool, [*good, *HOSTILE]))
    for argument, answer in zip([*good, *HOSTILE], answers, strict=True):
        assert isinstance(answer, str), f"an observation is text, not {answer!r}, also for {argument[:40]!r}"
    for argument, answer in zip(good, answers, strict=False):
        assert not answer.startswith("error: "), f"{argument!r} is understood, but the tool said {answer!r}"


async def _call_at_once(tool: Tool, arguments: Sequence[str]) -> list[str]:
    return await asyncio.gather(*(tool(argument) for argument in arguments))


def check_syntax(syntax: Syntax, *, call: ToolCall) -> None:
    """Raises AssertionError naming the law that the syntax breaks; `call` is any call that it can express."""
    text = syntax.render(call)
    assert syntax.parse(f"Let me see. {text}") == call, "what is rendered is parsed back"
    assert text.endswith(syntax.stop), "the engine stops at the end of a call"
    for end in range(len(text)):
        begun = syntax.parse(text[:end])
        assert not isinstance(begun, ToolCall), f"{text[:end]!r} is no complete call"
        assert begun is None or begun.observation.startswith("error: "), "an agent can tell an error from a result"
    for nonsense in HOSTILE:
        for around in (nonsense, text[: len(text) // 2] + nonsense, nonsense + text):
            parsed = syntax.parse(around)
            assert parsed is None or isinstance(parsed, ToolCall | Incomplete | Malformed), "any text has an answer"


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
