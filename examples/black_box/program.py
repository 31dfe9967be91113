"""The math team as a program: OpenAI's client, a loop, a calculator. It knows nothing of training.

    question ──► solver ──► calculator, if the solver calls it ──► answer ──► verifier ──► yes: done
       ▲                                                                         │
       └────────────────────────────── no: a new attempt ◄───────────────────────┘

The same team as examples/math_team/workflow.py, which plays it with flexmarl's own agents: the same questions and
reviews, the same rewards. Two seats, two policies; the judge below sees the program's answer and every call.
"""

import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from flexmarl.agents.black_box import ProgramTask, judge, program
from flexmarl.agents.doors import DoorCall, SeatAddress
from flexmarl.agents.team import Team
from flexmarl.records import Task
from flexmarl.tools import Calculator

MAX_ATTEMPTS = 3
MISREAD = 0.1
"""How often the solver's copy of the question is wrong."""
CALL_COST = 0.2
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


@program("math_program")
async def solve_and_verify(task: ProgramTask, seats: Mapping[str, SeatAddress]) -> list[dict[str, Any]]:
    """Up to three attempts, until the verifier approves one; returns all attempts."""
    rng, attempts = random.Random(task.seed), list[dict[str, Any]]()
    solver, verifier = (at(seats[name]) for name in ("solver", "verifier"))
    while len(attempts) < MAX_ATTEMPTS and not (attempts and attempts[-1]["approved"]):
        heard = misread(rng, task.prompt) if rng.random() < MISREAD else task.prompt
        answer, used, calls = await attempt(solver, f"{heard:<11}" + "?!"[bool(attempts)])
        review = "|".join([f"{task.prompt:<12}", *used, answer])
        said: Any = [{"role": "user", "content": review}]
        verdict = await verifier.chat.completions.create(model="verifier", messages=said)
        approved = verdict.choices[0].message.content == "yes"
        attempts.append({"answer": answer, "approved": approved, "calls": calls, "used": len(used)})
    return attempts


def at(seat: SeatAddress) -> Any:
    """A client at one seat. All of them share their connections: a new client takes 50 ms, which an episode feels."""
    return shared().with_options(base_url=seat.openai_url, api_key=seat.key)


@cache
def shared() -> Any:
    """The client whose connections all others use; made where the program runs, so that the config loads without it.

    Over aiohttp. By default the client looks at each of its connections for each call, and 128 are open here.
    """
    from openai import (  # pyright: ignore[reportMissingImports] - not among the locked packages
        AsyncOpenAI,
        DefaultAioHttpClient,
    )

    return AsyncOpenAI(api_key="of a seat", base_url="http://127.0.0.1", http_client=DefaultAioHttpClient())


async def attempt(client: Any, question: str) -> tuple[str, list[str], int]:
    """The solver's answer, what it asked the calculator, and the number of its LLM calls."""
    messages: list[Any] = [{"role": "user", "content": question}]
    used: list[str] = []
    for calls in (1, 2):
        reply = await client.chat.completions.create(model="solver", messages=messages, tools=[CALCULATOR])
        said = reply.choices[0].message
        if not said.tool_calls or calls == 2:
            break
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            expression = json.loads(call.function.arguments).get("expression", "")  # type: ignore[union-attr]
            result = Calculator(max_digits=128).compute(expression).shown
            used.append(f"calc({expression})={result:<10}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return said.content or "", used[:1], calls


def misread(rng: random.Random, text: str) -> str:
    """The text with a digit left out or written twice, e.g. `4823*907` for `48213*907`."""
    place = rng.choice([index for index, character in enumerate(text) if character.isdigit()])
    alone = not (text[:place][-1:].isdigit() or text[place + 1 :][:1].isdigit())
    return text[:place] + text[place] * (2 if alone or rng.random() < 0.5 else 0) + text[place + 1 :]


@judge("math_judge")
def per_attempt(task: Task, team: Team, answer: Any, calls: Sequence[DoorCall]) -> None:
    """Rewards every attempt and every verdict by itself, as the white-box team does."""
    of_solver = [call for call in calls if call.seat == "solver"]
    verdicts = [call for call in calls if call.seat == "verifier"]
    place, scores = 0, list[float]()
    for one, verdict in zip(answer, verdicts, strict=True):
        scores.append(task.score(one["answer"]))
        for call in of_solver[place : place + one["calls"]]:
            call.reward(scores[-1] - CALL_COST * one["used"])
        place += one["calls"]
        verdict.reward(float(one["approved"] == bool(scores[-1])))
    team.report(success=scores[-1], first_success=scores[0], attempts=len(scores))
