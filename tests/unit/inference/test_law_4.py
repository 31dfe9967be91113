"""Laws 4 and 10 of a pool whose instances move, grow and retire: random arrivals, losses, moves and publications.

Every request is answered exactly once, by its own policy, with the tokens of an uninterrupted one; never by weights
older than those that were served when it was asked. A policy keeps an instance or has one on its way: where none is
left, a request raises.
"""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexmarl.errors import EngineError
from flexmarl.events.serving_events import Called, InstanceGrown, InstanceLost, InstanceRetired, Moved
from flexmarl.inference.pool import InferencePool
from flexmarl.inference.routing import ROUTINGS
from flexmarl.inference.settings import PoolSettings
from flexmarl.objects.interface import Checksum
from flexmarl.records import FinishReason, InstanceId, PolicyName, Version
from flexmarl.simulator.virtual_time import run_virtual
from flexmarl.testing.inference import utf8_text
from tests.unit.inference.models import request
from tests.unit.inference.moving import Movable

POLICIES = [PolicyName("a"), PolicyName("b"), PolicyName("c")]
REQUESTS, MOVES, PUBLISHED, GROWTHS = 25, 12, 4, 4
FREE = 2
"""Engines that have room beside the first ones. As many losses take their room with them, as that of a node does."""


@dataclass(frozen=True)
class Schedule:
    seed: int
    deaths: int
    faults: float
    """Share of loads that go wrong or hang."""
    unlike: bool
    """True if engines of policy c take no other policy's weights, and others not those of c."""
    pool: PoolSettings


schedules = st.builds(
    Schedule,
    seed=st.integers(0, 10_000),
    deaths=st.integers(0, 4),
    faults=st.sampled_from([0.0, 0.0, 0.2]),
    unlike=st.booleans(),
    pool=st.builds(
        PoolSettings,
        routing=st.sampled_from(list(ROUTINGS)),
        max_running=st.sampled_from([None, 1, 2]),
        on_move=st.sampled_from(["continue", "drain"]),
        load_timeout_s=st.just(10.0),
        close_timeout_s=st.just(5.0),
        abort_grace_s=st.just(2.0),
        replacements=st.just(100),
    ),
)


class Fallible(Movable):
    """Loads for a while, and goes wrong by chance; remembers what it has acknowledged."""

    def __init__(self, policy, chance, faults, kind):
        self.kind = kind
        super().__init__(policy, script=lambda one: said(one.request_id, one.policy)[one.offset :], latency_s=0.5)
        self.chance, self.faults = chance, faults
        self.acknowledged = {(policy, Version(0))}

    async def load_weights(self, policy, version):
        assert self.kind(policy) == self.kind(self.policy), "an engine that cannot is not asked to"
        self.load_s = self.chance.uniform(0, 3)
        if self.chance.random() < self.faults:
            if self.chance.random() < 0.3:
                await asyncio.sleep(1000)
            return Checksum("torn")
        held = await super().load_weights(policy, version)
        self.acknowledged.add((policy, version))
        return held


def said(name, policy):
    """The uninterrupted answer."""
    chance = random.Random(f"{name}/{policy}")
    return "".join(chance.choice("xyz") for _ in range(chance.randint(1, 24)))


class Stage:
    """One schedule, played."""

    def __init__(self, schedule, seen):
        self.schedule, self.seen, self.chance = schedule, seen, random.Random(schedule.seed)
        counts = {policy: self.chance.randint(1, 3) for policy in POLICIES}
        self.engines = {f"{policy}/{i}": self.engine(policy) for policy in POLICIES for i in range(counts[policy])}
        served = {p: [e for name, e in self.engines.items() if name.startswith(p)] for p in POLICIES}
        self.held, self.starting = list(self.engines.values()), 0
        self.most = len(self.held) + FREE
        self.pool = InferencePool(served, schedule.pool, respawn=self.respawn, room=self)
        self.pool.events.listen(InstanceGrown, lambda grown: self.seen.update(["grown"]))
        self.pool.events.listen(InstanceRetired, lambda retired: self.seen.update(["retired"]))
        self.pool.events.listen(Moved, lambda move: self.seen.update({"started": move.starts}))
        self.pool.events.listen(Moved, lambda move: self.seen.update(["moved"]))
        self.pool.events.listen(InstanceLost, lambda lost: self.seen.update([lost.because.split(" ")[0]]))
        self.pool.events.listen(Called, lambda call: self.seen.update({"went on": bool(call.kept_tokens)}))
        self.served = dict.fromkeys(POLICIES, Version(0))

    def engine(self, policy):
        return Fallible(policy, random.Random(self.chance.random()), self.schedule.faults, self.kind)

    def kind(self, policy):
        return "apart" if self.schedule.unlike and policy == "c" else ""

    def has_room(self, policy, *, without=()):
        return len([engine for engine in self.held if engine not in without]) + self.starting < self.most

    async def end(self, engine):
        self.held = [one for one in self.held if one is not engine]

    async def respawn(self, policy, name):
        assert name not in self.engines, "no name is used twice"
        found = self.has_room(policy)
        self.starting += found
        await asyncio.sleep(self.chance.uniform(0, 5))
        self.starting -= found
        if not found:
            raise EngineError("no room")
        self.engines[name] = engine = self.engine(policy)
        self.held.append(engine)
        return engine

    async def publish(self, policy):
        for number in range(1, PUBLISHED + 1):
            version = Version(number)
            held = await self.pool.load_weights(policy, version, Checksum(f"sum:weights/{policy}/{version}"))
            self.served[policy] = version
            use = await self.pool.usage()
            live = [name for name in use if name.startswith(policy)]
            assert live
            assert set(held) >= set(live)
            assert {use[name].version for name in live} == {version}, "law 10: every live instance serves it"
            await asyncio.sleep(self.chance.uniform(0, 12))

    async def ask(self, number):
        await asyncio.sleep(self.chance.uniform(0, 40))
        policy = self.chance.choice(POLICIES)
        one = replace(request(number, max_tokens=30, seed=number), policy=policy)
        served, patience_s = self.served[policy], self.chance.choice([None, None, 4.0])
        answer = await self.pool.generate(one, timeout_s=patience_s)
        text, whole = utf8_text(answer.response_ids.tolist()), said(str(number), policy)
        self.seen.update([answer.finish.value])
        if answer.finish is FinishReason.ABORT:
            assert patience_s
            assert whole.startswith(text)
        else:
            assert (text, answer.finish) == (whole, FinishReason.STOP)
            assert answer.versions[0].version >= served, "nothing older than what was served when it was asked"
        assert len(answer.logprobs) == len(answer.raw_logprobs) == len(text)
        assert [run.start for run in answer.versions] == sorted({run.start for run in answer.versions})

    async def move(self):
        await asyncio.sleep(self.chance.uniform(0, 40))
        live = list(await self.pool.usage())
        if not live:
            return
        name, to = self.chance.choice(live), self.chance.choice(POLICIES)
        try:
            became = await self.pool.move(InstanceId.parse(name), to=to)
        except EngineError as error:
            self.seen.update(["refused" if "cannot be moved" in str(error) else "failed"])
            return
        assert became.startswith(f"{to}/")
        starts = self.kind(to) != self.kind(InstanceId.parse(name).policy)
        assert (became in self.engines) == starts, "only a new engine has the new name from the beginning"

    async def grow(self):
        await asyncio.sleep(self.chance.uniform(0, 40))
        try:
            assert (await self.pool.grow(self.chance.choice(POLICIES))) in self.engines
        except EngineError as error:
            self.seen.update(["refused growth" if "there is no room" in str(error) else "failed"])

    async def kill(self, number):
        await asyncio.sleep(self.chance.uniform(0, 40))
        name = self.chance.choice(list(self.engines))
        self.most -= number < FREE and self.engines[name] in self.held
        self.engines[name].fail("killed")
        self.pool.lose(InstanceId.parse(name), "killed")

    async def play(self):
        async with self.pool.open():
            await asyncio.gather(
                *(self.publish(policy) for policy in POLICIES),
                *(self.ask(number) for number in range(REQUESTS)),
                *(self.move() for _ in range(MOVES)),
                *(self.grow() for _ in range(GROWTHS)),
                *(self.kill(number) for number in range(self.schedule.deaths)),
            )
            assert set(self.pool.waiting.values()) == {0}
        assert all(not engine.misdirected for engine in self.engines.values()), "answered by its own policy"


def test_every_request_is_answered_once_by_its_own_policy_whatever_moves_dies_or_is_published():
    seen = Counter()

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(schedules)
    def examples(schedule):
        run_virtual(Stage(schedule, seen).play())

    examples()
    for witness in (
        "moved",
        "started",
        "grown",
        "refused growth",
        "retired",
        "went on",
        "refused",
        "failed",
        "killed",
        "stop",
        "abort",
    ):
        assert seen[witness], f"no example showed: {witness}; seen: {dict(seen)}"
