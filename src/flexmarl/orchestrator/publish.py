"""Runs publishing: new weights reach every instance before anything else is admitted (law 10).

consumes    a policy's new version
waits for   the object store, then every live instance's own checksum
produces    the version, acknowledged
unblocked by the last instance; one that fails is deregistered by the pool
"""

from collections.abc import Mapping

from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import ObjectKey, ObjectStore
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import PolicyName, Version
from flexmarl.training.interface import Trainer


class Publisher:
    """Publishes one policy at a time; keeps only the newest weights in the object store."""

    def __init__(
        self,
        *,
        trainers: Mapping[PolicyName, Trainer],
        pool: InferencePool,
        objects: ObjectStore,
        versions: Versions,
        journal: Journal,
    ) -> None:
        self._trainers = trainers
        self._pool = pool
        self._objects = objects
        self._versions = versions
        self._journal = journal
        self._keys: dict[PolicyName, ObjectKey] = {}

    async def publish(self, policy: PolicyName, version: Version) -> None:
        """Sets the weights once, and returns when all live instances serve them.

        The newest weights stay in the object store: an instance that replaces a lost one gets them from there.
        """
        began = self._journal.now()
        key, checksum = await self._trainers[policy].publish(version)
        await self._pool.load_weights(policy, version, key, checksum)
        self._versions.acknowledged(policy, version)
        self._journal.event(
            "published", process="controller", began=began, policy=policy, version=version, checksum=checksum
        )
        stale = self._keys.pop(policy, None)
        self._keys[policy] = key
        if stale is not None and stale != key:
            await self._objects.release(stale)
