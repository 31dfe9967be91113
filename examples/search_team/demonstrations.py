"""Demonstrations for the cold start of the search team: the form of routes, queries and answers, and a hint.

The demonstrated team searches as the real one does; one turn of it is shown. Each of its choices is right in 35% of the
cases, and else drawn at random: the route, the person and the relation of a query, the end of a fact that is said to be
the answer. What it chose, it copies without error. To learn copying, the model also repeats what agents read, in a
fifth of the demonstrations.
"""

import random
from collections.abc import Sequence

from examples.search_team.tasks import RELATIONS, WORDS, Fact, draw
from examples.search_team.workflow import ANSWER, MAX_SEARCHES, NOTHING, SEARCH, view

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""
HINT = 0.35
"""Share of choices that are right whatever is drawn."""

REPEAT, REPEATED = "repeat", 0.2
"""Role in which all that was read is repeated, and its share of the demonstrations."""


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation, of any agent."""
    facts, question = draw(rng)
    fact = None
    for _ in range(rng.randrange(MAX_SEARCHES)):
        fact = found(rng, facts, query(rng, question, fact))
    seen, kind = view(question, str(fact or NOTHING)), rng.random()
    if kind < REPEATED:
        return [*told(REPEAT, seen), said(seen)]
    if kind < 0.4:
        return [*told("route", seen), said(route(rng, question, fact))]
    if kind < 0.6:
        return [*told("answer", seen), said(answer(rng, question, fact))]
    asked = query(rng, question, fact)
    best = found(rng, facts, asked)
    result = f"[1] {best.subject} {best.relation}: {best.value}"
    return [*told("search", seen), said(f"s({asked})"), {"role": "tool", "content": result}, said(best.value)]


def route(rng: random.Random, question: str, fact: Fact | None) -> str:
    """The agent that a demonstrated router calls."""
    right = ANSWER if right_query(question, fact) is None else SEARCH
    return hinted(rng, right, (SEARCH, ANSWER))


def query(rng: random.Random, question: str, fact: Fact | None) -> str:
    """What a demonstrated searcher asks for. Where the answer was found, asking for it again is right."""
    right = right_query(question, fact)
    if right is None:
        assert fact is not None, "a fact answered the question"
        right = fact.subject, fact.relation
    ends = (fact.subject, fact.value) if fact else ()
    people = [name for name in dict.fromkeys((question.split()[0], *ends)) if name[0].isalpha()]
    return f"{hinted(rng, right[0], people)} {hinted(rng, right[1], RELATIONS)}"


def right_query(question: str, fact: Fact | None) -> tuple[str, str] | None:
    """Person and relation to ask for next; None if the fact answers the question."""
    subject, *words = question.split()
    meanings = [WORDS[word] for word in words]
    if fact and fact.relation == meanings[-1] and (len(meanings) > 1 or fact.subject == subject):
        return None
    if fact and len(meanings) > 1 and (fact.subject, fact.relation) == (subject, meanings[0]):
        return fact.value, meanings[1]
    return subject, meanings[0]


def answer(rng: random.Random, question: str, fact: Fact | None) -> str:
    """What a demonstrated answerer says: an end of the fact, or, without one, the person of the question."""
    return hinted(rng, fact.value, (fact.subject, fact.value)) if fact else question.split()[0]


def found(rng: random.Random, facts: Sequence[Fact], asked: str) -> Fact:
    """The fact that a query asks for, or any fact with the person in it, much as the tool ranks them."""
    person, relation = asked.split()
    exact = [fact for fact in facts if relation == fact.relation and person in (fact.subject, fact.value)]
    return rng.choice(exact or [fact for fact in facts if person in (fact.subject, fact.value)])


def hinted(rng: random.Random, right: str, choices: Sequence[str]) -> str:
    """The right one as often as the hint says, else any."""
    return right if rng.random() < HINT else rng.choice(choices)


def told(role: str, heard: str) -> list[Message]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": role}, {"role": "user", "content": heard}]


def said(content: str) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": content}
