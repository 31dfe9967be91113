"""Demonstrations for the cold start of the code team: the form of expressions and choices, and a hint of what is right.

A demonstrated expression is right in 40% of the cases: a quarter are meant to be, the others are drawn at random. With
random ones alone, the team was seen to settle for one operator. A demonstrated tester picks an example that tells a
wrong expression from the right one in a quarter of the cases, and else any.
"""

import random

from examples.code_team.tasks import EXAMPLES, LANGUAGE, draw, examples_of, meaning, question_of
from examples.code_team.workflow import question, review

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""
HINT = 0.25
"""Share of choices that are right whatever is drawn."""


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation, of either agent."""
    return coding(rng) if rng.random() < 0.85 else testing(rng)


def chosen(rng: random.Random, asked: str) -> str:
    """The expression that a demonstrated coder writes."""
    return meaning(examples_of(asked)) if rng.random() < HINT else rng.choice(list(LANGUAGE))


def coding(rng: random.Random) -> list[Message]:
    """An expression, of a first try or of a second one."""
    asked = question_of(draw(rng))
    rejected = rng.choice(list(LANGUAGE)) if rng.random() < 0.3 else ""
    return said("code", question(asked, rejected), chosen(rng, asked))


def testing(rng: random.Random) -> list[Message]:
    """The number of the example on which a demonstrated expression is tried."""
    asked = question_of(draw(rng))
    tried = chosen(rng, asked)
    wrong = telling(asked, tried)
    return said("test", review(asked, tried), str(rng.choice(wrong if wrong and rng.random() < HINT else [1, 2, 3])))


def telling(asked: str, tried: str) -> list[int]:
    """Numbers of the examples that an expression does not fit, from 1."""
    examples = examples_of(asked)
    return [place + 1 for place in range(EXAMPLES) if LANGUAGE[tried](*examples[place][:2]) != examples[place][2]]


def said(role: str, heard: str, answer: str) -> list[Message]:
    """A conversation of one answer."""
    return [
        {"role": "system", "content": role},
        {"role": "user", "content": heard},
        {"role": "assistant", "content": answer},
    ]
