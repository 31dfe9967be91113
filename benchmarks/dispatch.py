"""CPU time of the controller per turn: 64 concurrent episodes of 10 turns, on the production path, store included.

    python benchmarks/dispatch.py --json

Player, seats, caller, pool, recorder and a `DurableStore` on a file are those of a run; the engine is a script. A
solver with a memory and a verifier without one take turns, so half of the prompts extend the conversation before them
and half are rendered anew. Times are CPU seconds of this process, user and system, in which nothing else runs:

    event loop     tokenising, causality, requests, encoding of rows, asyncio itself
    store/write    the store's writer thread: SQL, and the syncs of the disk as far as they cost CPU time

    at once        every call is answered as soon as it is made: the controller is all there is to wait for
    spread out     replies of 20 to 60 steps of a millisecond: most answers come alone, and wake a process that sleeps

An episode's end (rewards into the store) is shared by its turns. `--profile` prints the functions of the event loop
that take longest, in a round that is not measured.
"""

import asyncio
import cProfile
import pstats
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from common import parser, report

from flexmarl.agents import Team, TeamSpec
from flexmarl.agents.characters import character_renderer
from flexmarl.agents.settings import TeamSettings
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.inference.pool import InferencePool
from flexmarl.records import (
    AgentName,
    FinishReason,
    Generation,
    GenerationRequest,
    GroupId,
    GroupRecord,
    PolicyName,
    Task,
    VersionRun,
)
from flexmarl.rollout.player import Player
from flexmarl.testing.inference import ScriptedEngine

EPISODES, TURNS, GROUPS = 64, 10, 4
STEP_S = {"at once": 0.0, "spread out": 0.001}
RESPONSE = "the sum of both is 7, since 3 and 4 make 7; I am sure of it."
QUESTION = "How much is 3 + 4? Show how you got there, then say the number alone, and nothing after it. "
WRITER = "store/write"
POLICIES = (PolicyName("solver"), PolicyName("verifier"))
SETTINGS = {
    "agents": {
        "solver": {"policy": "solver", "memory": "full", "system": "You solve sums, step by step."},
        "verifier": {"policy": "verifier", "system": "You look for the mistake in an answer."},
    },
    "workflow": {"type": "sequential", "agents": ["solver", "verifier"]},
}


@dataclass(frozen=True)
class Taken:
    """CPU microseconds of a turn."""

    in_all: float
    writer: float


class Answering(ScriptedEngine):
    """Answers every request with the same tokens, after 20 to 60 steps."""

    def __init__(self, step_s: float) -> None:
        super().__init__(lambda request: RESPONSE)
        self._step_s = step_s
        renderer = character_renderer()
        self._ids = np.array([*renderer.encode(RESPONSE), renderer.stop_ids[0]], np.int32)
        self._logprobs = np.full(len(self._ids), -0.5, np.float32)

    async def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Generation]:
        """Yields one Generation per request, when its time has come."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for request in sorted(requests, key=steps_of):
            left = began + steps_of(request) * self._step_s - clock()
            if self._step_s and left > 0:
                await asyncio.sleep(left)
            yield Generation(
                request_id=request.request_id,
                response_ids=self._ids,
                logprobs=self._logprobs,
                raw_logprobs=self._logprobs,
                versions=(VersionRun(0, self.version),),
                finish=FinishReason.STOP,
            )


def steps_of(request: GenerationRequest) -> int:
    """How long the reply is, in decode steps; the seed makes it the same in every run."""
    return 20 + request.seed % 41


async def alternate(task: Task, team: Team) -> None:
    """Solver and verifier, until each has spoken in half of the turns."""
    said = ""
    for _ in range(TURNS // 2):
        said = (await team["solver"].act(f"{task.prompt}{said}")).text
        said = (await team["verifier"].act(f"{task.prompt}{said}")).text
    team.reward(1.0)


def team_of_two() -> TeamSpec:
    """A solver and a verifier of two policies."""
    renderers = dict.fromkeys(POLICIES, character_renderer())
    spec = TeamSpec.build(TeamSettings.model_validate(SETTINGS), renderers, POLICIES)
    return replace(spec, run=alternate)


def seconds_of(thread: str) -> float:
    """CPU seconds of the thread of this name."""
    (found,) = (one.ident for one in threading.enumerate() if one.name == thread and one.ident is not None)
    return time.clock_gettime(time.pthread_getcpuclockid(found))


async def play(player: Player, group: int) -> None:
    """Plays all episodes of a group together. A group has a prompt of its own, so that no text is remembered."""
    task = Task(input_id=f"sum-{group}", prompt=f"{QUESTION}This is question {group}. ")
    record = GroupRecord(group=GroupId(group), task=task, step=0)
    for episode in await asyncio.gather(*(player.play(record, index) for index in range(EPISODES))):
        if not episode.finished or len(episode.turns) != TURNS:
            raise RuntimeError(f"episode {episode.episode} has {len(episode.turns)} turns: {episode.reason}")


async def measure(first: int, *, step_s: float, profile: bool = False) -> Taken:
    """What a turn takes: the groups from `first` on, in a store of their own. Its warm-up is one group more."""
    turns = GROUPS * EPISODES * TURNS
    with tempfile.TemporaryDirectory() as folder:
        agents = [AgentName(name) for name in POLICIES]
        store = DurableStore.create(Path(folder) / "experience.sqlite", agents=agents, columns=TURN_COLUMNS)
        async with InferencePool({policy: [Answering(step_s)] for policy in POLICIES}).open() as pool:
            player = Player(team=team_of_two(), generate=pool.generate, run_seed=0, timeout_s=3600.0, store=store)
            await play(player, first + GROUPS)
            began, writer = time.process_time(), seconds_of(WRITER)
            for number in range(GROUPS):
                await play(player, first + number)
            in_all, writer = time.process_time() - began, seconds_of(WRITER) - writer
            if profile:
                with cProfile.Profile() as profiler:
                    await play(player, first + GROUPS + 1)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
        await store.close()
    return Taken(1e6 * in_all / turns, 1e6 * writer / turns)


def main() -> None:
    """Prints the table."""
    options = parser(__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--profile", action="store_true", help="print where the event loop spends its time")
    chosen = options.parse_args()
    taken: dict[str, list[Taken]] = {name: [] for name in STEP_S}
    for repeat in range(chosen.repeats + 1):
        for name, step_s in STEP_S.items():
            taken[name].append(asyncio.run(measure(2 * GROUPS * repeat, step_s=step_s)))
    if chosen.profile:
        asyncio.run(measure(0, step_s=0.0, profile=True))
    best = {name: min(runs[1:], key=lambda one: one.in_all) for name, runs in taken.items()}
    report(
        f"{EPISODES} concurrent episodes of {TURNS} turns: CPU microseconds of a turn, quickest of {chosen.repeats}",
        ("answers", "event loop", WRITER, "in all"),
        [
            (name, f"{one.in_all - one.writer:.0f}", f"{one.writer:.0f}", f"{one.in_all:.0f}")
            for name, one in best.items()
        ],
        {
            "us_per_turn": best["at once"].in_all,
            "us_per_turn_writer": best["at once"].writer,
            "us_per_turn_spread": best["spread out"].in_all,
        },
        as_json=chosen.json,
        wanted_at_most={"us_per_turn": 350.0},
    )


if __name__ == "__main__":
    main()
