"""Runs the gate between two steps: a call of the next one waits until its own policy serves its new version.

  step k      rollout ────────────┤ solver: update, serve ──┤
                                  │ verifier: train, update, serve ───────┤
  step k + 1                      └─ rollout ─► solver's calls ─► verifier's calls

consumes    calls
waits for   the version that their policy makes in the step before
produces    the same calls, each at the version of its own step
unblocked by `open`, when all instances of the policy serve it
"""

import asyncio
from collections.abc import Iterable

from flexmarl.agents import Generate
from flexmarl.records import Generation, GenerationRequest, PolicyName


class Gate:
    """Shut for the policies that are between two versions."""

    def __init__(self) -> None:
        self._shut: dict[PolicyName, asyncio.Event] = {}

    def shut(self, policies: Iterable[PolicyName]) -> None:
        """Calls of these policies wait from now on."""
        self._shut = {policy: asyncio.Event() for policy in policies}

    def open(self, policy: PolicyName) -> None:
        """The policy serves what the next step is sampled with; one that was not shut is no error."""
        if policy in self._shut:
            self._shut.pop(policy).set()

    def around(self, generate: Generate) -> Generate:
        """`generate` behind this gate."""

        async def wait(request: GenerationRequest) -> Generation:
            if request.policy in self._shut:
                await self._shut[request.policy].wait()
            return await generate(request)

        return wait
