"""What the agents of the math team would say, for `flexmarl simulate`: workflows branch as they do in a real run.

The solver calls the calculator in a quarter of its attempts and otherwise guesses, well enough for small numbers; the
verifier says the opposite of what is right in a third of its verdicts. So behaves the seed model, before training.
"""

import random
import re
from math import prod

from flexmarl.simulator.replies import responder

CALLS = 0.25
LIES = 0.3
EXPRESSION = re.compile(r"\d+(?:[+*]\d+)+")
NUMBER = re.compile(r"\d+")


@responder("math_team_solver")
def solver(prompt: str, rng: random.Random) -> str:
    """A guess, a call, or after a call its result."""
    if "calc(" in prompt:
        return NUMBER.findall(prompt)[-1]
    question = EXPRESSION.findall(prompt)[-1]
    if rng.random() < CALLS:
        return f"calc({question})"
    return value(NUMBER.sub(lambda number: number[0][0].ljust(len(number[0]), "0"), question))


@responder("math_team_verifier")
def verifier(prompt: str, rng: random.Random) -> str:
    """Whether the last number is the value of the first expression, or the opposite."""
    right = value(EXPRESSION.findall(prompt)[0]) == NUMBER.findall(prompt)[-1]
    return "yes" if right != (rng.random() < LIES) else "no"


def value(question: str) -> str:
    """Of a sum of products, e.g. 33 for 12+7*3."""
    return str(sum(prod(map(int, term.split("*"))) for term in question.split("+")))
