"""Demonstrations for the warm start: what the pretrained model does not know is the form, not the matter.

They show how a call and an answer look, with a solver that picks the operation and the calculator almost at random, and
a checker that is right in two thirds of its verdicts: reinforcement learning finds out which of it pays.
"""

import json
import random

from examples.real_team.tasks import STORIES, draw, value
from examples.real_team.workflow import mishear, review
from flexmarl.agents.seat import ToolUse

SOLVER = (
    "Solve the problem. To compute, write "
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>\n'
    "In the end write the number alone."
)
CHECKER = "Say yes if the answer is right, else say no."

CALLS = 0.5
"""The demonstrated solver calls the calculator, whatever the problem."""
INSIGHT = 0.4
"""It sees which operation solves the problem; else it takes any of the three."""
HONESTY = 0.7
"""The demonstrated checker's verdicts are right."""

Message = dict[str, str]


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation of one of the two agents, drawn evenly."""
    problem, expression = draw(rng, rng.choice(["easy", "hard"]))
    return solving(rng, problem, expression) if rng.random() < 0.5 else checking(rng, problem, expression)


def solving(rng: random.Random, problem: str, expression: str) -> list[Message]:
    """The solver answers at once, or calls the calculator and repeats the result."""
    expression = attempt(rng, expression)
    messages = [message("system", SOLVER), message("user", problem)]
    if rng.random() < CALLS:
        return [*messages, message("assistant", call(expression)), message("tool", str(value(expression))), said(expression)]
    return [*messages, message("assistant", estimate(expression))]


def checking(rng: random.Random, problem: str, expression: str) -> list[Message]:
    """The checker judges an attempt; about half of those that it sees are right."""
    tried = expression
    if rng.random() < 0.5:
        tried = attempt(rng, expression) if rng.random() < 0.4 else mishear(rng, expression)
    if rng.random() < 0.7:
        calls, answer = [ToolUse(name="calculator", argument=tried, result=str(value(tried)))], str(value(tried))
    else:
        calls, answer = [], estimate(tried)
    right = answer == str(value(expression))
    verdict = "yes" if right == (rng.random() < HONESTY) else "no"
    return [
        message("system", CHECKER),
        message("user", review(problem, calls, answer)),
        message("assistant", verdict),
    ]


def attempt(rng: random.Random, expression: str) -> str:
    """The expression, with a random operation if the solver does not see which one is right."""
    if rng.random() < INSIGHT:
        return expression
    operation = next(sign for sign in STORIES if sign in expression)
    return expression.replace(operation, rng.choice(list(STORIES)))


def estimate(expression: str) -> str:
    """What the solver gets in its head: exact for numbers of one digit, else of the larger number's digits only."""
    numbers = [int(part) for part in expression.replace("*", " ").replace("+", " ").replace("-", " ").split()]
    return str(value(expression) if max(numbers) < 10 else round(value(expression), 1 - len(str(max(numbers)))))


def call(expression: str) -> str:
    """A call of the calculator in the form of the solver's role prompt."""
    arguments = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{arguments}\n</tool_call>"


def said(expression: str) -> Message:
    """The answer after a call."""
    return message("assistant", str(value(expression)))


def message(role: str, content: str) -> Message:
    """One message of a conversation."""
    return {"role": role, "content": content}
