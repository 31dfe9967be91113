"""The workflow of the math team: solve, check, and try again if the verifier says no.

    question ──► solver ──► calculator, if the solver calls it ──► answer ──► verifier ──► yes: done
       ▲                                                                         │
       └────────────────────────────── no: a new attempt ◄───────────────────────┘

The solver reads the question over a bad line: now and then a digit is lost, or comes twice. Only the verifier sees the
question as it is. So even a perfect solver is sometimes wrong, and one that checks is worth having.

Every attempt and every verdict has a reward of its own: an attempt 1 if its answer is right, less `CALL_COST` for each
call; a verdict 1 if it is right. Nothing tells the solver which questions are worth a call.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from flexmarl.agents.seat import ToolUse
from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task

MAX_ATTEMPTS = 3
MISREAD = 0.1
"""How often the solver's copy of the question is wrong."""
CALL_COST = 0.2
"""Less than an answer is worth, more than the calculator adds where the solver knows the answer."""

Pay = Callable[[str, float], float]
"""(agent, reward it earned) -> reward it gets."""

EARNED: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=512))
"""Latest rewards of each agent, from which the shuffled ones are drawn."""


@workflow("math_team")
async def solve_and_verify(task: Task, team: Team) -> None:
    """Up to three attempts, until the verifier approves one; the last one is the team's answer."""
    await play(task, team)


@workflow("math_team_always_approve")
async def always_approve(task: Task, team: Team) -> None:
    """A control: the verifier says what it thinks and is rewarded for it, but the first attempt stands."""
    await play(task, team, obey=False)


@workflow("math_team_shuffled_rewards")
async def shuffled_rewards(task: Task, team: Team) -> None:
    """A control: every attempt and verdict gets a reward that another one earned, of any task."""

    def pay(agent: str, reward: float) -> float:
        EARNED[agent].append(reward)
        return team.rng.choice(EARNED[agent])

    await play(task, team, pay=pay)


@workflow("math_team_free_calls")
async def free_calls(task: Task, team: Team) -> None:
    """A control: calls cost nothing, but for what `credit.shaping` takes for them."""
    await play(task, team, cost=0.0)


async def play(
    task: Task, team: Team, *, obey: bool = True, cost: float = CALL_COST, pay: Pay = lambda agent, reward: reward
) -> None:
    """One episode; `obey`: a rejected answer is tried again. `cost`: of a call."""
    scores: list[float] = []
    agreements: list[float] = []
    calls: list[int] = []
    rejected = False
    while len(scores) < MAX_ATTEMPTS and (rejected or not scores):
        heard = misread(team.rng, task.prompt) if team.rng.random() < MISREAD else task.prompt
        attempt = await team.solver.act(question(heard, retry=rejected))
        verdict = await team.verifier.act(review(task.prompt, attempt.calls, attempt.text))
        approved = verdict.text == "yes"
        scores.append(task.score(attempt.text))
        agreements.append(float(approved == bool(scores[-1])))
        calls.append(len(attempt.calls))
        attempt.reward(pay("solver", scores[-1] - cost * calls[-1]))
        verdict.reward(pay("verifier", agreements[-1]))
        rejected = obey and not approved
    level = task.data["level"]
    used = sum(map(bool, calls)) / len(calls)
    team.report(
        success=scores[-1],
        first_success=scores[0],
        attempts=len(scores),
        calls=sum(calls),
        **{f"solved/{level}": scores[-1], f"tool_used/{level}": used},
        **judged(scores, agreements),
    )


def misread(rng: random.Random, text: str) -> str:
    """The text with a digit left out or written twice, e.g. `4823*907` or `48213*9907` for `48213*907`."""
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    alone = not (text[:place][-1:].isdigit() or text[place + 1 :][:1].isdigit())
    return text[:place] + text[place] * (2 if alone or rng.random() < 0.5 else 0) + text[place + 1 :]


def question(prompt: str, *, retry: bool = False) -> str:
    """What the solver is asked, e.g. `7*8        ?`; the mark is `!` after a rejected attempt.

    Fixed widths put every digit at one distance from the digit that it copies, or is compared with, here and below:
    so small a model needs that.
    """
    return f"{prompt:<11}" + "?!"[retry]


def review(prompt: str, calls: Sequence[ToolUse], answer: str) -> str:
    """What the verifier is asked, e.g. `7*8         |56` or `48213*907   |calc(48213*907)=43729191  |43729191`."""
    return "|".join([f"{prompt:<12}", *(f"calc({use.argument})={use.result:<10}" for use in calls), answer])


def judged(scores: list[float], agreements: list[float]) -> dict[str, float]:
    """The verifier's accuracy: on all answers, and on right and on wrong ones, where there were any."""
    right = [agreement for score, agreement in zip(scores, agreements, strict=True) if score]
    wrong = [agreement for score, agreement in zip(scores, agreements, strict=True) if not score]
    found = {"verifier/accuracy": agreements, "verifier/approved_right": right, "verifier/caught_wrong": wrong}
    return {name: sum(values) / len(values) for name, values in found.items() if values}
