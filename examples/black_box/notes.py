"""Notes in which something is counted, and what each call of an agent that reads them is worth."""

import random
import re
from collections.abc import Sequence
from typing import Any

from flexmarl.agents.black_box import judge
from flexmarl.agents.doors import DoorCall
from flexmarl.agents.team import Team
from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

THINGS = ("pens", "coins", "hens", "books", "seats", "boxes", "apples", "lamps")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
WEATHER = ("fine", "cold", "wet", "windy")
LONG = 60
"""Further sentences of a long note: about 700 tokens, more than the agent's context takes beside its own prompt."""
MOST_CHARACTERS = 200
"""Length from which on an answer is no longer short."""
TITLE = 50
"""Longest title that opencode asks for, in characters."""


@task_generator("notes")
def note(seed: int, index: int, split: Split) -> Task:
    """Number `index` of a split. Every second note is long, so that the agent sums it up before it goes on."""
    rng = random.Random(f"{seed}/{split}/{index}")
    number, thing = rng.randint(12, 98), rng.choice(THINGS)
    weather = [f"On {rng.choice(DAYS)} it was {rng.choice(WEATHER)}." for _ in range(LONG * (index % 2))]
    said = " ".join([f"There are {number} {thing}.", *weather])
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=f"{said} How many {thing} are there? Answer with a number.",
        reference=str(number),
        data={"long": index % 2},
    )


@judge("notes")
def worth(task: Task, team: Team, answer: Any, calls: Sequence[DoorCall]) -> None:
    """Rewards every call for the right answer, the last one for a short one, and titles for their form."""
    of_coder = [call for call in calls if call.seat == "coder"]
    last = of_coder[-1].text.strip() if of_coder else ""
    right = float(task.reference in re.findall(r"\d+", last)[-1:])
    for call in of_coder:
        call.reward(right)
    if of_coder:
        of_coder[-1].reward(0.5 - 0.5 * min(1.0, len(last) / MOST_CHARACTERS), part="short")
    for call in calls:
        if call.seat == "titler":
            call.reward(float(0 < len(call.text.strip()) <= TITLE and "\n" not in call.text.strip()))
    team.report(success=right, characters=len(last))
