"""CPU time of the controller per turn: 64 concurrent episodes of 10 turns, on the production path, store included.

    python benchmarks/dispatch.py --json

Player, seats, caller, pool, recorder and a `DurableStore` on a file are those of a run; the engine is a script. A
solver with a memory and a verifier without one take turns, so half of the prompts extend the conversation before them
and half are rendered anew. Times are CPU seconds of this process, user and system, in which nothing else runs:

    event loop     tokenising, causality, requests, encoding of rows, asyncio itself
    store/write    the store's writer thread: SQL, and the syncs of the disk as far as they cost CPU time

    at once        every call is answered as soon as it is made: the controller is all there is to wait for
    spread out     replies of 20 to 60 steps of a millisecond: most answers come alone, and wake a process that sleeps

    10, 1000       so many episodes at once, answered at once, played by two rollout workers on Ray. These tokenise, run
                   workflows and write rows; the controller serves their calls. `ray`: its engines are on Ray, too

An episode's end (rewards into the store) is shared by its turns. `--profile` prints the functions of the event loop
that take longest, in a round that is not measured.
"""

import asyncio
import cProfile
import pstats
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import parser, report
from dispatch_team import POLICIES, QUESTION, TURNS, Answering, team_of_two

from flexmarl.cluster.backends.ray import ray_cluster
from flexmarl.cluster.interface import Resident, ResidentKind, ResidentSpec
from flexmarl.cluster.leases import RunLeases
from flexmarl.cluster.settings import ClusterSettings
from flexmarl.errors import EngineError
from flexmarl.events.event import Events
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.inference.interface import InferenceEngine, WeightedEngine
from flexmarl.inference.pool import InferencePool
from flexmarl.records import AgentName, GroupId, GroupRecord, InstanceId, PolicyName, Task, WorkerId
from flexmarl.rollout.player import Player
from flexmarl.rollout.remote_player import RemotePlayer, RolloutWorkers
from flexmarl.rollout.worker import PlayParts, RolloutHost, RolloutWorker

EPISODES, GROUPS = 64, 4
STEP_S = {"at once": 0.0, "spread out": 0.001}
WRITER = "store/write"
WORKERS = 2
TOGETHER = {10: 40, 1000: 2}
"""Episodes that are played at once, and how often so many are played."""
FIGURES = {
    False: {10: "us_per_turn_10", 1000: "us_per_turn_1000"},
    True: {10: "us_per_turn_ray_10", 1000: "us_per_turn_ray_1000"},
}
"""Names of the figures with rollout workers: whether engines are on Ray, and the episodes at once."""


@dataclass(frozen=True)
class Taken:
    """CPU microseconds of a turn."""

    in_all: float
    writer: float


def seconds_of(thread: str) -> float:
    """CPU seconds of the thread of this name."""
    (found,) = (one.ident for one in threading.enumerate() if one.name == thread and one.ident is not None)
    return time.clock_gettime(time.pthread_getcpuclockid(found))


async def play(player: Player, group: int, *, episodes: int = EPISODES) -> None:
    """Plays all episodes of a group together. A group has a prompt of its own, so that no text is remembered."""
    task = Task(input_id=f"sum-{group}", prompt=f"{QUESTION}This is question {group}. ")
    record = GroupRecord(group=GroupId(group), task=task, step=0)
    for episode in await asyncio.gather(*(player.play(record, index) for index in range(episodes))):
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


async def measure_workers() -> dict[str, float]:
    """By figure, what a turn takes the controller when rollout workers play it."""
    taken: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fx") as folder, RunLeases("dispatch", root=Path(folder)) as leases:
        path = Path(folder) / "experience.sqlite"
        store = DurableStore.create(path, agents=[AgentName(name) for name in POLICIES], columns=TURN_COLUMNS)
        events, residents = Events(), WORKERS + len(POLICIES)
        async with ray_cluster(
            ClusterSettings(backend="ray"), leases=leases, residents=residents, events=events
        ) as cluster:

            async def spawn(name: WorkerId) -> Resident[RolloutWorker]:
                return (await cluster.spawn([worker_spec(name, path)]))[0]

            remote = [engine.remote for engine in await cluster.spawn([engine_spec(policy) for policy in POLICIES])]
            async with RolloutWorkers(spawn, stuck_s=3600.0, events=events).open() as workers:
                for number in range(WORKERS):
                    workers.add(await spawn(WorkerId(ResidentKind.ROLLOUT, number=number)))
                for on_ray, engines in ((False, [Answering(0.0) for _ in POLICIES]), (True, remote)):
                    instances = {policy: [engine] for policy, engine in zip(POLICIES, engines, strict=True)}
                    async with InferencePool(instances).open() as pool:
                        player = RemotePlayer(
                            workers=workers,
                            team=team_of_two(),
                            generate=pool.generate,
                            run_seed=0,
                            timeout_s=3600.0,
                            store=store,
                        )
                        for episodes, times in TOGETHER.items():
                            figure = FIGURES[on_ray][episodes]
                            taken[figure] = await per_turn(player, episodes, times, len(taken))
        await store.close()
    return taken


async def per_turn(player: Player, episodes: int, times: int, nth: int) -> float:
    """CPU microseconds of this process for a turn of groups of so many episodes, after one that is not measured."""
    first = 1000 * (nth + 1)
    await play(player, first, episodes=episodes)
    began = time.process_time()
    for number in range(times):
        await play(player, first + 1 + number, episodes=episodes)
    return 1e6 * (time.process_time() - began) / (times * episodes * TURNS)


def worker_spec(name: WorkerId, path: Path) -> ResidentSpec[RolloutWorker]:
    """A rollout worker that writes into the store's file."""
    parts = PlayParts(
        team=team_of_two(), open_store=partial(DurableStore.join, path), run_seed=0, timeout_s=3600.0, grace_s=3.0
    )
    return ResidentSpec(
        name=name, kind=ResidentKind.ROLLOUT, contract=RolloutWorker, make=partial(RolloutHost, name, parts)
    )


def engine_spec(policy: PolicyName) -> ResidentSpec[InferenceEngine]:
    """A scripted engine in a process of its own."""
    return ResidentSpec(
        name=WorkerId.engine(InstanceId(policy, 0)),
        kind=ResidentKind.ENGINE,
        contract=WeightedEngine,
        make=partial(Answering, 0.0),
        error=EngineError,
    )


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
    with_workers = asyncio.run(measure_workers())
    best = {name: min(runs[1:], key=lambda one: one.in_all) for name, runs in taken.items()}
    report(
        f"{EPISODES} concurrent episodes of {TURNS} turns: CPU microseconds of a turn, quickest of {chosen.repeats}",
        ("answers", "event loop", WRITER, "in all"),
        [
            (name, f"{one.in_all - one.writer:.0f}", f"{one.writer:.0f}", f"{one.in_all:.0f}")
            for name, one in best.items()
        ]
        + [(name.removeprefix("us_per_turn_"), "", "", f"{us:.0f}") for name, us in with_workers.items()],
        {
            "us_per_turn": best["at once"].in_all,
            "us_per_turn_writer": best["at once"].writer,
            "us_per_turn_spread": best["spread out"].in_all,
            **with_workers,
        },
        as_json=chosen.json,
        wanted_at_most={
            "us_per_turn": 350.0,
            **{name: 500.0 if "ray" in name else 300.0 for name in with_workers},
        },
    )


if __name__ == "__main__":
    main()
