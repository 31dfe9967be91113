"""Demonstrations for the warm start: what the pretrained model does not know is the form, not the matter.

They show how a call, an answer and a verdict look. Whoever is demonstrated takes the wrong operation every other time,
and the solver calls the calculator or not, whatever the problem. Which of it pays is left to reinforcement learning.
"""

import random

from examples.real_team.tasks import STORIES, draw, operation_of, split_of, value
from examples.real_team.workflow import Work, review, twin
from flexmarl.tools import TagSyntax, ToolCall

SOLVER = "Solve the problem. You may call calculator. Answer with a number."
CHECKER = "Is the answer right? Write the expression, then yes or no."

CALLS = 0.6
"""How often the demonstrated solver calls the calculator, whatever the problem."""
INSIGHT = 0.25
"""How often an agent sees which operation solves the problem. Otherwise it takes any of the three: half are right."""

Message = dict[str, str]


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation of one of the two agents, drawn evenly; never of a held-out problem."""
    problem, expression = draw(rng, rng.choice(["easy", "hard", "hard"]))
    while split_of(problem) == "held_out":
        problem, expression = draw(rng, rng.choice(["easy", "hard", "hard"]))
    return (solving if rng.random() < 0.5 else checking)(rng, problem, expression)


def solving(rng: random.Random, problem: str, expression: str) -> list[Message]:
    """The solver answers at once, or calls the calculator and repeats the result."""
    tried = attempt(rng, expression)
    messages = [message("system", SOLVER), message("user", problem)]
    if rng.random() >= CALLS:
        return [*messages, message("assistant", estimate(tried))]
    result = str(value(tried))
    return [*messages, message("assistant", call(tried)), message("tool", result), message("assistant", result)]


def checking(rng: random.Random, problem: str, expression: str) -> list[Message]:
    """The checker writes an expression of its own, and compares; half of the answers that it sees are right."""
    hard, called, right = len(expression) > len("2*3"), rng.random() < CALLS, rng.random() < 0.5
    exact = str(value(expression))
    shown = Work([f"{expression}={exact}"] if called or hard else [], exact)
    if not right:
        guessed = Work([], estimate(expression))
        shown = guessed if hard and not called else twin(rng, expression, shown, right=True, hard=hard)
    own = attempt(rng, expression)
    verdict = f"{own} {'yes' if str(value(own)) == shown.answer else 'no'}"
    return [message("system", CHECKER), message("user", review(problem, shown)), message("assistant", verdict)]


def attempt(rng: random.Random, expression: str) -> str:
    """The expression, with a random operation if the agent does not see which one is right."""
    if rng.random() < INSIGHT:
        return expression
    return expression.replace(operation_of(expression), rng.choice(list(STORIES)))


def estimate(expression: str) -> str:
    """What the solver gets in its head: exact for numbers of one digit, else only the first digit is right."""
    operation = operation_of(expression)
    longest = max(map(len, expression.split(operation)))
    exact = value(expression)
    return str(exact if longest == 1 else round(exact, 1 - len(str(abs(exact)))))


def call(expression: str) -> str:
    """A call of the calculator, as the run reads it."""
    return TagSyntax().render(ToolCall("calculator", {"expression": expression}))


def message(role: str, content: str) -> Message:
    """One message of a conversation."""
    return {"role": role, "content": content}
