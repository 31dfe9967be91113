"""The workflow of the SQL team: query, look at the result, query again if it cannot be right.

    question ──► writer ──► sql, on the task's own table ──► result ──► checker ──► yes: done
       ▲                                                                   │
       └───────────────────── no: another query ◄──────────────────────────┘

The checker sees the question and the result, not the query: a result of one digit is no sum, and one of two digits no
size. It cannot know which goods were looked at.

Every query is paid 1 if it gave the rows of the reference, in any order, and every verdict 1 if it was right.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from flexmarl.agents.seat import Reply
from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task

MAX_QUERIES = 3
NO_RESULT = "-"
"""What the checker reads if the writer wrote no query that could be run."""

Pay = Callable[[float], float]


@workflow("sql_team")
async def query_and_check(task: Task, team: Team) -> None:
    """Up to three queries, until the checker approves of one; the last one is the team's answer."""
    await play(task, team)


@workflow("sql_team_always_approve")
async def always_approve(task: Task, team: Team) -> None:
    """A control: the checker says what it thinks and is paid for it, but the first query stands."""
    await play(task, team, obey=False)


@workflow("sql_team_shuffled_rewards")
async def shuffled_rewards(task: Task, team: Team) -> None:
    """A control: rewards that have nothing to do with what was written, as likely 1 as a query of the seed model."""
    await play(task, team, pay=lambda reward: float(team.rng.random() < 0.2))


async def play(task: Task, team: Team, *, obey: bool = True, pay: Pay = lambda reward: reward) -> None:
    """One episode; `obey`: a rejected query is written anew."""
    scores: list[float] = []
    agreements: list[float] = []
    rejected = False
    while len(scores) < MAX_QUERIES and (rejected or not scores):
        written = await team.writer.act(question(task.prompt, retry=rejected))
        rows = rows_of(written)
        verdict = await team.checker.act(review(task.prompt, rows))
        approved = verdict.text == "yes"
        scores.append(float(rows is not None and same_rows(rows, [[task.reference]])))
        agreements.append(float(approved == bool(scores[-1])))
        written.reward(pay(scores[-1]))
        verdict.reward(pay(agreements[-1]))
        rejected = obey and not approved
    team.report(
        success=scores[-1],
        first_success=scores[0],
        queries=len(scores),
        **{"checker/accuracy": sum(agreements) / len(agreements)},
    )


def rows_of(written: Reply) -> list[list[Any]] | None:
    """The rows that the writer's query gave; None if it wrote none that could be run."""
    run = [use for use in written.calls if use.ok]
    return run[-1].data["rows"] if run else None


def same_rows(found: list[list[Any]], wanted: list[list[Any]]) -> bool:
    """True if both hold the same rows equally often. No question of this team asks for an order."""
    first, second = (Counter(tuple(map(str, row)) for row in rows) for rows in (found, wanted))
    return first == second


def question(prompt: str, *, retry: bool = False) -> str:
    """What the writer is asked: the mark is `!` after a rejected query."""
    return f"{prompt}{'?!'[retry]}"


def review(prompt: str, rows: list[list[Any]] | None) -> str:
    """What the checker is asked, e.g. `most price new|97`."""
    cells = [str(cell) for row in rows or () for cell in row]
    return f"{prompt}|{' '.join(cells)[:16] or NO_RESULT}"
