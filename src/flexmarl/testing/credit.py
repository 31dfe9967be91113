"""Conformance checks of estimators and terms of the reward, and rows to try them on.

    check_estimator(MyEstimator())
    check_term(MyTerm())

They run without a test framework.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flexmarl.credit import Credit, CreditRow, Estimator
from flexmarl.credit.interface import COLUMNS, GraphCall
from flexmarl.credit.shaping import AddedTerm, OutcomeTerm, shape
from flexmarl.errors import CreditError
from flexmarl.records import LARGEST_REWARD, AgentName, EpisodeId, PolicyName, SampleId


def credit_row(
    reward: float | None,
    *,
    task: str = "t0",
    episode: int = 0,
    hop: int = 0,
    agent: str = "solver",
    policy: str | None = None,
    num_tokens: int = 3,
    outcome: float | None = None,
    **columns: Any,
) -> CreditRow:
    """Makes a row. By default its policy has the name of its agent, and its `turn` is half the hop."""
    trajectory = f"{task}e{episode}"
    return CreditRow(
        sample_id=SampleId(f"{task}_{hop}_{trajectory}"),
        task=task,
        episode=EpisodeId(trajectory),
        agent=AgentName(agent),
        policy=PolicyName(policy or agent),
        hop=hop,
        reward=reward,
        num_tokens=num_tokens,
        outcome=outcome,
        **{"turn": hop // 2, **columns},
    )


def random_credit_rows(
    seed: int, *, empty_rows: bool = True, acts: bool = False, episodes: int | None = None
) -> list[CreditRow]:
    """Makes a ragged batch in random order: several tasks and agents, lone, equal and empty rows, constant groups.

    Solver and verifier share a policy. The first calls of all acts of a task have one context, and the calls of an
    episode form a tree. With `acts` some acts have several calls, as after a tool: all have the reward of
    the act, and the later ones have contexts that nobody shares. Without `episodes` a task has one to five episodes.
    """
    draw = random.Random(seed)
    palettes = ([0.0, 1.0], [1.0], [0.1 + 0.2, 0.3], [0.0, 0.25, 0.9, 1.0], [0.5])
    rows = []
    for task in range(draw.randint(1, 4)):
        palette = draw.choice(palettes)
        for episode in range(episodes or draw.randint(1, 5)):
            paths: list[tuple[int, ...]] = [(0,)]
            for hop in range(draw.randint(1, 4)):
                agent = draw.choice(("solver", "verifier", "router"))
                branch = draw.choice(paths)
                paths.append((*branch, hop))
                row = credit_row(
                    draw.choice(palette),
                    task=f"t{task}",
                    episode=episode,
                    hop=hop,
                    agent=agent,
                    policy="shared" if agent != "router" else None,
                    num_tokens=draw.randint(0 if empty_rows else 1, 5),
                    context_hash=f"t{task}",
                    branch=".".join(map(str, branch)),
                    path=paths[-1],
                )
                rows.append(replace(row, values=tuple(draw.uniform(-1, 1) for _ in range(row.num_tokens))))
    if acts:
        rows = [call for row in rows for call in _act(row, draw.choice((1, 1, 2, 3)))]
    draw.shuffle(rows)
    return rows


def _act(row: CreditRow, calls: int) -> list[CreditRow]:
    """Splits a row into `calls` calls of one act."""
    first = 10 * row.hop
    found: list[CreditRow] = []
    for number in range(calls):
        own = {"branch": f"{row.tag('path')}:{number}", "context_hash": f"{row.sample_id}:{number}"} if number else {}
        tags = {**row.tags, "anchor": f"state {row.hop}", "env_step": row.hop}
        hop = first + number
        name = SampleId(f"{row.task}_{hop}_{row.episode}")
        act = {"sample_id": name, "hop": hop, "act_hop": first, "act_reward": row.reward or 0.0}
        found.append(replace(row, **act, tags=tags, **own))
    return found


def check_estimator(estimator: Estimator, *, num_batches: int = 50) -> None:
    """Raises AssertionError naming the law that the estimator breaks on a random batch (docs/math.md section 7).

    One batch in three has acts of several calls, as after a tool. One in three has one episode per task. All rows carry
    the tags of the workflow that the estimator's key names. Their values are whole numbers.
    """
    _check_equal_rewards(estimator)
    for seed in range(num_batches):
        rows = _tagged(
            random_credit_rows(seed, acts=seed % 3 == 1, episodes=1 if seed % 3 == 2 else None), tags_in_key(estimator)
        )
        large = [replace(row, reward=None if row.reward is None else row.reward * LARGEST_REWARD) for row in rows]
        found = estimator.estimate(large)
        numbers = [*found.advantages.values(), *(value for of in found.token_advantages.values() for value in of)]
        assert all(map(math.isfinite, numbers)), f"rewards up to {LARGEST_REWARD:g} give finite advantages"
        credit = estimator.estimate(rows)
        ids = {row.sample_id for row in rows}
        assert set(credit.advantages) == set(credit.weights) == ids, "every row gets an advantage and a weight"
        for row in rows:
            if not row.num_tokens:
                assert credit.weights[row.sample_id] == 0, "a row without sampled tokens has weight 0"
        shuffled = random.Random(seed).sample(rows, len(rows))
        assert estimator.estimate(shuffled) == credit, "the order of arrival changes nothing, not even the last bit"
        padded = [*rows, *(replace(row, sample_id=SampleId(f"pad_{row.sample_id}"), num_tokens=0) for row in rows[:3])]
        assert _of(ids, estimator.estimate(padded)) == _of(ids, credit), "rows without sampled tokens change nothing"
        if estimator.needs in ("row", "group"):
            for task in {row.task for row in rows}:
                alone = [row for row in rows if row.task == task]
                kept = {row.sample_id for row in alone}
                assert _of(kept, estimator.estimate(alone)) == _of(kept, credit), "tasks do not see one another"
        sampled = next((row for row in rows if row.num_tokens), None)
        if sampled is not None:
            _check_missing_reward(estimator, rows, sampled)


def tags_in_key(estimator: Estimator) -> list[str]:
    """Returns the tags of the workflow that the estimator groups rows by, in alphabetical order."""
    named: set[str] = set()
    for key in (estimator.key, estimator.grouping):
        named.update(name for names in (key.values() if isinstance(key, Mapping) else [key]) for name in names)
    return sorted(name.removeprefix("tags.") for name in named if name not in COLUMNS)


def _tagged(rows: Sequence[CreditRow], names: Sequence[str]) -> list[CreditRow]:
    """Gives each row the tags that it lacks. The calls of one act have equal tags, as after `seat.act`."""
    found: list[CreditRow] = []
    for row in rows:
        act = row.hop if row.act_hop is None else row.act_hop
        lacking = {name: (act + number) % 3 for number, name in enumerate(names)}
        found.append(replace(row, tags={**lacking, **row.tags}))
    return found


def _check_equal_rewards(estimator: Estimator) -> None:
    """Checks two tasks of four episodes with one call each. All calls of a task have the same reward."""
    tags, place = {"anchor": "a", "env_step": 0}, {"turn": 0, "context_hash": "c", "path": (0,)}
    rows = [
        credit_row(0.25 + 0.5 * task, task=f"t{task}", episode=episode, tags=tags, **place)
        for task in range(2)
        for episode in range(4)
    ]
    rows = _tagged([replace(row, values=(0.5,) * row.num_tokens) for row in rows], tags_in_key(estimator))
    found = estimator.estimate(rows)
    message = "an estimator that does not learn from equal rewards gives 0, for filters drop tasks that have no others"
    assert estimator.learns_from_equal_rewards or not any(found.advantages.values()), message


def _of(ids: set[SampleId], credit: Credit) -> list[tuple[float, float]]:
    return [(credit.advantages[sample_id], credit.weights[sample_id]) for sample_id in sorted(ids)]


def _check_missing_reward(estimator: Estimator, rows: list[CreditRow], victim: CreditRow) -> None:
    message = ""
    try:
        estimator.estimate([replace(row, reward=None) if row is victim else row for row in rows])
    except CreditError as error:
        message = str(error)
    assert message, "a missing reward raises CreditError; it is never 0.0"
    assert victim.sample_id in message, "the error about a missing reward names the sample"


def task_rows(seed: int) -> list[CreditRow]:
    """Makes the rows of one task: up to four episodes, in each a chain of calls by two agents in turn."""
    draw = random.Random(seed)
    rows = []
    for episode in range(draw.randint(1, 4)):
        length = draw.randint(1, 4)
        calls = tuple(GraphCall(hop=hop, after=tuple(range(hop))[-1:], num_tokens=3) for hop in range(length))
        for hop in range(length):
            agent, reward = ("solver", "verifier")[hop % 2], float(draw.random() < 0.5)
            rows.append(credit_row(reward, episode=episode, hop=hop, agent=agent, turn=hop, path=(0,), calls=calls))
    return rows


def check_term(
    term: OutcomeTerm | AddedTerm, *, rows: Callable[[int], list[CreditRow]] = task_rows, num_batches: int = 50
) -> None:
    """Raises AssertionError naming the law that the term breaks on the rows of random tasks.

    `rows` makes the rewarded rows of one task from a seed. Give your own if the term reads tags of the workflow.
    """
    for seed in range(num_batches):
        given = rows(seed)
        before = [replace(row) for row in given]
        found = _shaped(given, term)
        assert given == before, "a term changes no row that it is given"
        assert _shaped(random.Random(seed).sample(given, len(given)), term) == found, (
            "the order of rows changes nothing"
        )
        unrewarded = credit_row(None, episode=99)
        assert _shaped([*given, unrewarded], term)[unrewarded.sample_id] == unrewarded, "a missing reward stays missing"
        for row in given:
            _check_shaped_row(term, row, found[row.sample_id])
        alone = {"row": lambda row: row.sample_id, "episode": lambda row: row.episode, "task": lambda row: row.task}
        for seen in {alone[term.sees](row): None for row in given}:
            part = [row for row in given if alone[term.sees](row) == seen]
            assert _shaped(part, term) == {row.sample_id: found[row.sample_id] for row in part}, (
                f"its attribute sees is {term.sees!r}, and other rows change what it makes of one; use "
                f"sees = 'episode' or 'task' (`sees: ClassVar[Sees]`)"
            )


def _shaped(rows: list[CreditRow], term: OutcomeTerm | AddedTerm) -> dict[SampleId, CreditRow]:
    return {row.sample_id: row for row in shape(rows, [term])}


def _check_shaped_row(term: OutcomeTerm | AddedTerm, row: CreditRow, shaped: CreditRow) -> None:
    assert row.reward is not None, "`rows` gives rewarded rows"
    assert shaped.reward is not None, "a rewarded row stays rewarded"
    assert math.isfinite(shaped.reward), f"the reward of {row.sample_id} is finite, not {shaped.reward}"
    assert math.isclose(sum(shaped.parts.values()) or shaped.reward, shaped.reward, abs_tol=1e-9), (
        "the parts of a reward add up to it"
    )
    if isinstance(term, AddedTerm):
        assert shaped.outcome in (None, row.outcome, row.reward), "a term that adds leaves the outcome as it was"
    if not term.is_for(row.agent):
        assert shaped == row, f"the term is not for agent {row.agent}, and changes its reward"
    if row.reward >= 0 and not term.may_be_negative:
        assert shaped.reward >= 0, (
            f"its property may_be_negative is False, it makes no reward negative, and makes {row.reward} "
            f"{shaped.reward}; let may_be_negative return True, or bound what it takes off"
        )
