"""The workflow of the code team: write, try on one example, write again if that fails.

    examples ──► coder ──► expression ──► tester picks an example ──► tried in a box ──► it holds: done
       ▲                                                                    │
       └──────────────────── it fails: another expression ◄─────────────────┘

The tester sees the examples and the expression. An expression that is wrong fits some of the examples all the same, so
the choice matters.

Every expression is paid 1 if it passes the hidden tests, and every choice 1 if it told the truth: the try held and the
expression was right, or it failed and the expression was wrong.
"""

from collections.abc import Callable

from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task
from flexmarl.tasks.scorers.python_tests import hidden_tests, reference_of

MAX_TRIES = 2

Pay = Callable[[float], float]


@workflow("code_team")
async def write_and_test(task: Task, team: Team) -> None:
    """Two expressions at most; the last one is the team's answer."""
    await play(task, team)


@workflow("code_team_never_again")
async def never_again(task: Task, team: Team) -> None:
    """A control: the tester picks and is paid for it, but the first expression stands."""
    await play(task, team, obey=False)


@workflow("code_team_shuffled_rewards")
async def shuffled_rewards(task: Task, team: Team) -> None:
    """A control: rewards that have nothing to do with what was written."""
    await play(task, team, pay=lambda reward: float(team.rng.random() < 0.5))


async def play(task: Task, team: Team, *, obey: bool = True, pay: Pay = lambda reward: reward) -> None:
    """One episode; `obey`: an expression that failed its try is written anew."""
    scores: list[float] = []
    truths: list[float] = []
    rejected = ""
    while len(scores) < MAX_TRIES and (rejected or not scores):
        written = await team.coder.act(question(task.prompt, rejected))
        picked = await team.tester.act(review(task.prompt, written.answer))
        right = await team.score(program(task, written.answer))
        held = await tried(task, team, written.answer, picked.answer)
        scores.append(right)
        truths.append(float(held is not None and held == right))
        written.reward(pay(scores[-1]))
        picked.reward(pay(truths[-1]))
        rejected = shown(written.answer) if obey and held == 0.0 else ""
    team.report(
        success=scores[-1],
        first_success=scores[0],
        tries=len(scores),
        **{"tester/accuracy": sum(truths) / len(truths)},
    )


async def tried(task: Task, team: Team, expression: str, picked: str) -> float | None:
    """1.0 if the expression holds on the example of that number, in a box, 0.0 if not; None without such an example."""
    numbers = {str(number): example for number, example in enumerate(task.data["examples"], start=1)}
    if picked not in numbers:
        return None
    a, b, result = numbers[picked]
    tests = reference_of(hidden_tests(task.reference).function, [((a, b), result)], timeout_s=30.0)
    return await team.score(program(task, expression), reference=tests)


def program(task: Task, expression: str) -> str:
    """The program that an expression stands for: a function of the name that the hidden tests call."""
    return f"def {hidden_tests(task.reference).function}(a, b):\n    return {expression}"


def question(prompt: str, rejected: str = "") -> str:
    """What the coder is asked: the examples, and the expression that failed if there is one."""
    return f"{prompt}!{rejected}" if rejected else f"{prompt}?"


def review(prompt: str, expression: str) -> str:
    """What the tester is asked, e.g. `3,5:15;2,7:14;4,1:4|a+b`."""
    return f"{prompt}|{shown(expression)}"


def shown(expression: str) -> str:
    """The beginning of an expression, or a mark if it is empty."""
    return expression[:16] or "-"
