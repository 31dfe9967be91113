"""Makes the orchestrator of one run from its settings and the parts of a world. Every world is wired in the same way.

         ┌► feed ─► rollout ─► collector ─► sessions ─► updates      all parts share one `Admission`, one `Versions`
wire ────┤                                                           and one hub of events
         └► evaluator, saver, balancer; figures and monitor listen
"""

import os
import platform
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial

from flexmarl.analysis.costs import costs_of
from flexmarl.assemble.blueprint import Blueprint
from flexmarl.assemble.engine_room import growth_note
from flexmarl.assemble.world import World, initial_versions, make_evaluator, player_of
from flexmarl.config import RunSettings
from flexmarl.config.engine_fits import check_engines
from flexmarl.events.event import Events
from flexmarl.events.metrics import Metrics
from flexmarl.events.progress import Progress
from flexmarl.events.run_events import ProcessStarted, RunStarted
from flexmarl.experience.window import Window
from flexmarl.inference.scaling import RULES
from flexmarl.inference.settings import EmbeddedSettings
from flexmarl.orchestrator.alarms import AlarmRules, Alarms
from flexmarl.orchestrator.asynchronous import Asynchronous, Stream
from flexmarl.orchestrator.balance import Balancer
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.collect import Collector, Release, StepCollector, Streaming
from flexmarl.orchestrator.crediting import Appraisal, Crediting
from flexmarl.orchestrator.evaluation import Keep
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.measured_lag import MeasuredLag
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.per_policy import PerPolicy
from flexmarl.orchestrator.publish import Gate, Publisher, Queues, Updates, Versions
from flexmarl.orchestrator.references import References
from flexmarl.orchestrator.run import Orchestrator, Pipeline, RunProgress, StopRequest
from flexmarl.orchestrator.saving import Checkpoints, Saver
from flexmarl.orchestrator.settings import Mode, law_of
from flexmarl.orchestrator.step_figures import Figures
from flexmarl.orchestrator.synchronous import Colocation, Synchronous
from flexmarl.records import CONTROLLER, PolicyName
from flexmarl.rollout.admission import Admission, AdmissionLaw
from flexmarl.rollout.rollout import Rollout
from flexmarl.training.session import TrainingSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Classes from which a run is wired. The defaults are those of production; tests of the laws use a broken one."""

    admission: type[Admission] = Admission
    window: type[Window] = Window
    gate: type[Gate] = Gate
    rollout: type[Rollout] = Rollout


PRODUCTION = Rules()
"""The rules of every real run."""


def wire(
    blueprint: Blueprint,
    world: World,
    *,
    events: Events,
    metrics: Metrics,
    progress: Progress,
    checkpoints: Checkpoints,
    start: RunState | None = None,
    request: StopRequest | None = None,
    rules: Rules = PRODUCTION,
    keep: Keep | None = None,
) -> tuple[Orchestrator, Monitor]:
    """Makes the orchestrator and the monitor of one run on a world. Call it inside the event loop.

    `start` is the state that a resumed run continues from. `request` stops the run. `rules` replaces rules of
    production in tests. `keep` keeps what evaluations play.

    Raises ConfigError if the engines cannot do what the settings need.
    """
    check_engines(blueprint.settings, world.pool.capabilities)
    if note := growth_note(blueprint.settings, world.pool):
        progress.note(note)
    parts = _Wiring(blueprint, world, events, start, rules, keep)
    separate = has_separate_devices(blueprint.settings, os.cpu_count() or 1)
    Figures(metrics=metrics, versions=parts.versions, events=events, separate=separate)
    Alarms(AlarmRules(blueprint.settings.alarms, [PolicyName(name) for name in blueprint.settings.trained]), events)
    monitor = Monitor(
        name=blueprint.settings.name,
        steps=blueprint.settings.steps,
        metrics=metrics,
        progress=progress,
        pool=world.pool,
        versions=parts.versions,
        events=events,
        processes=lambda: len(world.processes.places) + 1 if world.processes.places else 0,
        trains_others=not blueprint.settings.mode.synchronous,
    )
    return parts.orchestrator(checkpoints, warn=progress.note, request=request), monitor


class _Wiring:
    """The parts of one run. Each is made once, when the first part that works with it is made."""

    def __init__(
        self,
        blueprint: Blueprint,
        world: World,
        events: Events,
        start: RunState | None,
        rules: Rules,
        keep: Keep | None,
    ) -> None:
        self._blueprint, self._settings, self._world = blueprint, blueprint.settings, world
        self._events, self._start, self._rules, self._keep = events, start, rules, keep

    def orchestrator(
        self, checkpoints: Checkpoints, *, warn: Callable[[str], None], request: StopRequest | None
    ) -> Orchestrator:
        """Makes the orchestrator. `warn` prints a warning on the screen; the journal has the facts already."""
        settings, store, colocated = self._settings, self._world.store, self._world.colocated
        budget_bytes = settings.store.budget_bytes
        # One change of places for all policies. Trainers without places save where they are.
        visiting = colocated.training if colocated is not None and settings.shared_places else nullcontext
        return Orchestrator(
            progress=RunProgress(
                admission=self.admission,
                versions=self.versions,
                crediting=self.crediting,
                references=self.references,
                events=self._events,
                start=self._start,
            ),
            pipeline=self.pipeline,
            updates=self.updates,
            evaluator=make_evaluator(self._blueprint, self._world, self.versions, self._keep),
            saver=Saver(
                checkpoints,
                self._world.trainers,
                settings.checkpoint,
                events=self._events,
                warn=warn,
                prune=None if budget_bytes is None else partial(store.prune, budget_bytes=budget_bytes),
                visiting=visiting,
            ),
            balancer=make_balancer(settings, self._world, self._events),
            events=self._events,
            steps=settings.steps,
            evaluate=settings.evaluate,
            best=settings.checkpoint.best,
            stop=settings.stop,
            request=request,
        )

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the run's mode."""
        if self._settings.mode.synchronous:
            return self._synchronous
        if self._settings.pipeline.updates == "per_policy":
            return self._per_policy
        return self._asynchronous

    @property
    def _synchronous(self) -> Synchronous:
        colocation, streaming = None, None
        if self._world.colocated is not None:
            colocation = Colocation(residency=self._world.colocated, updates=self.updates)
        if self._settings.credit.streaming == "linear":
            streaming = Streaming(self.crediting, self.sessions)
        return Synchronous(
            feed=self.feed,
            rollout=self.rollout,
            collector=StepCollector(
                crediting=self.crediting,
                admission=self.admission,
                versions=self.versions,
                events=self._events,
                release=release_of(self._settings),
                streaming=streaming,
            ),
            sessions=self.sessions,
            updates=self.updates,
            events=self._events,
            colocation=colocation,
            gate=self.gate,
        )

    @property
    def _asynchronous(self) -> Asynchronous:
        return Asynchronous(
            stream=self.stream,
            feed=self.feed,
            collector=Collector(
                crediting=self.crediting, admission=self.admission, versions=self.versions, events=self._events
            ),
            sessions=self.sessions,
            updates=self.updates,
            events=self._events,
        )

    @property
    def _per_policy(self) -> PerPolicy:
        return PerPolicy(
            stream=self.stream,
            feed=self.feed,
            crediting=self.crediting,
            admission=self.admission,
            sessions=self.sessions,
            updates=self.updates,
            events=self._events,
            timeout_s=self._settings.pipeline.policy_timeout_s,
        )

    @cached_property
    def stream(self) -> Stream:
        """The groups of the asynchronous modes, from admission until a step takes them."""
        return Stream(
            feed=self.feed,
            rollout=self.rollout,
            crediting=self.crediting,
            admission=self.admission,
            store=self._world.store,
            settings=self._settings.pipeline,
            retries=self._settings.rollout.group_retries,
            events=self._events,
            window=self._rules.window,
            lag=self._measured_lag,
        )

    @cached_property
    def versions(self) -> Versions:
        """The ledger of served versions."""
        return Versions(initial_versions(self._settings, self._start))

    @cached_property
    def admission(self) -> Admission:
        """The ledger of groups, with those that were active at the checkpoint."""
        lag = min(self._start.admission.lag, self._settings.pipeline.max_lag) if self._start else 1
        law, admission = self._law(lag), self._rules.admission
        return admission.resumed(law, self._start.admission) if self._start else admission(law)

    def _law(self, lag: int) -> AdmissionLaw:
        """The admission law; with the given lag if the run measures it."""
        return law_of(self._settings.mode, self._settings.pipeline, groups=self._settings.batch.groups, now=lag)

    @property
    def _measured_lag(self) -> MeasuredLag | None:
        """The part that decides the lag; None if the settings, or the mode, say it."""
        pipeline, mode = self._settings.pipeline, self._settings.mode
        if pipeline.lag != "auto" or mode.synchronous or mode is Mode.ONE_STEP_OFF:
            return None
        laws = {lag: self._law(lag) for lag in range(1, pipeline.max_lag + 1)}
        return MeasuredLag(laws, lag=self.admission.law.lag)

    @cached_property
    def gate(self) -> Gate | None:
        """The gate at which calls of the next step wait; None if rollout is never ahead, or never waits."""
        return self._rules.gate() if self._settings.pipeline.ahead and self._settings.mode.synchronous else None

    @cached_property
    def feed(self) -> Feed:
        """The feed of training tasks."""
        return Feed(
            source=self._blueprint.source,
            admission=self.admission,
            groups=self._settings.batch.groups,
            events=self._events,
        )

    @cached_property
    def rollout(self) -> Rollout:
        """The part that plays training tasks. Its calls wait at the gate, if there is one."""
        settings, agents = self._settings, self._blueprint.team.agents.values()
        player = partial(player_of(self._blueprint, self._world), store=self._world.store)
        return self._rules.rollout(
            player=player(holds=self.gate.holds) if self.gate else player(),
            admission=self.admission,
            settings=settings.rollout,
            episodes=settings.batch.episodes,
            events=self._events,
            policies=[agent.policy for agent in agents],
            greedy="greedy" in settings.credit.uses,
        )

    @cached_property
    def crediting(self) -> Crediting:
        """The part that computes the credit of finished groups. It asks the trainers whose settings need it."""
        trainers = self._world.trainers
        training = {policy: self._settings.policies[policy].training for policy in trainers}
        return Crediting(
            store=self._world.store,
            credit=self._settings.credit,
            trained=[PolicyName(name) for name in self._settings.trained],
            admission=self.admission,
            events=self._events,
            appraisal=Appraisal(trainers=trainers, training=training, events=self._events),
            phases={policy: of.phases for policy, of in training.items() if of.phases},
        )

    @cached_property
    def references(self) -> References:
        """The part that resets the references of policies whose settings ask for it."""
        trainers = self._world.trainers
        kls = {policy: self._settings.policies[policy].training.kl for policy in trainers}
        return References(
            trainers,
            {policy: kl.reset for policy, kl in kls.items() if kl is not None and kl.reset is not None},
            events=self._events,
            steps=self._start.resets if self._start else {},
        )

    @cached_property
    def sessions(self) -> Mapping[PolicyName, TrainingSession]:
        """A training session for each trained policy, at the version that the policy serves."""
        return {
            policy: TrainingSession(
                policy,
                self._world.store,
                trainer,
                micro_batch=self._settings.policies[policy].training.micro_batch,
                version=self.versions.served[policy],
                # Of policies that are trained together one would else never wait while another's next comes.
                ahead=self._world.cluster.crosses or policy in self._world.together,
                events=self._events,
                residency=self._world.residency,
                together=self._world.together.get(policy),
            )
            for policy, trainer in self._world.trainers.items()
        }

    @cached_property
    def updates(self) -> Updates:
        """The part that makes and serves updates."""
        publisher = Publisher(
            trainers=self._world.trainers,
            pool=self._world.pool,
            objects=self._world.objects,
            versions=self.versions,
            events=self._events,
        )
        slots = {policy: slots_of(self._settings, policy) for policy in self._world.trainers}
        return Updates(
            self.sessions,
            publisher,
            versions=self.versions,
            events=self._events,
            settings=self._settings.pipeline.publish,
            queues=Queues(self._world.pool, slots),
        )


def make_balancer(settings: RunSettings, world: World, events: Events) -> Balancer | None:
    """Makes the part that moves instances between policies. Returns None if the settings never move any."""
    balance = settings.balance
    if balance.rule == "none" and balance.start != "by_share":
        return None
    slots = {policy: slots_of(settings, policy) for policy in map(PolicyName, settings.policies)}
    return Balancer(world.pool, RULES[balance.rule](balance), balance, events, slots=slots)


def slots_of(settings: RunSettings, policy: PolicyName) -> int:
    """Returns the number of requests that an instance of the policy serves at a time."""
    if settings.is_modelled(policy):
        slots = costs_of(settings.simulation.costs, policy).engine.slots
    else:
        slots = getattr(settings.policies[policy].engine, "slots", EmbeddedSettings().slots)
    return min(slots, settings.pool.max_running or slots)


def has_separate_devices(settings: RunSettings, cores: int) -> bool:
    """True if trainers compute on other devices than engines, so that training can be hidden behind rollout."""
    if settings.mode is Mode.COLOCATED or settings.cluster.backend == "inline":
        return False
    return settings.cluster.backend == "simulated" or settings.cluster.device != "cpu" or cores > 1


def release_of(settings: RunSettings) -> Release:
    """Returns the moment when finished groups become ready. Mode, `deterministic` and `credit.ready` decide it."""
    if settings.mode in (Mode.SYNC, Mode.COLOCATED):
        return Release.AT_END
    if settings.deterministic:
        return Release.IN_ORDER
    return Release.BY_EPISODE if settings.credit.ready == "trajectory" else Release.AT_ONCE


def emit_start(blueprint: Blueprint, world: World, events: Events) -> None:
    """Emits what the run is, and a `ProcessStarted` for the controller and for each worker process."""
    settings, team = blueprint.settings, blueprint.team
    events.emit(
        RunStarted(
            because=team.level.because,
            level=team.level.name,
            seed=settings.seed,
            mode=settings.mode,
            release=release_of(settings),
            chat={agent.policy: agent.renderer.extension.summary for agent in team.agents.values()},
        )
    )

    places = world.processes.places
    node = next((place.node for place in places.values()), platform.node())  # All workers are on this machine.
    events.emit(ProcessStarted(process=CONTROLLER, pid=os.getpid(), node=node))
    for name, place in places.items():
        events.emit(ProcessStarted(process=name, pid=place.pid, node=place.node))
