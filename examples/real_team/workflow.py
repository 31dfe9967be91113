"""The workflow of the real team: solve, check, and try again if the checker says no.

    problem ──► solver ──► calculator, if the solver calls it ──► answer ──► checker ──► yes: done
       ▲                                                                        │
       └────────────────────────────── no: a new attempt ◄──────────────────────┘

The solver hears the problem on a bad line: now and then a digit comes wrong. Only the checker has the problem as it is.
So the best solver is sometimes wrong, and a checker that always says yes, or always no, loses to one that checks.

Every attempt and every verdict has a reward of its own: an attempt 1 if its answer is right, less `CALL_COST` for each
call; a verdict 1 if it is right. Nothing tells the solver which problems are worth a call.
"""

import random
from collections.abc import Sequence

from flexmarl.agents.seat import ToolUse
from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task

MAX_ATTEMPTS = 3
MISHEARD = 0.3
"""How often a digit of the solver's copy of the problem is wrong."""
CALL_COST = 0.1
"""Less than an answer is worth, more than the calculator adds where the solver knows the answer."""


@workflow("real_team")
async def solve_and_check(task: Task, team: Team) -> None:
    """Up to three attempts, until the checker approves one; the last one is the team's answer."""
    scores: list[float] = []
    agreements: list[float] = []
    calls: list[int] = []
    approved = False
    while len(scores) < MAX_ATTEMPTS and not approved:
        heard = mishear(team.rng, task.prompt) if team.rng.random() < MISHEARD else task.prompt
        attempt = await team.solver.act(heard)
        verdict = await team.checker.act(review(task.prompt, attempt.calls, attempt.text))
        approved = verdict.text == "yes"
        scores.append(task.score(attempt.text))
        agreements.append(float(verdict.text == ("yes" if scores[-1] else "no")))
        calls.append(len(attempt.calls))
        attempt.reward(scores[-1] - CALL_COST * calls[-1])
        verdict.reward(agreements[-1])
    level = task.data["level"]
    right = sum(scores) / len(scores)
    team.report(
        success=scores[-1],
        first_success=scores[0],
        attempts=len(scores),
        **{f"solved/{level}": scores[-1], f"tool_used/{level}": sum(map(bool, calls)) / len(calls)},
        **{"checker/accuracy": sum(agreements) / len(agreements), "checker/always_yes": right},
        **judged(scores, agreements),
    )


def mishear(rng: random.Random, text: str) -> str:
    """The text with one digit replaced by another one; a number does not begin with 0 afterwards."""
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    return text[:place] + rng.choice("123456789".replace(text[place], "")) + text[place + 1 :]


def review(problem: str, calls: Sequence[ToolUse], answer: str) -> str:
    """What the checker is asked: the problem, what was computed, and the answer."""
    work = "".join(f"Computed: {use.argument} = {use.result}\n" for use in calls)
    return f"Problem: {problem}\n{work}Answer: {answer}\nIs the answer right?"


def judged(scores: Sequence[float], agreements: Sequence[float]) -> dict[str, float]:
    """The share of right answers that the checker approved, and of wrong ones that it caught, where there were any."""
    right = [agreement for score, agreement in zip(scores, agreements, strict=True) if score]
    wrong = [agreement for score, agreement in zip(scores, agreements, strict=True) if not score]
    found = {"checker/approved_right": right, "checker/caught_wrong": wrong}
    return {name: sum(values) / len(values) for name, values in found.items() if values}
