"""Demonstrations for the cold start of the long notes: one call of the reader, as its window shows it then.

They teach the form: to note that a page was read, to fill a summary with what was read, to look a fact up. What is
worth a place in a summary they do not teach: there, any character is as good as any other.
"""

import random
from string import ascii_lowercase

from examples.long_notes.tasks import KINDS, page

Message = dict[str, str]
"""`{"role": ..., "content": ...}`; what an assistant says is what the model is trained to say."""

SYSTEM, ASK, CARRY, READ = "read", "sum", "{summary}|", "."
"""Role prompt, question for a summary and how it is carried over, as in cpu.yaml; and the reply to a page."""
ROOM = len(KINDS)
"""Characters of a summary."""


def demonstration(rng: random.Random) -> list[Message]:
    """One conversation: a page and the summary after it, or, in a third of them, a question and its answer."""
    kinds = rng.sample(list(KINDS), len(KINDS))
    carried = "".join(
        rng.choice(KINDS[kind] if rng.random() < 0.5 else ascii_lowercase) for kind in rng.sample(kinds, ROOM)
    )
    if rng.random() < 1 / 3:
        found = [one for one in carried if one in KINDS[kinds[0]]] or KINDS[kinds[0]]
        return [*heard(carried, f"{kinds[0]}?"), said(rng.choice(found))]
    read = page(rng, kinds[0])
    first = rng.random() < 1 / 3
    seen = read if first else carried + read
    return [
        *(heard("", read, first=True) if first else heard(carried, read)),
        said(READ),
        {"role": "user", "content": ASK},
        said("".join(rng.sample(seen, ROOM))),
    ]


def heard(carried: str, text: str, *, first: bool = False) -> list[Message]:
    """What the reader sees; `first`: nothing has been carried over yet."""
    before = "" if first else CARRY.replace("{summary}", carried)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": before + text}]


def said(content: str) -> Message:
    """A message of the assistant."""
    return {"role": "assistant", "content": content}
