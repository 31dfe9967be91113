"""Demonstrations for the cold start of the SQL team: the form of queries and verdicts, and a hint of what words mean.

Each clause of a demonstrated query is the right one in 30% of the cases, and else drawn at random; with random clauses
alone, the team was seen to settle for one query for all questions. The demonstrated checker says what is right in half
of its verdicts, and else yes or no by chance.
"""

import random

from examples.sql_team.tasks import ASKED, COLUMNS, GOODS, answer, draw, goods, meaning, query
from examples.sql_team.workflow import question, review

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""
HINT = 0.3
"""Share of clauses that are right whatever is drawn."""
AWARE = 0.5
"""Share of verdicts that are right whatever is drawn."""


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation, of either agent."""
    return writing(rng) if rng.random() < 0.7 else checking(rng)


def clauses(rng: random.Random, asked: str) -> tuple[str, str, str]:
    """Aggregate, column and condition that a demonstrated writer chooses."""
    chosen = [
        words[word] if rng.random() < HINT else rng.choice(list(words.values()))
        for words, word in zip((ASKED, COLUMNS, GOODS), asked.split(), strict=True)
    ]
    return chosen[0], chosen[1], chosen[2]


def writing(rng: random.Random) -> list[Message]:
    """A query and its result, which the writer takes as it is."""
    asked = draw(rng)
    text = query(*clauses(rng, asked))
    value = answer(goods(rng), text)
    return [
        *told("write", question(asked, retry=rng.random() < 0.3)),
        {"role": "assistant", "content": f"q({text})"},
        {"role": "tool", "content": f"{text.split()[1]}\n{value}"},
        {"role": "assistant", "content": "ok"},
    ]


def checking(rng: random.Random) -> list[Message]:
    """A verdict on the result of a demonstrated query, right or wrong."""
    asked = draw(rng)
    script, text = goods(rng), query(*clauses(rng, asked))
    rows = None if rng.random() < 0.03 else [[answer(script, text)]]
    right = rows is not None and rows[0][0] == answer(script, meaning(asked))
    verdict = right if rng.random() < AWARE else rng.random() < 0.5
    return [*told("check", review(asked, rows)), {"role": "assistant", "content": "yes" if verdict else "no"}]


def told(role: str, heard: str) -> list[Message]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": role}, {"role": "user", "content": heard}]
