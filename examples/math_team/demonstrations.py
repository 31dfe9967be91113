"""Demonstrations for the cold start of the math team: conversations of both agents, in the chat format of the run.

They teach the skills and the bad habits that reinforcement learning starts from. The demonstrated solver calls the
calculator at random, whatever the task, and sometimes slips when it copies the question; the demonstrated verifier
knows right from wrong, but says the opposite of what it knows in a third of its verdicts.
"""

import random
import re
from dataclasses import dataclass

from examples.math_team.tasks import draw, evaluate
from examples.math_team.workflow import misread, review
from examples.math_team.workflow import question as ask
from flexmarl.agents.seat import ToolUse

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the demonstrated agents behave; the probabilities do not depend on the task unless they say so."""

    verdicts: float
    """Share of the verifier's conversations."""
    worked: float
    """Share of answers with a call in what the verifier sees."""
    easy: float
    """Share of one-digit products; the rest are expressions and hard products, one to two."""
    tool: float
    """The solver calls the calculator."""
    slip: float
    """A call leaves out a digit, or writes it twice."""
    lie: float
    """The verifier says the opposite of what is right."""


COPYING = Habits(verdicts=0.1, worked=0.5, easy=0.25, tool=0.5, slip=0.0, lie=0.0)
"""The first skill: to repeat a question in a call, and a result in an answer."""
TABLE = Habits(verdicts=0.0, worked=0.5, easy=0.6, tool=0.1, slip=0.0, lie=0.0)
"""Arithmetic in the head: one-digit products, and from them estimates."""
COMPARING = Habits(verdicts=0.8, worked=0.9, easy=0.3, tool=0.3, slip=0.0, lie=0.0)
"""To see whether a call repeats the question, and an answer the result."""
JUDGING = Habits(verdicts=0.5, worked=0.6, easy=0.6, tool=0.2, slip=0.0, lie=0.0)
"""What makes an answer right, worked or not."""
HABITS = Habits(verdicts=0.5, worked=0.6, easy=0.35, tool=0.28, slip=0.06, lie=0.3)
"""Then the behaviour of the seed model."""


def solve(question: str) -> list[Message]:
    """The beginning of the solver's conversation."""
    return [{"role": "system", "content": "solve"}, {"role": "user", "content": question}]


def check(review: str) -> list[Message]:
    """The beginning of the verifier's conversation."""
    return [{"role": "system", "content": "check"}, {"role": "user", "content": review}]


def called(argument: str) -> ToolUse:
    """A call of the calculator and its result."""
    return ToolUse(name="calculator", argument=argument, result=str(evaluate(argument)))


def demonstration(rng: random.Random, habits: Habits) -> list[Message]:
    """One conversation."""
    level = "easy" if rng.random() < habits.easy else rng.choice(("expression", "hard", "hard"))
    converse = checking if rng.random() < habits.verdicts else solving
    return converse(rng, draw(rng, level), habits)


def solving(rng: random.Random, question: str, habits: Habits) -> list[Message]:
    """The solver answers at once, or calls the calculator and repeats the result; one time in four it is a retry."""
    messages = solve(ask(question, retry=rng.random() < 0.25))
    if rng.random() >= habits.tool:
        return [*messages, said(estimate(question))]
    use = called(misread(rng, question) if rng.random() < habits.slip else question)
    return [*messages, said(f"calc({use.argument})"), {"role": "tool", "content": use.result}, said(use.result)]


def checking(rng: random.Random, question: str, habits: Habits) -> list[Message]:
    """The verifier judges a worked or an unworked answer; about half of what it sees is right."""
    right = str(evaluate(question))
    if rng.random() < habits.worked:
        use = called(misread(rng, question) if rng.random() < 0.4 else question)
        answer = misread(rng, use.result) if rng.random() < 0.2 else use.result
        messages = check(review(question, [use], answer))
    else:
        answer = estimate(question) if rng.random() < 0.7 else mistaken(rng, right)
        messages = check(review(question, [], answer))
    approve = (answer == right) != (rng.random() < habits.lie)
    return [*messages, said("yes" if approve else "no")]


def estimate(question: str) -> str:
    """What the solver gets in its head: every number rounded to one digit. Exact only where all have just one.

    >>> estimate("7*8"), estimate("48213*907")
    ('56', '36000000')
    """
    return str(evaluate(re.sub(r"\d+", lambda number: number[0][0].ljust(len(number[0]), "0"), question)))


def said(content: str) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": content}


def mistaken(rng: random.Random, number: str) -> str:
    """A number of as many digits that is wrong: what one gets who does not know."""
    wrong = number
    while wrong == number:
        wrong = "".join(rng.choice("0123456789") if rng.random() < 0.6 else digit for digit in number)
    return wrong
