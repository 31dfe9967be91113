"""Engines that can be moved: what they say depends on the request alone, wherever it is said."""

import asyncio
from dataclasses import replace

from flexmarl.errors import EngineError
from flexmarl.objects.interface import Checksum
from flexmarl.records import PolicyName, Version
from flexmarl.testing.inference import ScriptedEngine
from tests.unit.inference.models import request

SOLVER, JUDGE = PolicyName("solver"), PolicyName("judge")
LETTERS = {SOLVER: "abcdefghij", JUDGE: "ABCDEFGHIJ"}


class Movable(ScriptedEngine):
    """Says its policy's letters, one a second; `misdirected` are requests of another policy that came to it."""

    def __init__(self, policy, *, load_s=0.0, script=lambda one: LETTERS[one.policy][one.offset :], **changes):
        super().__init__(script, **{"latency_s": 1.0, **changes})
        self.policy, self.load_s = policy, load_s
        self.misdirected, self.loads = [], []

    async def generate(self, requests):
        self.misdirected += [one for one in requests if one.policy != self.policy]
        async for generation in super().generate(requests):
            yield generation

    async def load_weights(self, policy, version):
        self.loads.append((policy, version))
        await asyncio.sleep(self.load_s)
        held = await super().load_weights(policy, version)
        self.policy = policy
        return held


class Own(Movable):
    """Serves no policy but its own."""

    async def load_weights(self, policy, version):
        if policy != self.policy:
            raise EngineError(f"an engine of '{self.policy}' cannot load weights of '{policy}'")
        return await super().load_weights(policy, version)


class Room:
    """An `EngineRoom` for so many engines, and the `Respawn` that starts them: each kind is a policy's own."""

    def __init__(self, most, *, start_s=10.0, alike=False):
        self.most, self.start_s, self.alike = most, start_s, alike
        self.held, self.starting, self.events = [], 0, []
        self.faults = []
        """What the next starts raise; None starts well."""

    def kind(self, policy):
        return "" if self.alike else policy

    def has_room(self, policy, *, without=()):
        return len([one for one in self.held if one not in without]) + self.starting < self.most

    async def end(self, engine):
        if engine in self.held:
            self.held.remove(engine)
            self.events.append((asyncio.get_running_loop().time(), "ended", engine.policy))

    async def __call__(self, policy, name):
        assert self.has_room(policy), "never more than fit"
        self.starting += 1
        self.events.append((asyncio.get_running_loop().time(), "started", name))
        try:
            await asyncio.sleep(self.start_s)
            if self.faults and (fault := self.faults.pop(0)):
                raise fault
        finally:
            self.starting -= 1
        self.held.append(Own(policy))
        return self.held[-1]


def ask(pool, name, policy=SOLVER, **how):
    """One request, under way."""
    one = replace(request(name, max_tokens=10), policy=policy)
    return asyncio.create_task(pool.generate(one, **how), name=f"ask-{name}")


async def publish(pool, version=1, *policies):
    """The version, loaded by every instance of the policies: of both, if none is named."""
    for policy in policies or (SOLVER, JUDGE):
        await pool.load_weights(policy, Version(version), Checksum(f"sum:weights/{policy}/{version}"))
