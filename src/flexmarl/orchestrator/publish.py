"""Runs the way of new weights from a policy's update to its engines, and the gate for calls that wait for them.

`Versions` is the ledger of what is served. It refuses tokens that are too old to train on (laws 3 and 10).

Loop of `Gate`, between two steps: a call of the next step waits until its own policy serves its new version.

  step k      rollout ────────────┤ solver: update, serve ──┤
                                  │ verifier: train, update, serve ───────┤
  step k + 1                      └─ rollout ─► solver's calls ─► verifier's calls

consumes    calls
waits for   the version that their policy makes in the previous step
produces    the same calls, each at the version of its own step; their episode's time limit is paused while they wait
unblocked by `open`, when all instances of the policy serve the version

Loop of `Publisher`: new weights reach every instance of their policy before they count as served (law 10).

consumes    a policy's new version
waits for   the object store, then every live instance's own checksum
produces    the version, acknowledged
unblocked by the last instance; the pool gives up an instance that fails

Loop of `Updates`, at the end of a policy's batch: its gradient sums become an update, whose weights are served.

  accumulate ──► finish ──► publication.py ──► set ──► (devices free) ──► serve
                 update          └─ not now    object store               every instance

consumes    a policy's gradient sums, and the divisors of its batch
waits for   the trainer, the object store, then the policy's instances; never for another policy
produces    a version, served, unless the rule defers it; nothing if the batch has no weighted token
unblocked by each of the three in turn
"""

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import asdict, dataclass

from flexmarl.errors import TrainingError
from flexmarl.events.event import Events
from flexmarl.events.notices import phase
from flexmarl.events.training_events import PublicationDeferred, Published, Updated, UpdateSkipped
from flexmarl.inference.pool import InferencePool
from flexmarl.objects.interface import Checksum, ObjectStore, weights_key
from flexmarl.orchestrator.publication import publication
from flexmarl.orchestrator.settings import PublicationSettings
from flexmarl.records import CONTROLLER, AnyTurn, Divisors, PolicyName, Version, WorkerId
from flexmarl.training.interface import Trainer
from flexmarl.training.session import TrainingSession


class Versions:
    """The served and the trained version of each policy. Nothing else in a run keeps them."""

    def __init__(self, served: Mapping[PolicyName, Version]) -> None:
        self._served = dict(served)
        self._trained = dict(served)

    @property
    def served(self) -> Mapping[PolicyName, Version]:
        """By policy, the version that every live instance has acknowledged."""
        return dict(self._served)

    def acknowledged(self, policy: PolicyName, version: Version) -> None:
        """Notes that all live instances of the policy serve `version`. Raises TrainingError if it is an older one."""
        if version < self._served[policy]:
            raise TrainingError(f"policy '{policy}' serves version {self._served[policy]}; {version} would go back")
        self._served[policy] = version
        self._trained[policy] = max(version, self._trained[policy])

    @property
    def trained(self) -> Mapping[PolicyName, Version]:
        """By policy, the version of its last update, which need not be served."""
        return dict(self._trained)

    def updated(self, policy: PolicyName, version: Version) -> None:
        """Notes that an update has made `version`."""
        self._trained[policy] = version

    def unpublished(self, policy: PolicyName) -> int:
        """Number of updates that are not served."""
        return self._trained[policy] - self._served[policy]

    def check(self, turns: Iterable[AnyTurn], *, max_staleness: int | None) -> None:
        """Checks that every token was sampled at most `max_staleness` versions before the trained one (law 3).

        None means no bound. Raises TrainingError, which names the turn, for an older token, and for one of a version
        that is not served yet.
        """
        for turn in turns:
            served = self._served[turn.policy]
            oldest = 0 if max_staleness is None else self._trained[turn.policy] - max_staleness
            wrong = [run for run in turn.versions if not oldest <= run.version <= served]
            if wrong:
                allowed = f"version {served}" if oldest == served else f"versions {max(0, oldest)} to {served}"
                raise TrainingError(
                    f"turn {turn.sample_id}: token {wrong[0].start} was sampled by version {wrong[0].version} of "
                    f"'{turn.policy}', but this step is trained on {allowed}"
                )


class Gate:
    """Holds back the calls of policies that are between two versions."""

    def __init__(self) -> None:
        self._shut: dict[PolicyName, asyncio.Event] = {}

    def shut(self, policies: Iterable[PolicyName]) -> None:
        """Makes calls of these policies wait from now on."""
        self._shut = {policy: asyncio.Event() for policy in policies}

    def open(self, policy: PolicyName) -> None:
        """Lets calls of the policy through: it serves the version of the next step. Ignored if it was not shut."""
        if policy in self._shut:
            self._shut.pop(policy).set()

    def holds(self, policy: PolicyName) -> Awaitable[object] | None:
        """The awaitable that a call of the policy must wait for before it is sent; None if it need not wait."""
        return self._shut[policy].wait() if policy in self._shut else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeights:
    """Weights in the object store that no instance serves yet."""

    policy: PolicyName
    version: Version
    checksum: Checksum
    began: float
    """Time at which publishing began, by the journal's clock."""
    because: str = ""
    """The reason of the rule `pipeline.publish`; empty where each update is published."""


@dataclass(frozen=True, slots=True)
class Queues:
    """The calls that wait for each policy's instances."""

    pool: InferencePool
    slots: Mapping[PolicyName, int]
    """By policy, the number of requests that an instance serves at the same time."""

    def depth(self, policy: PolicyName) -> float:
        """Calls that no slot serves, in the pool or in an engine, per live instance of the policy."""
        given = self.pool.given[policy]
        beyond = sum(max(0, count - self.slots[policy]) for count in given.values())
        return (self.pool.waiting[policy] + beyond) / max(1, len(given))


class Publisher:
    """Publishes policies, also several at once. Keeps only the newest weights of each in the object store."""

    def __init__(
        self,
        *,
        trainers: Mapping[PolicyName, Trainer],
        pool: InferencePool,
        objects: ObjectStore,
        versions: Versions,
        events: Events,
    ) -> None:
        self._trainers, self._pool, self._objects = trainers, pool, objects
        self._versions, self._events = versions, events
        self._held: dict[PolicyName, Version] = {}
        """By policy, the served version, whose weights the object store holds."""

    async def publish(self, policy: PolicyName, version: Version) -> None:
        """Puts the weights into the object store, and returns when all live instances serve them."""
        await self.serve(await self.set(policy, version))

    async def set(self, policy: PolicyName, version: Version, *, because: str = "") -> NewWeights:
        """Puts the weights into the object store. After this, the policy's training devices are not needed."""
        began = self._events.now()
        checksum = await self._trainers[policy].publish(version)
        return NewWeights(policy=policy, version=version, checksum=checksum, began=began, because=because)

    async def serve(self, new: NewWeights) -> None:
        """Returns when all live instances serve the weights.

        The newest weights stay in the object store, from which an instance that replaces a lost one gets them.
        """
        policy, version = new.policy, new.version
        await self._pool.load_weights(policy, version, new.checksum)
        self._versions.acknowledged(policy, version)
        self._events.emit(
            Published(
                process=CONTROLLER,
                began=new.began,
                policy=policy,
                version=version,
                checksum=new.checksum,
                because=new.because,
            )
        )
        stale = self._held.pop(policy, None)
        self._held[policy] = version
        if stale is not None and stale != version:
            await self._objects.release(weights_key(policy, stale))


class Updates:
    """Makes and serves the update of each policy when its batch is complete."""

    def __init__(
        self,
        sessions: Mapping[PolicyName, TrainingSession],
        publisher: Publisher,
        *,
        versions: Versions,
        events: Events,
        settings: PublicationSettings,
        queues: Queues,
    ) -> None:
        self._sessions, self._publisher, self._versions, self._events = sessions, publisher, versions, events
        self._settings, self._queues = settings, queues

    async def begin(self) -> None:
        """Publishes the version that each session holds, at the start of a run. Returns when all are served."""
        async with asyncio.TaskGroup() as tasks:
            for policy, session in self._sessions.items():
                tasks.create_task(self._publisher.publish(policy, session.version), name=f"publish/{policy}")

    async def update(
        self, policy: PolicyName, divisors: Divisors, *, rests: bool = True, backlog: float = 0.0
    ) -> NewWeights | None:
        """Updates the policy, puts its weights into the object store, and frees its training devices.

        `rests`: True if the newest weights must be served after the step, whatever the rule says. `backlog`: finished
        groups that wait to be trained, in batches of a step. Returns the weights
        to serve. None if there are none: the batch has no weighted token, or their publication is deferred.
        """
        session, began = self._sessions[policy], self._events.now()
        report = await session.finish(divisors)
        if report is None:
            self._events.emit(UpdateSkipped(policy=policy, because="no weighted token in the step"))
        else:
            self._versions.updated(policy, report.version)
            self._events.emit(
                Updated(
                    process=WorkerId.trainer(policy),
                    began=began,
                    policy=policy,
                    version=report.version,
                    report=asdict(report),
                )
            )
        weights = None
        if unpublished := self._versions.unpublished(policy):
            depth = self._queues.depth(policy)
            ruling = publication(self._settings, unpublished=unpublished, calls=depth, steps=backlog, rests=rests)
            if ruling.publishes:
                if report is None:  # Versions of earlier steps; the policy may have left its devices since.
                    await session.hold()
                because = ruling.because if self.defers else ""
                with phase(self._events, "publish"):
                    weights = await self._publisher.set(policy, session.version, because=because)
            elif report:
                self._events.emit(PublicationDeferred(policy=policy, version=session.version, because=ruling.because))
        session.leave()
        return weights

    @property
    def defers(self) -> bool:
        """True if updates may be served later than they are made."""
        return bool(self._settings.unpublished)

    async def serve(self, weights: NewWeights) -> None:
        """Returns when every instance of the policy serves the weights."""
        with phase(self._events, "publish"):
            await self._publisher.serve(weights)
