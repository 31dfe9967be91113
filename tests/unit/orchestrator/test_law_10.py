"""Law 10 under random faults: an instance serves a version only after its own checksum of it; nobody waits for ever.

Engines load slowly, fail, hold other bytes, hang, and die at any moment, replacements too; meanwhile versions are
published, old ones released, and requests come and lose their patience.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.agents.characters import character_renderer
from flexmarl.errors import EngineError
from flexmarl.events.journal import RememberedEvents
from flexmarl.events.serving_events import Called, InstanceReplaced
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.backends.memory import InlineObjectStore
from flexmarl.objects.interface import Checksum
from flexmarl.orchestrator.publish import Publisher, Versions
from flexmarl.records import FinishReason, InstanceId, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import ScriptedEngine
from flexmarl.testing.scripted_run import spoken
from flexmarl.testing.training import FakeTrainer
from tests.unit.inference.models import request
from tests.unit.orchestrator.test_publish import SOLVER, train

PUBLISHED, REQUESTS = 4, 12


@dataclass(frozen=True)
class Schedule:
    seed: int
    instances: int
    replacements: int
    faults: float
    """Share of loads, starts and closings that go wrong."""
    deaths: int


schedules = st.builds(
    Schedule,
    seed=st.integers(0, 10_000),
    instances=st.integers(1, 3),
    replacements=st.integers(0, 6),
    faults=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
    deaths=st.integers(0, 4),
)


@dataclass
class Seen:
    """What really happened, over all examples."""

    count: Counter = field(default_factory=Counter)


class Unreliable(ScriptedEngine):
    """Goes wrong by chance; remembers which versions it has acknowledged."""

    def __init__(self, objects, chance: random.Random, faults: float) -> None:
        text = "".join(chance.choice("abc") for _ in range(20))
        renderer = character_renderer()
        super().__init__(spoken(lambda *_: text, renderer), latency_s=0.3, decode=renderer.decode, objects=objects)
        self.chance, self.faults = chance, faults
        self.acknowledged = {Version(0)}
        self.loads: list[Version] = []

    def fault(self, *kinds: str) -> str:
        return self.chance.choice(kinds) if self.chance.random() < self.faults else ""

    async def load_weights(self, policy, version):
        self.loads.append(version)
        fault = self.fault("fails", "torn", "hangs")
        await asyncio.sleep(self.chance.uniform(0, 4))
        if fault == "fails":
            raise OSError("scripted: the network is gone")
        held = await super().load_weights(policy, version)
        await asyncio.sleep(1000 if fault == "hangs" else self.chance.uniform(0, 4))
        if fault == "torn":
            return Checksum("torn")
        self.acknowledged.add(version)
        return held

    async def close(self):
        await asyncio.sleep(1000 if self.fault("hangs") else self.chance.uniform(0, 2))
        await super().close()


class Stage:
    """One schedule, played."""

    def __init__(self, schedule: Schedule, seen: Seen) -> None:
        self.schedule, self.seen = schedule, seen
        self.chance = random.Random(schedule.seed)
        self.objects = InlineObjectStore()
        self.trainer = FakeTrainer(SOLVER, self.objects)
        self.engines = {f"solver/{number}": self.engine() for number in range(schedule.instances)}
        self.pool = InferencePool(
            {SOLVER: list(self.engines.values())},
            PoolSettings(load_timeout_s=10, start_timeout_s=10, close_timeout_s=5, replacements=schedule.replacements),
            respawn=self.respawn,
        )
        self.broken: list[str] = []
        """Calls that were answered at a version that their instance had not acknowledged."""
        self.versions = Versions({SOLVER: Version(0)})
        self.publisher = Publisher(
            trainers={SOLVER: self.trainer},
            pool=self.pool,
            objects=self.objects,
            versions=self.versions,
            events=RememberedEvents(),
        )
        self.pool.events.listen(Called, self.check_acknowledged)
        self.pool.events.listen(InstanceReplaced, lambda replaced: self.seen.count.update(["replaced"]))

    def engine(self) -> Unreliable:
        return Unreliable(self.objects, random.Random(self.chance.random()), self.schedule.faults)

    async def respawn(self, policy, name):
        assert name not in self.engines, "no name is used twice"
        self.engines[name] = engine = self.engine()
        await asyncio.sleep(1000 if engine.fault("hangs") else self.chance.uniform(0, 6))
        return engine

    def check_acknowledged(self, call) -> None:
        engine = self.engines[call.instance]
        (answer,) = (one for one in engine.generations if one.request_id == call.request)
        # The pool would take what is raised here for the engine's failure.
        self.broken += [f"{call} at {run}" for run in answer.versions if run.version not in engine.acknowledged]
        self.seen.count["several versions in one answer"] += len(answer.versions) > 1
        self.seen.count["answered by a replacement"] += (
            call.instance not in list(self.engines)[: self.schedule.instances]
        )

    async def publish(self) -> None:
        for number in range(PUBLISHED):
            await asyncio.sleep(self.chance.uniform(0, 8))
            try:
                await self.publisher.publish(SOLVER, await train(self.trainer) if number else Version(0))
            except EngineError as error:
                self.seen.count[str(error).split(":")[0].rstrip("0123456789")] += 1
                return
            for name in self.pool.given[SOLVER]:
                assert self.trainer.version in self.engines[name].acknowledged, "law 10: every live instance has it"

    async def ask(self, number: int) -> None:
        await asyncio.sleep(self.chance.uniform(0, 30))
        served = self.versions.served[SOLVER]
        patience_s = self.chance.choice([None, 2.0, 20.0])
        try:
            answer = await self.pool.generate(request(number, (5, 6), max_tokens=30), timeout_s=patience_s)
        except EngineError as error:
            self.seen.count[str(error).split(":")[0]] += 1
            return
        self.seen.count[answer.finish.value] += 1
        if answer.finish is not FinishReason.ABORT:
            assert answer.versions[0].version >= served, "nothing older than what was published before it was asked"

    async def kill(self) -> None:
        await asyncio.sleep(self.chance.uniform(0, 40))
        name = self.chance.choice(list(self.engines))
        self.engines[name].fail("killed")
        self.seen.count["died"] += 1
        if self.chance.random() < 0.5:
            self.pool.lose(InstanceId.parse(name), "its process was killed")

    async def play(self) -> None:
        async with self.pool.open():
            await asyncio.gather(
                self.publish(),
                *(self.ask(number) for number in range(REQUESTS)),
                *(self.kill() for _ in range(self.schedule.deaths)),
            )
        assert self.broken == [], "law 10"
        for name, because in self.pool.lost.items():
            for what in ("starting it took", "took more", "network is gone", "torn", "process was killed"):
                self.seen.count[what] += what in because
            assert name in self.engines
        self.seen.count["newer weights while loading"] += sum(
            len(engine.loads) > 1 and engine.loads[0] > 0
            for name, engine in self.engines.items()
            if int(name.split("/")[1]) >= self.schedule.instances
        )


def test_no_answer_comes_from_a_version_that_its_instance_has_not_acknowledged_and_every_request_ends():
    seen = Seen()

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schedules)
    def examples(schedule):
        run_virtual(Stage(schedule, seen).play())

    examples()
    for witness in (
        "died",
        "replaced",
        "answered by a replacement",
        "several versions in one answer",
        "newer weights while loading",
        "no instance of 'solver' serves version ",
        "no instance of 'solver' is left",
        "starting it took",
        "took more",
        "network is gone",
        "torn",
        "process was killed",
        "abort",
        "stop",
    ):
        assert seen.count[witness], f"no example showed: {witness}; seen: {dict(seen.count)}"
