"""Makes the seed model of the store assistant, by supervised cold start on what `replies.py` says.

    python -m examples.store_assistant.make_seed [folder]

A minute on one core. The same kind of machine gives the same model, bit for bit.
"""

import random
import sys
from functools import partial
from pathlib import Path

from examples.cold_start import Message, cold_start, small_qwen3
from examples.store_assistant.store import HELPERS, answer_of, helper, lines, router

SEED_MODEL = Path(__file__).parent / "seed_model"
MODEL = partial(small_qwen3, positions=256, theta=200.0)


def main(folder: str | Path = SEED_MODEL) -> None:
    """Trains and saves."""
    cold_start(folder, MODEL, demonstration, updates=400, batch=64, rate=3e-3, warmup=20)


def demonstration(rng: random.Random) -> list[Message]:
    """One call of one agent, or a call of its tool and what follows."""
    line = rng.choice(lines(rng).split(";"))
    word, number = line.split()
    if rng.random() < 0.5:
        line = "" if rng.random() < 0.25 else line
        return [*asked("route", line), said(router(line, rng))]
    messages = asked(HELPERS[word].agent, line)
    if not HELPERS[word].uses_tool:
        return [*messages, said(helper(line, rng))]
    result = answer_of(line)
    call, after = f"{word}({number})", f"{line}{word}({number}){result}"
    return [*messages, said(call), {"role": "tool", "content": result}, said(helper(after, rng))]


def asked(system: str, line: str) -> list[Message]:
    """The beginning of a conversation."""
    return [{"role": "system", "content": system}, {"role": "user", "content": line}]


def said(text: str) -> Message:
    """A reply."""
    return {"role": "assistant", "content": text}


if __name__ == "__main__":
    main(*sys.argv[1:2])
