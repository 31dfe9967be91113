"""Tasks for the SQL team: questions about a shop's list of goods, which is another one in each task.

A question is three words, as in `most price new`: what is asked for, of which column, and of which goods. Each word has
a synonym, so that two questions may ask for the same. The agents are told neither the tables nor what a word means.
"""

import random
import sqlite3
import zlib
from collections.abc import Mapping

from flexmarl.records import Task
from flexmarl.tasks import Split, task_generator

ASKED: Mapping[str, str] = {
    **dict.fromkeys(("most", "top"), "max"),
    **dict.fromkeys(("least", "low"), "min"),
    **dict.fromkeys(("total", "whole"), "sum"),
    **dict.fromkeys(("number", "many"), "count"),
}
"""Words and the aggregates they mean."""
COLUMNS: Mapping[str, str] = {
    **dict.fromkeys(("price", "cost"), "price"),
    **dict.fromkeys(("size", "length"), "size"),
}
GOODS: Mapping[str, str] = {
    **dict.fromkeys(("new", "fresh"), "new"),
    **dict.fromkeys(("old", "used"), "not new"),
}
"""Words and the conditions they mean."""
ROWS = 24
FILE = "goods.sql"
"""Name of the script that makes the table, among the files of a task."""


@task_generator("sql_team")
def sql_task(seed: int, index: int, split: Split) -> Task:
    """Task number `index` of a split, with its own list of goods."""
    rng = random.Random(f"{seed}/{split}/{index}")
    question = draw(rng)
    while split_of(question) != split:
        question = draw(rng)
    script = goods(rng)
    return Task(
        input_id=f"{split}-{seed}-{index}",
        prompt=question,
        reference=str(answer(script, meaning(question))),
        data={"files": {FILE: script}},
    )


def draw(rng: random.Random) -> str:
    """A random question."""
    return " ".join(rng.choice(list(words)) for words in (ASKED, COLUMNS, GOODS))


def split_of(question: str) -> Split:
    """The one split a question belongs to; about a quarter of the 64 is held out."""
    return "held_out" if zlib.crc32(question.encode()) % 4 == 0 else "train"


def query(aggregate: str, column: str, condition: str) -> str:
    """What a writer may write."""
    return f"select {aggregate}({column}) from goods where {condition}"


def meaning(question: str) -> str:
    """The query that answers the question.

    >>> meaning("top cost used")
    'select max(price) from goods where not new'
    """
    asked, column, which = question.split()
    return query(ASKED[asked], COLUMNS[column], GOODS[which])


def goods(rng: random.Random) -> str:
    """A script that makes a list of goods: prices have two digits, sizes three."""
    rows = ", ".join(f"({rng.randint(10, 99)}, {rng.randint(100, 999)}, {rng.randint(0, 1)})" for _ in range(ROWS))
    return f"create table goods(price int, size int, new int); insert into goods values {rows};"


def answer(script: str, text: str) -> object:
    """What the query gives on a list: its one value. None without a row."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.executescript(script)
        return connection.execute(text).fetchone()[0]
    finally:
        connection.close()
