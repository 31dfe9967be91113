"""Runs the end of a policy's batch: its gradient sums become an update, and the update's weights are served.

  accumulate ──► finish ──► set ──► (devices free) ──► serve
                 update     object store               every instance

consumes    a policy's gradient sums, and the divisors of its batch
waits for   the trainer, the object store, the policy's instances; never for another policy
produces    a version, served; nothing if the batch has no weighted token
unblocked by each of them in turn
"""

import asyncio

from flexmarl.orchestrator.parts import Parts
from flexmarl.orchestrator.publish import NewWeights
from flexmarl.records import Divisors, PolicyName


async def update(parts: Parts, policy: PolicyName, divisors: Divisors) -> NewWeights | None:
    """Updates the policy and sets its weights; then its training devices are free. None: there was no update."""
    session, began = parts.sessions[policy], asyncio.get_running_loop().time()
    report = await session.finish(divisors)
    weights = None
    if report is None:
        parts.journal.event("update_skipped", policy=policy, because="no weighted token in the step")
    else:
        parts.monitor.updated(policy, report, began)
        with parts.monitor.time("publish"):
            weights = await parts.publisher.set(policy, report.version)
    session.leave()
    return weights


async def serve(parts: Parts, weights: NewWeights) -> None:
    """Returns when every instance of the policy serves the weights."""
    with parts.monitor.time("publish"):
        await parts.publisher.serve(weights)
    parts.monitor.published(weights.policy, weights.version)
