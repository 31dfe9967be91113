"""Tasks of the long notes: pages such as `xkq7mz`, then a question, such as `digit?`.

Each page has one fact among letters that nobody asks for: a digit is on one page, a capital on the other. The pages do
not fit the reader's window together, and a summary has room for both facts and for nothing else.
"""

import random
import zlib
from string import ascii_lowercase

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

KINDS = {"digit": "0123456789", "capital": "ABCDEFGHIJ"}
"""The kinds of facts. There are as many pages, and a summary has room for as many characters."""
LENGTH = 6
"""Characters of a page."""
BETWEEN = "/"
"""Stands between the pages in a prompt, and before the question."""


@task_generator("long_notes")
def notes(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split; a quarter of all pages is held out."""
    rng = random.Random(f"{seed}/{split}/{index}")
    kinds, pages = draw(rng)
    while split_of(pages) != split:
        kinds, pages = draw(rng)
    page = index % len(pages)
    facts = [next(one for one in text if one not in ascii_lowercase) for text in pages]
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=BETWEEN.join([*pages, f"{kinds[page]}?"]),
        reference=facts[page],
        data={"page": page + 1, "facts": facts},
    )


def draw(rng: random.Random) -> tuple[list[str], list[str]]:
    """Pages, and the kind of the fact on each."""
    kinds = rng.sample(list(KINDS), len(KINDS))
    return kinds, [page(rng, kind) for kind in kinds]


def page(rng: random.Random, kind: str) -> str:
    """A page with a fact of this kind, at any place.

    >>> page(random.Random(0), "digit")
    '6iynqb'
    """
    characters = [rng.choice(KINDS[kind]), *rng.sample(ascii_lowercase, LENGTH - 1)]
    rng.shuffle(characters)
    return "".join(characters)


def split_of(pages: list[str]) -> Split:
    """The one split in which these pages are."""
    return "held_out" if zlib.crc32(BETWEEN.join(pages).encode()) % 4 == 0 else "train"
