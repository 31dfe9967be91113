"""Runs one random run with faults to its end, and resumes it after every death, with the production loops.

consumes     a schedule and its plan of faults
waits for    nothing outside virtual time
produces     the story of all lives
unblocked by virtual time; a life that takes LIMIT_S or CPU_S, or in which no task can run any more, has hung

Between two lives it can damage the newest checkpoint, as a crash or a bad disk would.
"""

import asyncio
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast

from flexmarl.agents import Team
from flexmarl.agents.characters import character_renderer
from flexmarl.analysis.costs import TrainerCosts
from flexmarl.assemble.ending import recorded_failure
from flexmarl.assemble.world import Residents
from flexmarl.cluster.inproc import NO_LIMIT, InprocCluster, InprocResident, inproc_cluster
from flexmarl.cluster.interface import Cluster, ResidentKind, ResidentSpec
from flexmarl.errors import CheckpointError, FlexmarlError
from flexmarl.events.event import Events
from flexmarl.events.run_events import WorkerLost
from flexmarl.experience.interface import ExperienceStore
from flexmarl.inference.pool import InferencePool
from flexmarl.orchestrator.checkpoint import MANIFEST
from flexmarl.records import EpisodeId, GenerationRequest, InstanceId, PolicyName, Task, WorkerId, split_trajectory_id
from flexmarl.rollout.worker import PlayParts, RolloutHost, RolloutWorker
from flexmarl.simulator.modelled_engine import ModelledEngine
from flexmarl.simulator.modelled_trainer import ModelledProcessGroup, ModelledTrainer
from flexmarl.simulator.virtual_time import DeadlockError
from flexmarl.testing.faults.fault_plan import Fault, FaultKind
from flexmarl.testing.faults.faulty import (
    FaultyEngine,
    FaultySource,
    FaultyStore,
    FaultyTrainer,
    MortalStore,
    SlowStore,
)
from flexmarl.testing.faults.injection import Injection
from flexmarl.testing.faults.mutations import SOUND, Mutation
from flexmarl.testing.faults.odd_programs import OddProgram, make_sessions
from flexmarl.testing.faults.schedule import ENGINE_COSTS, HOME, OTHERS, Schedule
from flexmarl.testing.faults.story import Life, Story
from flexmarl.testing.faults.watched import Killed, MortalEvents, Pulse, WatchedEngine, WatchedTrainer
from flexmarl.testing.inference import scripted_logprobs, scripted_responder
from flexmarl.testing.scripted_run import ScriptedResidents, ScriptedRun, spoken
from flexmarl.training.interface import Trainer
from flexmarl.training.residency import ProcessGroup


def tear(injection: Injection, folder: Path) -> Fault | None:
    """Damages the newest checkpoint in `folder`. Returns the fault; None without a planned fault or a checkpoint."""
    newest = max(folder.glob("step-*"), default=None)
    fault = injection.tears() if newest else None
    if newest is None or fault is None:
        return None
    victim = min(newest.rglob("trainer.json"))
    if fault.how == "truncated":
        victim.write_bytes(victim.read_bytes()[:-3])
    elif fault.how == "flipped":
        victim.write_bytes(victim.read_bytes().replace(b'"weight"', b'"eeight"'))
    elif fault.how == "unsealed":
        (newest / MANIFEST).unlink()
    else:
        newest.rename(newest.with_name(f".partial-{newest.name}"))
    return fault


LIMIT_S = 3000.0
"""Virtual seconds that one life may take. A step takes about 10, and about 100 if every call times out."""
CPU_S = 30.0
"""Seconds of processor time that one life may take: in a loop that never waits, no virtual time passes.

Wall-clock time would be wrong: on a busy machine it passes while the run does not compute.
"""
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Parent of the checkpoint folders: a file system in memory, if there is one, because it flushes at once."""


class Stuck(BaseException):
    """Raised in a life that computes without end and never waits."""


@contextmanager
def at_most(cpu_s: float) -> Iterator[None]:
    """Raises Stuck in the block after `cpu_s` seconds of processor time. For the main thread only."""

    def stop(*_: object) -> None:
        raise Stuck(f"it computed for more than {cpu_s:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def trainer_costs(schedule: Schedule) -> TrainerCosts:
    """Returns the costs of the run's trainers."""
    return TrainerCosts(sample_s=schedule.sample_s, update_s=0.05, publish_s=0.02, resume_s=0.3, suspend_s=0.2)


def live(schedule: Schedule, mutation: Mutation = SOUND) -> Story:
    """Plays the run of a schedule, life after life, until it has ended or more lives would not help."""
    injection, lives = Injection(schedule.plan), list[Life]()
    store = None
    with tempfile.TemporaryDirectory(dir=MEMORY) as name, warnings.catch_warnings():
        # Some calls of a workflow's `gather` may outlive the others, and find the pool closed.
        warnings.simplefilter("ignore", RuntimeWarning)
        folder = Path(name)
        torn: Fault | None = None
        while True:
            run = MortalRun(schedule, injection, folder, mutation, store=store, torn=torn)
            store = run.kept
            lives.append(run.live())
            if _is_over(lives) or len(lives) > len(schedule.plan.faults) + 2:
                chance = bool(schedule.raising or schedule.forgetful or schedule.long_winded or schedule.programs)
                return Story(
                    settings=run.settings,
                    chance=chance,
                    programs=schedule.programs,
                    lives=lives,
                    rows=tuple(run.rows()),
                    folder=name,
                )
            if isinstance(lives[-1].error, CheckpointError):
                shutil.rmtree(folder)  # The error asks for this; the run then starts from step 0.
                folder.mkdir()
            torn = tear(injection, folder)


def _is_over(lives: list[Life]) -> bool:
    """Returns True if the run ended, hung, died of an error that is no FlexmarlError, or died twice of one error."""
    last = lives[-1]
    if last.finished or last.hung or not isinstance(last.error, FlexmarlError | None):
        return True
    return len(lives) > 1 and last.error is not None and last.same_end_as(lives[-2])


class MortalRun(ScriptedRun):
    """One life of a run, with faulty and watched engines, trainers, store and task source."""

    def __init__(
        self,
        schedule: Schedule,
        injection: Injection,
        folder: Path,
        mutation: Mutation,
        *,
        store: Any,
        torn: Fault | None,
    ) -> None:
        """`store` is the one of earlier lives, None in the first. `torn` is the fault that damaged their checkpoint."""
        super().__init__(
            self._play_task,
            lambda prompt, request: say(request, schedule),
            agents=schedule.agents,
            folder=folder,
            store=store,
            **schedule.sections,
            seed=schedule.seed,
        )
        self._schedule, self._injection, self._mutation = schedule, injection, mutation
        self._pulse, self._hung, self._torn = Pulse(), False, torn
        self._app: Any = None
        """Serves the doors, if programs play."""
        self.read = Counter[EpisodeId]()
        """Replies that programs have read to their end, by episode; one that is read twice counts twice."""
        self.kept = self.store
        """The store without its wrappers. It outlives this life."""
        self.events = MortalEvents(self._pulse)
        self.rules = mutation.rules
        self.watched: dict[InstanceId, WatchedEngine] = {}
        """Engines by instance name."""
        self.cluster: InprocCluster
        """The cluster of this life, once it is open."""
        self.made = {policy: self._trainer(policy) for policy in self.trainers}
        self.trainers |= self.made
        self._faulty: Any = FaultyStore(self.kept, injection, self._pulse.check)
        self.store = self._distant(self._faulty, "store")
        self.blueprint = replace(
            self.blueprint,
            source=cast(Any, FaultySource(self.blueprint.source, injection)),
            settings=mutation.settings(self.blueprint.settings),
        )

    def _distant(self, store: ExperienceStore, user: str) -> Any:
        """The store as one process reaches it: its calls begin late. A mutation may break it."""
        random = Random(f"{user} {self._schedule.seed}")
        return self._mutation.store(SlowStore(store, longest_s=self._schedule.store_s, random=random))

    def live(self) -> Life:
        """Plays this life. Returns how it ended and what its parts remember."""
        error: BaseException | None = None
        try:
            with at_most(CPU_S):
                self.play(_strike)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            error = raised
        hung = self._hung or isinstance(error, DeadlockError | Stuck)
        killed = self._pulse.over and not hung
        return Life(
            events=self.events.all,
            error=None if killed else error,
            killed=killed,
            hung=hung,
            engines=self.watched,
            trainers=self.made,
            read=self.read,
        )

    async def _play_task(self, task: Task, team: Team) -> None:
        if self._app is None:
            await play(task, team, self._schedule, self._injection)
        else:
            await self._play_at_door(task, team)

    async def _play_at_door(self, task: Task, team: Team) -> None:
        """Lets a program play all seats; each reply that it got is rewarded for its own words."""
        schedule, trajectory = self._schedule, team.context.trajectory_id
        flat = poisoned_or_flat(task, self._injection)

        def read(choices: int) -> None:
            self.read[team.context.episode] += choices

        async with team.door() as door:
            random = Random(f"program {schedule.seed} {trajectory}")
            await OddProgram(self._app, door, team, random, read).play(task.prompt, acts=2 * schedule.rounds)
            await hang_as_planned(task, team, self._injection)
            for call in door.calls:
                if team.rng.random() >= schedule.forgetful:
                    call.reward(1.0 if flat else task.score(call.text[:1]))
        if team.rng.random() < schedule.raising:
            raise ValueError("the workflow raised")
        team.report(success=1.0)

    def open_doors(self) -> Any:
        """Opens the gateway of this life, if programs play."""
        if not self._schedule.programs:
            return None
        doors, self._app = make_sessions(self._schedule.seed, self.events, self._mutation.door())
        return doors

    async def strike(self) -> None:
        """Runs the faults that come by time."""
        self.events.listen(WorkerLost, self._lost)
        await self._injection.watch(
            lambda: cast(Any, self.watched),
            lambda instance, because: self.world.pool.lose(instance, because),
            self._lose_node,
            lambda: {str(one.name): one.die for one in self._live() if one.spec.kind is ResidentKind.ROLLOUT},
        )

    def _live(self) -> list[InprocResident[Any]]:
        return [one for one in self.cluster.residents if one.alive]

    def _lose_node(self, node: str, because: str) -> None:
        for one in self._live():
            if one.place.node == node and one.spec.kind is ResidentKind.ENGINE and one.made:
                one.hosted.fail(because)
        self.cluster.kill_node(node, because)

    def _lost(self, lost: WorkerLost) -> None:
        if lost.process.kind == ResidentKind.ENGINE:
            self.world.pool.lose(lost.process.instance, lost.because)

    def players(self) -> Sequence[ResidentSpec[RolloutWorker]]:
        """Specifies rollout workers that can die."""
        names = [WorkerId(ResidentKind.ROLLOUT, number=number) for number in range(self._schedule.workers)]
        return [
            ResidentSpec(
                name=name, kind=ResidentKind.ROLLOUT, contract=RolloutWorker, make=partial(self._make_player, name)
            )
            for name in names
        ]

    def _make_player(self, name: WorkerId) -> RolloutHost:
        """Makes the host of a worker. When the worker has died, its tasks still run, and may write no rows."""
        (mine,) = (one for one in self._live() if one.name == name)

        def check() -> None:
            if not mine.alive:
                raise Killed

        settings = self.settings.rollout
        parts = PlayParts(
            team=self.blueprint.team,
            open_store=lambda: self._distant(cast(Any, MortalStore(self._faulty, check)), name),
            run_seed=self.settings.seed,
            timeout_s=settings.episode_timeout_s,
            grace_s=settings.cancel_grace_s,
            bounded=settings.tool_calls_at_once is not None,
        )
        return RolloutHost(name, parts)

    async def _play(self, loops: Any) -> None:
        running = asyncio.current_task()
        assert running is not None

        def die() -> None:
            self._pulse.stop()
            running.cancel()

        self._injection.begin(self.events, die)
        with recorded_failure(self.events):
            if self._torn is not None:
                self._injection.note(self._torn)
            limit = asyncio.timeout(LIMIT_S)
            try:
                async with limit:
                    await super()._play(loops)
            finally:
                self._hung = limit.expired()

    @property
    def has_workers(self) -> bool:
        """True if rollout workers play."""
        return self._schedule.workers > 0

    def residents(self) -> Residents:
        """Returns engines that break and are replaced, and trainers that share devices."""
        return MortalResidents(self)

    def make_pool(self, *instances: Any, **how: Any) -> InferencePool:
        """Makes the pool, in which a mutation may break a rule."""
        return self._mutation.pool(*instances, **how)

    def make_engine(self, instance: InstanceId) -> WatchedEngine:
        """Makes an engine that breaks as planned."""
        schedule, renderer = self._schedule, character_renderer()
        engine = ModelledEngine(
            ENGINE_COSTS,
            scripted_responder(
                spoken(lambda prompt, request: say(request, schedule), renderer), decode=renderer.decode
            ),
            objects=self.objects,
            logprobs=scripted_logprobs,
        )
        self.watched[instance] = watched = WatchedEngine(FaultyEngine(instance, engine, self._injection))
        return watched

    def _trainer(self, policy: PolicyName) -> WatchedTrainer:
        cache = self._mutation.cache(policy)
        modelled = ModelledTrainer(policy, trainer_costs(self._schedule), self.objects, cache=cache)
        return WatchedTrainer(FaultyTrainer(modelled, self._injection), cache)


class MortalResidents(ScriptedResidents):
    """Engines that break and are replaced, trainers that share devices."""

    def __init__(self, run: MortalRun) -> None:
        super().__init__(run.objects, {}, run.trainers)
        self._run = run

    def make_engine(self, policy: PolicyName, instance: InstanceId) -> Any:
        """Makes a new engine for an instance."""
        return self._run.make_engine(instance)

    @asynccontextmanager
    async def cluster(self, residents: int, events: Events) -> AsyncIterator[Cluster]:
        """Opens a cluster in this process: of one node, or of three, each with room for all, and rollout workers."""
        room = residents + self._run.settings.pool.replacements * len(self._run.settings.policies)
        nodes = {HOME: NO_LIMIT, **dict.fromkeys(OTHERS, room)} if self._run.has_workers else None
        async with inproc_cluster(nodes, crossing={ResidentKind.ROLLOUT}, events=events) as cluster:
            self._run.cluster = cluster
            yield cluster

    def trainer(self, policy: PolicyName) -> ResidentSpec[Trainer]:
        """Specifies a trainer; of several nodes, it is on the one that no fault strikes."""
        spec = super().trainer(policy)
        return replace(spec, node=HOME) if self._run.has_workers else spec

    def replacement_s(self, policy: PolicyName) -> float | None:
        """Returns the seconds that a replacement takes to start."""
        return ENGINE_COSTS.start_s

    def process_groups(self, trainers: Mapping[PolicyName, Trainer]) -> Mapping[PolicyName, ProcessGroup]:
        """Returns a process group for each trainer. All groups share devices."""
        return {policy: ModelledProcessGroup(cast(Any, trainer)) for policy, trainer in self._run.made.items()}


async def _strike(run: ScriptedRun) -> None:
    assert isinstance(run, MortalRun)
    await run.strike()


def poisoned_or_flat(task: Task, injection: Injection) -> bool:
    """True if all replies to the task are to be rewarded alike. Raises ValueError if it is to fail, as planned."""
    flat = "position" in task.data and injection.flattens(task.data["position"])
    if injection.befalls(FaultKind.POISON_TASK, task.input_id):
        raise ValueError("the task is poisoned, as planned")
    return flat


async def hang_as_planned(task: Task, team: Team, injection: Injection) -> None:
    """Does not return if the first attempt at the task is to hang."""
    first_attempt = split_trajectory_id(team.context.trajectory_id)[2] == 0
    if first_attempt and injection.befalls(FaultKind.HUNG_WORKFLOW, task.input_id):
        await asyncio.Event().wait()


async def play(task: Task, team: Team, schedule: Schedule, injection: Injection) -> None:
    """Plays a task: every agent speaks `rounds` times and is rewarded for its own words, unless a fault strikes."""
    flat, words = poisoned_or_flat(task, injection), task.prompt
    first, *others = tuple(team)
    for _ in range(schedule.rounds):
        replies = [await first.act(words)]
        await hang_as_planned(task, team, injection)
        if schedule.parallel:
            replies += await asyncio.gather(*(seat.act(replies[0].text) for seat in others))
        else:
            for seat in others:
                replies.append(await seat.act(replies[-1].text))
        words = replies[-1].text
        for reply in replies:
            if team.rng.random() >= schedule.forgetful:
                reply.reward(1.0 if flat else task.score(reply.text[:1]))
    if team.rng.random() < schedule.raising:
        raise ValueError("the workflow raised")
    team.report(success=task.score(words[:1]))


def say(request: GenerationRequest, schedule: Schedule) -> str:
    """Returns a reply of right (`a`) or wrong (`b`) letters. The request's seed decides which, and how many."""
    words = "ab"[request.seed % 2] * (1 + request.seed % 4)
    return words + "z" * 80 if Random(f"{schedule.seed}/{request.seed}").random() < schedule.long_winded else words
