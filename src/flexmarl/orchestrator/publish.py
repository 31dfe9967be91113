"""Runs publishing: new weights reach every instance of their policy before they count as served (law 10).

consumes    a policy's new version
waits for   the object store, then every live instance's own checksum
produces    the version, acknowledged
unblocked by the last instance; one that fails is deregistered by the pool
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import Checksum, ObjectKey, ObjectStore
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import PolicyName, Version
from flexmarl.training.interface import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeights:
    """Weights in the object store that no instance serves yet."""

    policy: PolicyName
    version: Version
    key: ObjectKey
    checksum: Checksum
    began: float
    """When publishing began, by the journal's clock."""


class Publisher:
    """Publishes policies, several at once if asked; keeps only the newest weights of each in the object store."""

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
        """Sets the weights once, and returns when all live instances serve them."""
        await self.serve(await self.set(policy, version))

    async def set(self, policy: PolicyName, version: Version) -> NewWeights:
        """Puts the weights into the object store: the last that the policy's training devices are needed for."""
        began = self._journal.now()
        key, checksum = await self._trainers[policy].publish(version)
        return NewWeights(policy=policy, version=version, key=key, checksum=checksum, began=began)

    async def serve(self, new: NewWeights) -> None:
        """Returns when all live instances serve the weights.

        The newest weights stay in the object store: an instance that replaces a lost one gets them from there.
        """
        policy, version = new.policy, new.version
        await self._pool.load_weights(policy, version, new.key, new.checksum)
        self._versions.acknowledged(policy, version)
        self._journal.event(
            "published", process="controller", began=new.began, policy=policy, version=version, checksum=new.checksum
        )
        stale = self._keys.pop(policy, None)
        self._keys[policy] = new.key
        if stale is not None and stale != new.key:
            await self._objects.release(stale)
