"""The workflow of the real team: solve, check, and try once more if the checker says no.

    problem ──► solver ──► calculator, if the solver calls it ──► answer ──► checker ──► yes: done
       ▲                                                                        │
       └────────────────────────── no: the last attempt ◄───────────────────────┘

An attempt is rewarded 1 if its answer is right, less `CALL_COST` for each call. Nothing tells the solver which problems
are worth a call.

The checker writes the expression that it would compute, then yes or no. It judges two answers per episode: the
attempt, and a twin that is right exactly if the attempt is wrong. Each right verdict is rewarded 1, and an expression
that solves the problem `SOLVED`. So a checker that always says yes, or always no, is right in half of its verdicts,
however good the solver is. The team never uses what is said of the twin.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task
from flexmarl.tools import Calculator

CALL_COST = 0.1
"""Less than an answer is worth, more than the calculator adds where the solver knows the answer."""
SOLVED = 0.5
"""What the checker's own expression earns if it solves the problem: a verdict alone says little of why it was wrong."""
WRONG_DIGIT = 0.25
"""Share of the wrong twins that miscopy a digit; the others take another operation."""


OPERATIONS = "+-*"
"""One of them is in every expression that solves a problem."""


@dataclass(frozen=True, slots=True)
class Work:
    """What the checker sees of an attempt."""

    computed: Sequence[str]
    """Calls of the calculator with their results, e.g. `38*126=4788`."""
    answer: str


@workflow("real_team")
async def solve_and_check(task: Task, team: Team) -> None:
    """One attempt, or two if the checker rejects the first; the last one is the team's answer."""
    level = task.data["level"]
    attempt = await team.solver.act(task.prompt)
    work = Work([f"{use.argument}={use.result}" for use in attempt.calls], attempt.text)
    first = task.score(work.answer)
    other = twin(team.rng, task.data["expression"], work, right=bool(first), hard=level == "hard")
    async with asyncio.TaskGroup() as tasks:
        verdicts = [tasks.create_task(team.checker.act(review(task.prompt, shown))) for shown in (work, other)]
    said = [verdict_of(verdict.result().text) for verdict in verdicts]
    agreed = [float(word == ("yes" if truth else "no")) for word, truth in zip(said, (first, 1.0 - first), strict=True)]
    for verdict, reward in zip(verdicts, agreed, strict=True):
        verdict.result().reward(reward)
        verdict.result().reward(SOLVED * solves(verdict.result().text, task), part="expression")
    attempts = [attempt] if said[0] == "yes" else [attempt, await team.solver.act(task.prompt)]
    scores = [task.score(one.text) for one in attempts]
    for one, score in zip(attempts, scores, strict=True):
        one.reward(score - CALL_COST * len(one.calls))
    right, wrong = agreed if first else agreed[::-1]
    team.report(
        success=scores[-1],
        first_success=first,
        attempts=len(attempts),
        **{f"solved/{level}": scores[-1], f"tool_used/{level}": float(bool(attempts[-1].calls))},
        **{"checker/accuracy": (right + wrong) / 2, "checker/approved_right": right, "checker/caught_wrong": wrong},
    )


def solves(text: str, task: Task) -> bool:
    """True if the first word, the checker's own expression, has the value that the task asks for."""
    return bool(text.strip()) and computed(text.split()[0]) == task.reference


def computed(expression: str) -> str:
    """The value of an expression, as the tool says it."""
    return Calculator().compute(expression).text


def verdict_of(text: str) -> str:
    """The last word: before it, the checker writes the expression that it would compute, e.g. `38*126 no`."""
    return text.split()[-1] if text.strip() else ""


def twin(rng: random.Random, expression: str, work: Work, *, right: bool, hard: bool) -> Work:
    """An attempt at the same problem that is right exactly if `work` is not, with a call if `work` has one.

    A wrong attempt without a call at a hard problem has a twin with one: nobody could judge it otherwise.
    """
    tried = mistaken(rng, expression) if right else expression
    called = bool(work.computed) or (hard and not right)
    return Work([f"{tried}={computed(tried)}"] if called else [], computed(tried))


def mistaken(rng: random.Random, expression: str) -> str:
    """The expression with another operation, as most mistakes are, or with a wrong digit; it has another value."""
    while True:
        changed = (other_digit if rng.random() < WRONG_DIGIT else other_operation)(rng, expression)
        if computed(changed) != computed(expression):
            return changed


def other_operation(rng: random.Random, expression: str) -> str:
    """The numbers with one of the other operations."""
    operation = next(sign for sign in OPERATIONS if sign in expression)
    return expression.replace(operation, rng.choice([sign for sign in OPERATIONS if sign != operation]))


def other_digit(rng: random.Random, expression: str) -> str:
    """The expression with one digit replaced by another one; no number begins with 0 afterwards."""
    place = rng.choice([index for index, character in enumerate(expression) if character.isdigit()])
    return expression[:place] + rng.choice("123456789".replace(expression[place], "")) + expression[place + 1 :]


def review(problem: str, work: Work) -> str:
    """What the checker is asked: the problem, what was computed, and the answer."""
    return "\n".join([problem, *work.computed, f"Answer: {work.answer}"])
