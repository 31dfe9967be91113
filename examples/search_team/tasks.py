"""Tasks for the search team: questions about 40 facts, which are others in each task, of one or two hops.

A question is a person and one or two words, as in `k head town`: where does the boss of k live? The facts do not hold
these words: each relation has one name in the facts and two others in questions. The agents are not given the facts,
which are documents for the tool `search`, nor what a word means. People have names of one letter, and words four, so
that a small model can copy them soon.
"""

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from string import ascii_lowercase
from typing import NamedTuple

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

LINKS: Mapping[str, str] = {**dict.fromkeys(("head", "lead"), "boss"), **dict.fromkeys(("chum", "mate"), "ally")}
"""Words and the relations of a worker to a senior."""
TRAITS: Mapping[str, str] = {**dict.fromkeys(("town", "city"), "home"), **dict.fromkeys(("born", "aged"), "year")}
"""Words and the relations of a senior to a number."""
WORDS: Mapping[str, str] = {**LINKS, **TRAITS}
RELATIONS = tuple(dict.fromkeys(WORDS.values()))
GROUP = 10
"""Workers of a task, and seniors; each has two facts."""
FILE = "facts.jsonl"
"""Name of the documents, among the files of a task."""


class Fact(NamedTuple):
    """What is known of a person."""

    subject: str
    relation: str
    value: str

    def __str__(self) -> str:
        """As agents read it, e.g. `k boss m`."""
        return " ".join(self)


@task_generator("search_team")
def search_task(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split, with its own facts."""
    rng = random.Random(f"{seed}/{split}/{index}")
    facts, question = draw(rng)
    while split_of(question) != split:
        facts, question = draw(rng)
    path = path_of(facts, question)
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=question,
        reference=path[-1].value,
        data={"files": {FILE: documents(facts)}, "path": list(map(str, path))},
    )


def draw(rng: random.Random) -> tuple[list[Fact], str]:
    """Facts, and a question that they answer; one hop is as likely as two."""
    people = rng.sample(ascii_lowercase, 2 * GROUP)
    workers, seniors = people[:GROUP], people[GROUP:]
    links = [Fact(worker, link, rng.choice(seniors)) for worker in workers for link in dict.fromkeys(LINKS.values())]
    traits = [
        Fact(senior, trait, str(rng.randint(10, 99))) for senior in seniors for trait in dict.fromkeys(TRAITS.values())
    ]
    if rng.random() < 0.5:
        question = [rng.choice(workers), rng.choice(list(LINKS)), rng.choice(list(TRAITS))]
    elif rng.random() < 0.5:
        question = [rng.choice(workers), rng.choice(list(LINKS))]
    else:
        question = [rng.choice(seniors), rng.choice(list(TRAITS))]
    return rng.sample([*links, *traits], len(links) + len(traits)), " ".join(question)


def split_of(question: str) -> Split:
    """The one split a question belongs to; about a quarter of all questions is held out."""
    return "held_out" if zlib.crc32(question.encode()) % 4 == 0 else "train"


def path_of(facts: Sequence[Fact], question: str) -> list[Fact]:
    """The facts that answer a question, one for each of its words.

    >>> list(map(str, path_of([Fact("m", "home", "47"), Fact("k", "boss", "m")], "k head town")))
    ['k boss m', 'm home 47']
    """
    subject, *words = question.split()
    path: list[Fact] = []
    for word in words:
        path.append(next(fact for fact in facts if (fact.subject, fact.relation) == (subject, WORDS[word])))
        subject = path[-1].value
    return path


def documents(facts: Sequence[Fact]) -> str:
    """The facts as JSONL for the tool `search`: what is asked is the title, the value the text."""
    return "\n".join(json.dumps({"title": f"{fact.subject} {fact.relation}", "text": fact.value}) for fact in facts)
