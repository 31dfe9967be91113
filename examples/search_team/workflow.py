"""The workflow of the search team: the router decides, after each fact that was found, who acts next.

    question, last fact ──► router ──► search: searcher ──► tool `search` ──► its best fact ──┐
              ▲               │                                                               │
              │               └──► answer: answerer ──► value, or the name of a person: done  │
              └───────────────────────────────────────────────────────────────────────────────┘

Every agent sees the question and the fact that was found last, and nothing else. After three searches the answerer
acts, whatever the router says.

A query is paid 1 if it found the fact that was needed next; the config takes from it what surplus calls of the searcher
cost (`otc`). Router and answerer are paid by the answer alone: 1 if it is right, and the router a tenth less for each
search. So an answer that is right after three searches is still worth more than a wrong one after none.
"""

from collections.abc import Callable
from typing import Any

from flexmarl.agents.seat import Reply
from flexmarl.agents.team import Team, workflow
from flexmarl.records import Task

MAX_SEARCHES = 3
SEARCH_COST = 0.1
"""Share of a success that the router loses with each search."""
SEARCH, ANSWER = "search", "answer"
"""What the router may say."""
NOTHING = "-"
"""What agents read in place of a fact as long as none was found."""

Pay = Callable[[float], float]


@workflow("search_team")
async def route_search_answer(task: Task, team: Team) -> None:
    """Searches until the router says that the answerer shall act."""
    await play(task, team)


@workflow("search_team_always_twice")
async def always_twice(task: Task, team: Team) -> None:
    """A control: the router says what it thinks and is paid for it, but there are two searches in every episode."""
    await play(task, team, searches=2)


@workflow("search_team_shuffled_rewards")
async def shuffled_rewards(task: Task, team: Team) -> None:
    """A control: rewards that have nothing to do with the answer, as likely 1 as those of the seed model."""
    await play(task, team, pay=lambda reward: float(team.rng.random() < 0.1))


async def play(task: Task, team: Team, *, searches: int | None = None, pay: Pay = lambda reward: reward) -> None:
    """One episode. `searches`: their number, whatever the router says."""
    path: list[str] = task.data["path"]
    fact, done, helped = NOTHING, 0, 0
    while done < MAX_SEARCHES:
        choice = await team.router.act(view(task.prompt, fact))
        go_on = choice.answer == SEARCH if searches is None else done < searches
        if not go_on:
            break
        query = await team.searcher.act(view(task.prompt, fact))
        found = fact_of(query)
        helps = found is not None and found == needed(path, fact)
        query.reward(pay(float(helps)))
        fact, done, helped = found or fact, done + 1, helped + helps
    said = await team.answerer.act(view(task.prompt, fact))
    success = task.score(said.answer)
    team.router.reward(pay(success) * (1 - SEARCH_COST * done))
    said.reward(pay(success))
    team.report(
        success=success,
        searches=done,
        found=float(fact == path[-1]),
        **{f"success/{len(path)}_hops": success, f"searches/{len(path)}_hops": done},
        **({"searcher/helped": helped / done} if done else {}),
    )


def needed(path: list[str], fact: str) -> str | None:
    """The fact to look for where `fact` was found last; None if it answers the question.

    >>> needed(["k boss m", "m home 47"], "k boss m"), needed(["k boss m", "m home 47"], "q boss d")
    ('m home 47', 'k boss m')
    """
    place = path.index(fact) + 1 if fact in path else 0
    return path[place] if place < len(path) else None


def fact_of(reply: Reply) -> str | None:
    """The best fact of the searcher's last call that found any; None without one."""
    best: list[dict[str, Any]] = [use.data[0] for use in reply.calls if use.data]
    return f"{best[-1]['title']} {best[-1]['text']}" if best else None


def view(prompt: str, fact: str) -> str:
    """What an agent reads, e.g. `k boss m|k head town`."""
    return f"{fact}|{prompt}"
