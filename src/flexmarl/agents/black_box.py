"""Workflows of agents that we do not own: whatever speaks OpenAI's or Anthropic's API for the seats.

Program    a registered function, in the process for programs
Service    a running agent somewhere, which gets a request for each episode
Command    a program of the command line, started for each episode in a box whose only way out is the gateway

    @program("ask_twice")
    async def ask_twice(task: ProgramTask, seats: Mapping[str, SeatAddress]) -> str:
        client = AsyncOpenAI(base_url=seats["solver"].openai_url, api_key=seats["solver"].key)
        ...
        return answer                       # any JSON value

consumes     a task, and the addresses of the episode's seats
waits for    the agent; its calls wait as all calls do
produces     the agent's answer; rewards, by the task's score or by a registered judge
unblocked by the end of the agent; the episode's time limit bounds it
"""

import inspect
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexmarl.agents.context import episode_seed
from flexmarl.agents.doors import Door, DoorCall, SeatAddress
from flexmarl.agents.patterns import Pattern
from flexmarl.agents.team import Team, Workflow
from flexmarl.errors import EpisodeError
from flexmarl.plugins import Registry
from flexmarl.records import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTask:
    """A task as a program sees it: without reference and scorer."""

    input_id: str
    prompt: str
    opening: tuple[Mapping[str, str], ...] = ()
    """Messages before the prompt, as OpenAI's API takes them."""
    data: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed for random numbers of the program, the same in every play of this trajectory."""

    @classmethod
    def of(cls, task: Task, seed: int = 0) -> "ProgramTask":
        """The part of a task that a program sees."""
        opening = tuple({"role": one.role, "content": one.content} for one in task.opening)
        return cls(input_id=task.input_id, prompt=task.prompt, opening=opening, data=dict(task.data), seed=seed)


ProgramFunction = Callable[[ProgramTask, Mapping[str, SeatAddress]], Awaitable[Any]]
"""`async def run(task, seats) -> answer`: plays one episode at the seats' addresses; the answer is a JSON value."""
JudgeFunction = Callable[[Task, Team, Any, Sequence[DoorCall]], Awaitable[None] | None]
"""`def judge(task, team, answer, calls)`: rewards the team, its seats or single calls, and reports metrics. It may be a
coroutine function."""

PROGRAMS: Registry[ProgramFunction] = Registry("program", setting="team.workflow.name", group="programs")
program = PROGRAMS.register
"""Decorator that makes a function the program of that name: `@program("ask_twice")`."""
JUDGES: Registry[JudgeFunction] = Registry("judge", setting="team.workflow.judge", group="judges")
judge = JUDGES.register
"""Decorator that makes a function the judge of that name: `@judge("per_attempt")`."""


class BlackBox(Pattern):
    """Base of the workflows whose seats an agent plays that we do not own."""

    opens_doors: ClassVar[bool] = True

    judge: str = ""
    """Name of the function that gives the rewards, as registered with `@judge(name)`; empty: the answer's score."""

    def resolve(self) -> Workflow:
        """The function that plays an episode. Raises ConfigError with the nearest name if there is no such judge."""
        return partial(self._judged, JUDGES[self.judge] if self.judge else score_of_answer)

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        await self.resolve()(task, team)

    async def _judged(self, judge: JudgeFunction, task: Task, team: Team) -> None:
        seed = episode_seed(team.context.run_seed, team.context.trajectory_id)
        async with team.door() as door:
            answer = await self.play(door, task, team, seed)
            if inspect.isawaitable(waiting := judge(task, team, answer, door.calls)):
                await waiting

    @abstractmethod
    async def play(self, door: Door, task: Task, team: Team, seed: int) -> Any:
        """Lets the agent play the seats at the door; returns its answer, a JSON value."""


class Program(BlackBox):
    """A registered program plays the seats over HTTP: anything that speaks OpenAI's or Anthropic's API.

    It runs in a process of its own, together with those of other episodes. Without a `judge`, every seat is rewarded
    with the score of its answer.
    """

    type: Literal["program"] = "program"
    name: str
    """Name of the program, as registered with `@program(name)` in a file that `code` lists."""

    def resolve(self) -> Workflow:
        """As that of every black box. Raises ConfigError with the nearest name if there is no such program."""
        _ = PROGRAMS[self.name]
        return super().resolve()

    async def play(self, door: Door, task: Task, team: Team, seed: int) -> Any:
        """Runs the program."""
        return await door.play(self.name, task, seed=seed)


class Service(BlackBox):
    """An agent that is running already plays the seats: it gets a request with task and addresses for each episode.

    It gets {task, seats, deadline_s} and answers {answer, metrics}; both may be left out. It learns no reward key.
    Without a `judge`, every seat is rewarded with the score of its answer.
    """

    type: Literal["service"] = "service"
    url: str = Field(pattern=r"^https?://[^@\s]+$")
    """Where it takes episodes, e.g. http://127.0.0.1:9000/play."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Seconds in which it must answer; without an answer, the episode has failed."""

    async def play(self, door: Door, task: Task, team: Team, seed: int) -> Any:
        """Asks the service, and reports its metrics."""
        said = await door.play(self, task, seed=seed)
        team.report(**said["metrics"])
        return said["answer"]


class Command(BlackBox):
    """A command in a box plays the seats, one for each episode: in /box, with the task's files.

    Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY. The box reaches
    nothing but the gateway, and all that the command started ends with the episode. Where this machine cannot guarantee
    that, the run does not start. Without a `judge`, every seat is rewarded with the score of its answer.
    """

    boxed: ClassVar[bool] = True

    type: Literal["command"] = "command"
    argv: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. Placeholders: {openai_url}, {anthropic_url}, {key}, {model}, {prompt}, and {base}, the
    config's folder. One URL serves all seats: the model's name is that of the seat; {model} is the first one."""
    env: Mapping[str, str] = {}
    """Further variables of its environment, with the same placeholders."""
    reads: tuple[Path, ...] = ()
    """Files and folders of this machine that the box may read, at their own paths, beside /usr: the agent's program and
    its packages. Every user must be able to read them."""
    answer: str = ""
    """File below /box that holds the answer at the end; empty: what the command printed on stdout."""
    ok_exits: tuple[int, ...] = (0,)
    """Exit statuses that are no failure."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Seconds in which it must end; otherwise the episode has failed."""
    output_kib: int = Field(default=16, ge=0)
    """KiB of stdout and of stderr of each episode that are kept in the run's folder `commands`, without keys; 0: none.
    """

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> Self:
        texts = {"argv": self.argv, **{f"env.{name}": (text,) for name, text in self.env.items()}}
        for setting, found in (
            (name, found) for name, each in texts.items() for found in map(PLACEHOLDER.findall, each)
        ):
            if unknown := sorted({*found} - {*PLACEHOLDERS}):
                known = ", ".join(f"{{{one}}}" for one in PLACEHOLDERS)
                raise ValueError(f"{setting}: there is no placeholder {{{unknown[0]}}}; there are: {known}")
        return self

    def filled_argv(self, values: Mapping[str, str]) -> list[str]:
        """Program and arguments with the values of their placeholders."""
        return [_filled(text, values) for text in self.argv]

    def filled_env(self, values: Mapping[str, str]) -> dict[str, str]:
        """The further variables with the values of their placeholders."""
        return {name: _filled(text, values) for name, text in self.env.items()}

    async def play(self, door: Door, task: Task, team: Team, seed: int) -> Any:
        """Runs the command."""
        return await door.play(self, task, seed=seed)


PLACEHOLDERS = ("openai_url", "anthropic_url", "key", "model", "prompt", "base")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
"""A name in braces; braces of JSON are none."""


def _filled(text: str, values: Mapping[str, str]) -> str:
    """The text with values for its placeholders, in one pass: a prompt may spell one.

    >>> _filled('{"url": "{openai_url}"}', {"openai_url": "http://127.0.0.1/v1"})
    '{"url": "http://127.0.0.1/v1"}'
    """
    return PLACEHOLDER.sub(lambda found: values[found[1]], text)


async def score_of_answer(task: Task, team: Team, answer: Any, calls: Sequence[DoorCall]) -> None:
    """Rewards every seat with the score of the answer."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = "nothing" if answer is None else type(answer).__name__
        raise EpisodeError(f"the program answered {kind}, which has no score; return a text, or set a judge")
    score = await team.score(str(answer))
    team.reward(score)
    team.report(success=score)
