"""Workflow of programs that we do not own: a registered function speaks OpenAI's or Anthropic's API for the seats.

    @program("ask_twice")
    async def ask_twice(task: ProgramTask, seats: Mapping[str, SeatAddress]) -> str:
        client = AsyncOpenAI(base_url=seats["solver"].openai_url, api_key=seats["solver"].key)
        ...
        return answer                       # any JSON value

consumes     a task, and the addresses of the episode's seats
waits for    the program, which runs in the process for programs; its calls wait as all calls do
produces     the program's answer; rewards, by the task's score or by a registered judge
unblocked by the end of the program; the episode's time limit bounds it
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from flexmarl.agents.context import episode_seed
from flexmarl.agents.doors import DoorCall, SeatAddress
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


class Program(Pattern):
    """A registered program plays the seats over HTTP: anything that speaks OpenAI's or Anthropic's API.

    It runs in a process of its own, together with those of other episodes. Without a `judge`, every seat is rewarded
    with the score of its answer.
    """

    opens_doors: ClassVar[bool] = True

    type: Literal["program"] = "program"
    name: str
    """Name of the program, as registered with `@program(name)` in a file that `code` lists."""
    judge: str = ""
    """Name of the function that gives the rewards, as registered with `@judge(name)`; empty: the answer's score."""

    def resolve(self) -> Workflow:
        """The function that plays the program. Raises ConfigError with the nearest name if there is none."""
        _ = PROGRAMS[self.name]
        return partial(self._play, JUDGES[self.judge] if self.judge else score_of_answer)

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        await self.resolve()(task, team)

    async def _play(self, judge: JudgeFunction, task: Task, team: Team) -> None:
        seed = episode_seed(team.context.run_seed, team.context.trajectory_id)
        async with team.door() as door:
            answer = await door.play(self.name, task, seed=seed)
            if inspect.isawaitable(waiting := judge(task, team, answer, door.calls)):
                await waiting


async def score_of_answer(task: Task, team: Team, answer: Any, calls: Sequence[DoorCall]) -> None:
    """Rewards every seat with the score of the answer."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise EpisodeError(f"the program answered {kind}, which has no score; return a text, or set a judge")
    score = await team.score(str(answer))
    team.reward(score)
    team.report(success=score)
