"""Engines that can be moved: what they say depends on the request alone, wherever it is said."""

import asyncio
from dataclasses import replace

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


def ask(pool, name, policy=SOLVER, **how):
    """One request, under way."""
    one = replace(request(name, max_tokens=10), policy=policy)
    return asyncio.create_task(pool.generate(one, **how), name=f"ask-{name}")


async def publish(pool, version=1, *policies):
    """The version, loaded by every instance of the policies: of both, if none is named."""
    for policy in policies or (SOLVER, JUDGE):
        await pool.load_weights(policy, Version(version), Checksum(f"sum:weights/{policy}/{version}"))
