"""Prints what a program asked for in a run, by seat and lane, and the account of its tokens.

flexmarl show runs/RUN --json --limit 9999 | python -m examples.black_box.lanes
"""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

COLUMNS = ("seat", "lane", "its prompt begins", "turns", "root", "extends", "rendered", "prompt tokens", "cut", "lost")
SHOWN = 36
"""Characters of a prompt that are shown."""


def main(lines: Iterable[str]) -> Iterator[str]:
    """The rows of the table, then the account. `lines`: episodes as `flexmarl show --json` prints them."""
    lanes = defaultdict[tuple[str, int], list[Mapping[str, Any]]](list)
    fates = Counter[str]()
    for turn in (turn for line in lines if line.strip() for turn in json.loads(line)["turns"]):
        lanes[turn["agent"], turn["tags"]["lane"]].append(turn)
        fate = turn["reason"].split(":")[0] if turn["state"] == "filtered" else turn["state"]
        fates[fate] += len(turn["reply"]["ids"])
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for (seat, lane), turns in sorted(lanes.items()):
        kinds = Counter(turn["tags"]["continuity"] for turn in turns)
        lengths = [sum(len(part["ids"]) for part in turn["prompt"]) for turn in turns]
        cut = sum(turn["finish"] == "length" for turn in turns)
        lost = sum(turn["reason"].startswith("undelivered") for turn in turns)
        counted = (len(turns), kinds["root"], kinds["extends"], kinds["rendered"], f"{median(lengths):g}", cut, lost)
        yield f"| {seat} | {lane} | {begin(turns[0])} | {' | '.join(map(str, counted))} |"
    yield ""
    yield f"{sum(fates.values())} tokens sampled: {', '.join(f'{fates[one]} {one}' for one in sorted(fates))}"


def begin(turn: Mapping[str, Any]) -> str:
    """The first words of a turn's prompt, behind the mark of its first message."""
    words = turn["prompt"][0]["text"].partition("\n")[2].split("\n")[0]
    return words if len(words) <= SHOWN else f"{words[:SHOWN].rstrip()} ..."


if __name__ == "__main__":
    print("\n".join(main(sys.stdin)))
