"""Runs an episode as a tree of turns: plays several candidates from one context and continues from the best ones.

consumes    a turn function, written by the workflow's author, and the team at the root
waits for   all candidates of a turn, which play at the same time
produces    the turns of every branch, tagged `branch`, `path`, `turn`; the metrics of the best play
unblocked by the end of the candidates' calls; the episode's time limit bounds it

                ┌─► 0                ┌─► 1.0  best: continues ─► ...
    root ───────┼─► 1  best ─────────┼─► 1.1
    candidates  └─► 2                └─► 1.2
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from flexmarl.agents.context import Node
from flexmarl.agents.team import Team
from flexmarl.errors import EpisodeError
from flexmarl.records import Task
from flexmarl.tasks.registry import Registry

PlayTurn = Callable[[Task, Team], Awaitable[bool]]
"""`async def turn(task, team) -> bool`: lets an agent act, applies and rewards its action; True if the play is over."""

TURNS: Registry[PlayTurn] = Registry("turn", setting="team.workflow.turn")
turn = TURNS.register
"""Decorator that makes a function the turn of that name: `@turn("maze")`."""


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
    over = await play(task, team)
    if not team.turns:
        raise EpisodeError(f"candidate {node.name} made no call; in a turn, an agent must act")
    if all(reward is None for reward in team.rewards().values()):
        raise EpisodeError(
            f"candidate {node.name} got no reward, so that nothing tells which is best; "
            "a turn must call `reply.reward(x)` before it returns"
        )
    return Branch(team=team, path=node.path, score=parent.score + team.total_reward(), over=over)


def _check_context(siblings: Sequence[Branch]) -> None:
    """Raises EpisodeError if siblings saw different contexts: their rewards could not be compared."""
    first = [branch.team.turns[0] for branch in siblings]
    for branch, turn in zip(siblings, first, strict=True):
        if turn.tags["context_hash"] != first[0].tags["context_hash"]:
            raise EpisodeError(
                f"candidates {Node(siblings[0].path).name} and {Node(branch.path).name} of a turn have different "
                "contexts; what an agent is shown may depend on the task and on the state of the team alone"
            )
