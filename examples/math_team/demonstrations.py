"""Demonstrations for the cold start of the math team: conversations of both agents, in the chat format of the run.

They teach the skills and the bad habits that reinforcement learning starts from. The demonstrated solver calls the
calculator at random, whatever the task, and sometimes slips when it copies the question; the demonstrated verifier
knows right from wrong, but says the opposite of what it knows in a third of its verdicts.
"""

import random
from dataclasses import dataclass

from examples.math_team.tasks import draw, evaluate
from examples.math_team.workflow import question as ask
from examples.math_team.workflow import review
from flexmarl.agents.reply import ToolUse

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How the demonstrated agents behave; the probabilities do not depend on the task unless they say so."""

    verdicts: float
    """Share of the verifier's conversations."""
    easy: float
    """Share of one-digit products; the rest are expressions and hard products, one to two."""
    tool: float
    """The solver calls the calculator."""
    guess: float
    """The solver answers what nobody can without a call when it was not to call; else it does call."""
    slip: float
    """A call is off by one digit."""
    lie: float
    """The verifier says the opposite of what is right."""


COPYING = Habits(verdicts=0.2, easy=0.25, tool=0.5, guess=0.0, slip=0.0, lie=0.0)
"""The first skill: to repeat a question in a call, and a result in an answer."""
JUDGING = Habits(verdicts=0.65, easy=0.45, tool=0.2, guess=0.0, slip=0.0, lie=0.0)
"""On top of it: one-digit products, and what makes an answer right."""
HABITS = Habits(verdicts=0.5, easy=0.25, tool=0.22, guess=1.0, slip=0.06, lie=0.33)
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
    if rng.random() >= habits.tool and (not is_hard(question) or rng.random() < habits.guess):
        return [*messages, said(str(evaluate(question)))]
    use = called(slipped(rng, question) if rng.random() < habits.slip else question)
    return [*messages, said(f"calc({use.argument})"), {"role": "tool", "content": use.result}, said(use.result)]


def checking(rng: random.Random, question: str, habits: Habits) -> list[Message]:
    """The verifier judges a worked or an unworked answer; about half of what it sees is right."""
    right = str(evaluate(question))
    if rng.random() < 0.6:
        use = called(slipped(rng, question) if rng.random() < 0.4 else question)
        answer = slipped(rng, use.result) if rng.random() < 0.2 else use.result
        messages = check(review(question, [use], answer))
    else:
        wrong = rng.random() < (0.9 if is_hard(question) else 0.4)
        answer = slipped(rng, right, times=1 + len(right) // 3) if wrong else right
        messages = check(review(question, [], answer))
    approve = (answer == right) != (rng.random() < habits.lie)
    return [*messages, said("yes" if approve else "no")]


def is_hard(question: str) -> bool:
    """Whether nobody can answer it without a calculator."""
    return len(question) > 3


def said(content: str) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": content}


def slipped(rng: random.Random, text: str, times: int = 1) -> str:
    """The text with a digit mistaken for another one, left out or written twice, as often as asked."""
    for _ in range(times):
        place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
        alone = not (text[:place][-1:].isdigit() or text[place + 1 :][:1].isdigit())
        other = rng.choice([digit for digit in "123456789" if digit != text[place]])
        twice = text[place] * 2 if text[place] != "0" else other
        new = rng.choices((other, twice, "" if not alone else other), weights=(4, 1, 1))[0]
        text = text[:place] + new + text[place + 1 :]
    return text
