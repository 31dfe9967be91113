"""Runs the gate between two steps: a call of the next one waits until its own policy serves its new version.

  step k      rollout ────────────┤ solver: update, serve ──┤
                                  │ verifier: train, update, serve ───────┤
  step k + 1                      └─ rollout ─► solver's calls ─► verifier's calls

consumes    calls
waits for   the version that their policy makes in the step before
produces    the same calls, each at the version of its own step; the time limit of their episode stands still meanwhile
unblocked by `open`, when all instances of the policy serve it
"""

import asyncio
from collections.abc import Awaitable, Iterable

from flexmarl.records import PolicyName


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

    def holds(self, policy: PolicyName) -> Awaitable[object] | None:
        """What a call of the policy has to wait for before it is sent; None: nothing."""
        return self._shut[policy].wait() if policy in self._shut else None
