"""Runs the end of a policy's batch: its gradient sums become an update, and the update's weights are served.

  accumulate ──► finish ──► set ──► (devices free) ──► serve
                 update     object store               every instance

consumes    a policy's gradient sums, and the divisors of its batch
waits for   the trainer, the object store, the policy's instances; never for another policy
produces    a version, served; nothing if the batch has no weighted token
unblocked by each of them in turn
"""

import asyncio
from collections.abc import Mapping

from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.publish import NewWeights, Publisher
from flexmarl.records import Divisors, PolicyName
from flexmarl.training.session import TrainingSession


class Updates:
    """The updates of all policies, each made and served when its batch is complete."""

    def __init__(
        self,
        sessions: Mapping[PolicyName, TrainingSession],
        publisher: Publisher,
        *,
        monitor: Monitor,
        journal: Journal,
    ) -> None:
        self._sessions = sessions
        self._publisher = publisher
        self._monitor = monitor
        self._journal = journal

    async def update(self, policy: PolicyName, divisors: Divisors) -> NewWeights | None:
        """Updates the policy and sets its weights; then its training devices are free. None: there was no update."""
        session, began = self._sessions[policy], asyncio.get_running_loop().time()
        report = await session.finish(divisors)
        weights = None
        if report is None:
            self._journal.event("update_skipped", policy=policy, because="no weighted token in the step")
        else:
            self._monitor.updated(policy, report, began)
            with self._monitor.time("publish"):
                weights = await self._publisher.set(policy, report.version)
        session.leave()
        return weights

    async def serve(self, weights: NewWeights) -> None:
        """Returns when every instance of the policy serves the weights."""
        with self._monitor.time("publish"):
            await self._publisher.serve(weights)
        self._monitor.published(weights.policy, weights.version)
