"""Long conversations in the experience store: each prompt kept as its parent and a tail, against each prompt whole.

    python benchmarks/conversations.py --json

Four conversations of 80 calls that end at 60 000 tokens each are put into a store on a file, call by call as a run puts
them, and read back call by call. Half of the new tokens of a call are sampled. Every row that was read is compared with
the one that was written, tensors bit by bit. Bytes are those of the closed file, all columns and indexes included.

`bytes_per_distinct_token` counts a token once, where it came into its conversation. Each has an id, every second one
two log-probabilities: at least 8 bytes.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from common import interleaved_rates, median_ratio, parser, report

from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS, response_row
from flexmarl.records import (
    AgentName,
    EpisodeId,
    FinishReason,
    PolicyName,
    Turn,
    Version,
    VersionRun,
    make_sample_id,
    make_trajectory_id,
)

CONVERSATIONS, CALLS, TOKENS = 4, 80, 60_000
SOLVER, POLICY = AgentName("solver"), PolicyName("solver")
WANTED_AT_MOST = {"bytes_vs_before": 0.1, "bytes_per_distinct_token": 12.0}


@dataclass
class Measured:
    """What a round of one contender showed."""

    kept_bytes: int = 0
    puts_per_s: float = 0.0
    gets_per_s: float = 0.0


def turns(conversation: int, *, linked: bool) -> Iterator[Turn]:
    """The calls of a conversation; `linked` ones name the call that they go on from."""
    rng = np.random.default_rng(conversation)
    trajectory = make_trajectory_id(conversation, 0, 0)
    new = TOKENS // CALLS
    prompt, parent = np.zeros(0, np.int32), None
    for hop in range(CALLS):
        prompt = np.concatenate((prompt, rng.integers(0, 150_000, new - new // 2, dtype=np.int32)))
        response = rng.integers(0, 150_000, new // 2, dtype=np.int32)
        sample_id = make_sample_id("task", hop, trajectory)
        logprobs = -rng.random(len(response), dtype=np.float32)
        yield Turn(
            sample_id=sample_id,
            episode=EpisodeId(trajectory),
            agent=SOLVER,
            policy=POLICY,
            prompt_ids=prompt,
            response_ids=response,
            logprobs=logprobs,
            raw_logprobs=logprobs,
            versions=(VersionRun(0, Version(0)),),
            finish=FinishReason.STOP,
            parent=parent,
        )
        prompt, parent = np.concatenate((prompt, response)), sample_id if linked else None


async def measure(path: Path, *, linked: bool) -> Measured:
    """Puts and reads back all conversations in a new store."""
    played = [list(turns(number, linked=linked)) for number in range(CONVERSATIONS)]
    calls = [turn for of_conversation in zip(*played, strict=True) for turn in of_conversation]
    store = DurableStore.create(path, agents=[SOLVER], columns=TURN_COLUMNS)
    try:
        began = time.perf_counter()
        for turn in calls:
            await store.put(SOLVER, [response_row(turn)])
        put = time.perf_counter()
        for turn in calls:
            await same_row(store, turn)
        got = time.perf_counter()
    finally:
        await store.close()
    return Measured(puts_per_s=len(calls) / (put - began), gets_per_s=len(calls) / (got - put))


async def same_row(store: DurableStore, turn: Turn) -> None:
    """Raises RuntimeError where the store gives back another row than was put."""
    (row,) = await store.get([turn.sample_id])
    for name, put in {**response_row(turn).values, "prompt_ids": turn.prompt_ids}.items():
        read = row.values[name]
        if isinstance(put, np.ndarray):
            same = read.dtype == put.dtype and read.tobytes() == put.tobytes()
        else:
            same = read == put
        if not same:
            raise RuntimeError(f"{name} of {turn.sample_id} came back as another value")


def main() -> None:
    """Runs both in turn, prints the table."""
    chosen = parser(__doc__).parse_args()
    latest: dict[str, Measured] = {}

    def contender(name: str, *, linked: bool, reads: bool) -> float:
        if not reads:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "experience.sqlite"
                latest[name] = asyncio.run(measure(path, linked=linked))
                latest[name].kept_bytes = path.stat().st_size
        return latest[name].gets_per_s if reads else latest[name].puts_per_s

    rates = interleaved_rates(
        {
            "put, parent and tail": lambda: contender("linked", linked=True, reads=False),
            "put, whole": lambda: contender("whole", linked=False, reads=False),
            "get, parent and tail": lambda: contender("linked", linked=True, reads=True),
            "get, whole": lambda: contender("whole", linked=False, reads=True),
        },
        chosen.repeats,
    )
    kept = {name: measured.kept_bytes for name, measured in latest.items()}
    report(
        f"{CONVERSATIONS} conversations of {CALLS} calls, {TOKENS} tokens each",
        ["", "calls/s (median)"],
        [[name, f"{np.median(values):.0f}"] for name, values in rates.items()]
        + [[f"MiB in the store, {name}", f"{size / 2**20:.1f}"] for name, size in kept.items()],
        {
            "bytes_vs_before": kept["linked"] / kept["whole"],
            "bytes_per_distinct_token": kept["linked"] / (CONVERSATIONS * TOKENS),
            "put_vs_whole": median_ratio(rates, "put, parent and tail", "put, whole"),
            "get_vs_whole": median_ratio(rates, "get, parent and tail", "get, whole"),
        },
        as_json=chosen.json,
        wanted_at_most=WANTED_AT_MOST,
    )


if __name__ == "__main__":
    main()
