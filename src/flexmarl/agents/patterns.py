"""Workflows that need no code: each is a settings class, chosen by `type`.

Tree sampling plays several candidates of a turn from one context and continues from the best ones:

                ┌─► 0                ┌─► 1.0  best: continues ─► ...
    root ───────┼─► 1  best ─────────┼─► 1.1
    candidates  └─► 2                └─► 1.2

consumes    a turn function, written by the workflow's author, and the team at the root
waits for   all candidates of a turn, which play at the same time
produces    the turns of every branch, tagged `branch`, `path`, `turn`; the metrics of the best play
unblocked by the end of the candidates' calls; the episode's time limit bounds it
"""

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import Formatter
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from flexmarl.agents.context import Node, task_seed
from flexmarl.agents.seat import Reply
from flexmarl.agents.team import WORKFLOWS, Team, Workflow
from flexmarl.errors import EpisodeError
from flexmarl.plugins import Registry
from flexmarl.records import Purpose, Task
from flexmarl.settings import Settings

PlayTurn = Callable[[Task, Team], Awaitable[bool]]
"""`async def turn(task, team) -> bool`: lets an agent act, applies and rewards its action; True if the play is over."""

TURNS: Registry[PlayTurn] = Registry("turn", setting="team.workflow.turn", group="turns")
turn = TURNS.register
"""Decorator that makes a function the turn of that name: `@turn("maze")`."""


class Pattern(Settings):
    """A workflow with settings. Its templates are `str.format` strings over named fields."""

    template_fields: ClassVar[Mapping[str, frozenset[str]]] = {}
    """Name of a template setting -> the fields that the template may name."""
    opens_doors: ClassVar[bool] = False
    """True if programs play its seats, so that the run has a gateway."""
    boxed: ClassVar[bool] = False
    """True if it plays them in boxes of the sandbox."""

    @model_validator(mode="after")
    def _templates_name_known_fields(self) -> "Pattern":
        for setting, allowed in self.template_fields.items():
            template = getattr(self, setting)
            try:
                named = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
            except ValueError as error:
                raise ValueError(f"{setting}: {template!r} is no template ({error}); write {{{{ for a brace") from None
            if unknown := named - allowed:
                raise ValueError(
                    f"{setting}: {template!r} names {', '.join(sorted(map(repr, unknown)))}; "
                    f"it may name {', '.join(sorted(allowed))}"
                )
        return self

    @property
    def seats(self) -> tuple[str, ...]:
        """Names of the agents that the workflow needs."""
        return ()

    def resolve(self) -> Workflow:
        """The function that plays an episode."""
        return self.run

    @abstractmethod
    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""


class Sequential(Pattern):
    """The agents answer in order. Each sees the task and the earlier answers; the last answer is the team's.

    Every agent is rewarded with the score of the last answer.
    """

    type: Literal["sequential"] = "sequential"
    agents: tuple[str, ...] = Field(min_length=1)
    """Names of the agents, in the order in which they answer."""
    first: str = "{task}"
    """Prompt of the first agent. Fields: task."""
    then: str = "{task}\n\n{answers}"
    """Prompt of the other agents. Fields: task; answer (the last one); work (the last one, with its tool calls);
    answers (all, a line each: `name: answer`)."""

    template_fields: ClassVar[Mapping[str, frozenset[str]]] = {
        "first": frozenset({"task"}),
        "then": frozenset({"task", "answer", "work", "answers"}),
    }

    @property
    def seats(self) -> tuple[str, ...]:
        """The names in `agents`."""
        return self.agents

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        reply = await team[self.agents[0]].act(self.first.format(task=task.prompt))
        answers = [f"{self.agents[0]}: {reply.answer}"]
        for name in self.agents[1:]:
            seen = self.then.format(
                task=task.prompt, answer=reply.answer, work=reply.transcript, answers="\n".join(answers)
            )
            reply = await team[name].act(seen)
            answers.append(f"{name}: {reply.answer}")
        score = await team.score(reply.answer)
        for name in dict.fromkeys(self.agents):
            team[name].reward(score)
        team.report(success=score)


class Iterative(Pattern):
    """A solver answers; a verifier approves the answer or returns it with feedback, for at most `max_rounds` rounds.

    The solver is rewarded in every round with the score of its last answer. The verifier is rewarded in each round: 1
    if it was right to approve or to reject, else 0.
    """

    type: Literal["iterative"] = "iterative"
    solver: str = "solver"
    """Name of the agent that answers."""
    verifier: str = "verifier"
    """Name of the agent that judges."""
    max_rounds: int = Field(default=3, ge=1)
    """Maximum number of proposals; the last one counts."""
    question: str = "{task}"
    """First prompt of the solver. Fields: task."""
    retry: str = "{task}\n\nYour answer was rejected:\n{feedback}"
    """Prompt of the solver after a rejection. Fields: task, answer, work, feedback."""
    review: str = "{task}\n\nProposed answer:\n{answer}"
    """Prompt of the verifier. Fields: task, answer, work (the answer with its tool calls)."""
    approval: str = Field(default="approve", min_length=1)
    """The verifier approves if its answer begins with this word, in any case."""

    template_fields: ClassVar[Mapping[str, frozenset[str]]] = {
        "question": frozenset({"task"}),
        "retry": frozenset({"task", "answer", "work", "feedback"}),
        "review": frozenset({"task", "answer", "work"}),
    }

    @model_validator(mode="after")
    def _two_agents(self) -> "Iterative":
        if self.solver == self.verifier:
            raise ValueError(f"verifier: {self.verifier!r} is the solver too; name another agent")
        return self

    @property
    def seats(self) -> tuple[str, ...]:
        """Solver and verifier."""
        return (self.solver, self.verifier)

    def approves(self, verdict: Reply) -> bool:
        """True if a verdict is an approval."""
        return verdict.answer.strip().casefold().startswith(self.approval.casefold())

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        solver, verifier = team[self.solver], team[self.verifier]
        observation, right, rounds = self.question.format(task=task.prompt), 0, 0
        while True:
            rounds += 1
            proposal = await solver.act(observation)
            fields = {"task": task.prompt, "answer": proposal.answer, "work": proposal.transcript}
            verdict = await verifier.act(self.review.format(**fields))
            score, approved = await team.score(proposal.answer), self.approves(verdict)
            agrees = approved == (score >= 1.0)
            verdict.reward(float(agrees))
            right += agrees
            if approved or rounds == self.max_rounds:
                break
            observation = self.retry.format(**fields, feedback=verdict.text)
        solver.reward(score)
        team.report(success=score, rounds=rounds, approved=float(approved), verifier_accuracy=right / rounds)


class Turns(Pattern):
    """A registered function plays turn after turn; with `candidates` above 1, every turn is a best-of-N choice.

    All candidates of a turn begin from the same context and the same environment. The `keep` branches with the largest
    sums of rewards continue (docs/howto/tree_sampling.md). Only training plays more than one candidate. The environment
    is reset to the task's own start, the same in all of its episodes.
    """

    type: Literal["turns"] = "turns"
    turn: str
    """Name of the function, as registered with `@turn(name)`."""
    candidates: int = Field(default=1, ge=1, le=1024)
    """How often a turn is played from each branch. 1: a plain episode; evaluations and greedy plays always use 1."""
    keep: int = Field(default=1, ge=1)
    """How many branches continue after each turn: those with the largest sums of rewards."""
    max_turns: int = Field(default=64, ge=1)
    """Maximum number of turns in a play."""

    def resolve(self) -> Workflow:
        """The function that plays the registered turn. Raises ConfigError with the nearest name if there is none."""
        return partial(self._play, TURNS[self.turn])

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        await self.resolve()(task, team)

    async def _play(self, turn: PlayTurn, task: Task, team: Team) -> None:
        if team.context.environment is not None:
            team.environment.reset(task_seed(task.input_id))
        branch = await grow(
            turn,
            task,
            team,
            candidates=self.candidates if team.context.purpose is Purpose.TRAINING else 1,
            keep=self.keep,
            max_turns=self.max_turns,
        )
        team.report(**branch.team.metrics)


class Custom(Pattern):
    """A workflow of the user's own, registered with `@workflow(name)` in a file that `code` lists."""

    type: Literal["custom"] = "custom"
    name: str
    """Name of the workflow, as registered."""

    def resolve(self) -> Workflow:
        """The registered function. Raises ConfigError with the nearest name if there is none."""
        return WORKFLOWS[self.name]

    async def run(self, task: Task, team: Team) -> None:
        """Plays one episode."""
        await self.resolve()(task, team)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A play up to one of its turns."""

    team: Team
    path: tuple[int, ...] = ()
    score: float = 0.0
    """Sum of the rewards of all turns on the path. The reward of an act counts once, however many calls it took."""
    over: bool = False


async def grow(play: PlayTurn, task: Task, team: Team, *, candidates: int, keep: int, max_turns: int) -> Branch:
    """Plays turn after turn until all kept branches are over or have had `max_turns`; returns the best branch."""
    kept = [Branch(team=team)]
    for _ in range(max_turns):
        async with asyncio.TaskGroup() as tasks:
            playing = [
                [tasks.create_task(_candidate(play, task, branch, index)) for index in range(candidates)]
                for branch in kept
                if not branch.over
            ]
        grown = [branch for branch in kept if branch.over]
        for tasks_of_siblings in playing:
            siblings = [candidate.result() for candidate in tasks_of_siblings]
            _check_context(siblings)
            grown += siblings
        kept = best(grown, keep)
        if all(branch.over for branch in kept):
            break
    return kept[0]


def best(branches: Sequence[Branch], keep: int) -> list[Branch]:
    """The `keep` branches that continue: those with the highest scores; among equals, those with the lowest paths."""
    return sorted(branches, key=lambda branch: (-branch.score, branch.path))[:keep]


async def _candidate(play: PlayTurn, task: Task, parent: Branch, index: int) -> Branch:
    node = Node((*parent.path, index))
    team = parent.team.fork(node)
    over: object = await play(task, team)
    if over is None:
        raise EpisodeError("the turn returned None; it must return True if the play is over, else False")
    if not team.turns:
        raise EpisodeError(f"candidate {node.name} made no call; in a turn, an agent must act")
    if all(reward is None for reward in team.rewards().values()):
        raise EpisodeError(
            f"candidate {node.name} got no reward, so the best candidate is unknown; "
            "a turn must call `reply.reward(x)` before it returns"
        )
    return Branch(team=team, path=node.path, score=parent.score + team.total_reward(), over=bool(over))


def _check_context(siblings: Sequence[Branch]) -> None:
    """Raises EpisodeError if siblings saw different contexts: their rewards could not be compared."""
    first = [branch.team.turns[0] for branch in siblings]
    for branch, turn in zip(siblings, first, strict=True):
        if turn.context_hash != first[0].context_hash:
            raise EpisodeError(
                f"candidates {Node(siblings[0].path).name} and {Node(branch.path).name} of a turn have different "
                "contexts; show an agent only what follows from the task and the state of the team"
            )
