"""Runs the monitor of a run: turns reports of loops into metrics by step, events of the timeline, and a live screen.

consumes    finished groups, micro-batches, updates, evaluations, as they happen
waits for   no report; the screen's ticker and the probe of the event loop wait for their intervals
produces    one line of metrics per step; the slices of rollout and the queues on the timeline; the live screen
unblocked by time
"""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from flexmarl.credit.filters import Effect
from flexmarl.credit.interface import AgentReport
from flexmarl.credit.shaping.shape import RewardParts
from flexmarl.errors import cause_of
from flexmarl.events.event import Events
from flexmarl.events.group_events import Refilled, RolloutEnded
from flexmarl.events.lag import measure_lag
from flexmarl.events.metrics import Metrics, time_shares
from flexmarl.events.overlap import Interval, overlap, seconds, union
from flexmarl.events.progress import Progress, ProgressView
from flexmarl.events.serving_events import QueueCounts
from flexmarl.events.training_events import DivergenceCharged, MicroBatchDone, Updated
from flexmarl.experience.staleness import PublishLag, length_bias, staleness_of
from flexmarl.inference.pool import InferencePool
from flexmarl.orchestrator.evaluation import Evaluation, mean_metrics, mean_rewards
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import (
    CONTROLLER,
    AgentName,
    AnyTurn,
    EngineUse,
    Episode,
    GroupRecord,
    InstanceId,
    PolicyName,
    Version,
)

COMPARED = 50_000
"""Number of newest episodes whose lengths are compared. They show a bias of 1 %, and are sorted in milliseconds."""
TICK_S = 0.25
"""Seconds between two looks at the queues. Each look also draws the screen."""


class Monitor:
    """Turns what happens in a run into figures, and names them. It only watches: no loop waits for it.

    It listens to events for updates, micro-batches, divergence and refills. The orchestrator calls it for finished
    groups and for phases.
    """

    def __init__(
        self,
        *,
        name: str,
        steps: int,
        metrics: Metrics,
        progress: Progress,
        pool: InferencePool,
        versions: Versions,
        events: Events,
        processes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`processes` returns the number of live processes; 0 if they are not counted."""
        self._name = name
        self._steps = steps
        self._metrics = metrics
        self._progress = progress
        self._pool = pool
        self._versions = versions
        self._events = events
        self._processes = processes
        events.listen(MicroBatchDone, self._accumulated)
        events.listen(Updated, self._updated)
        events.listen(DivergenceCharged, self._diverged)
        events.listen(Refilled, self._refilled)
        self._phase = "starting"
        self._step = 0
        self._done: int | None = None
        """Number of steps whose figures are complete."""
        self._groups = 0
        self._values: Mapping[str, float] = {}
        self._successes: list[float] = []
        self._training: defaultdict[str, list[Interval]] = defaultdict(list)
        self._rollout: list[Interval] = []
        self._playing_since: float | None = None
        self._lag = PublishLag()
        self._stalest: Counter[PolicyName] = Counter()
        self._finished_lengths: deque[int] = deque(maxlen=COMPARED)
        self._trained_lengths: deque[int] = deque(maxlen=COMPARED)
        self._usage: Mapping[InstanceId, EngineUse] = {}
        self._queues: Mapping[str, Any] = {}
        self._step_lag_ms = 0.0
        self._look_lag_ms = 0.0
        self._started = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Draws the screen and watches the queues and the event loop, until it is cancelled."""
        self._progress.start(self._name, self._steps)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(measure_lag(self._lagged), name="lag")
                tasks.create_task(self._look(), name="screen")
        except ExceptionGroup as group:
            raise cause_of(group) from group
        finally:
            self._progress.stop()

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Counts the block's time as part of a phase: publish, evaluate, checkpoint."""
        return self._metrics.time(phase)

    @contextmanager
    def rollout(self, step: int | None = None) -> Iterator[None]:
        """Counts the block's time as rollout of `step`; without `step`, of the present step.

        Training during the block counts as hidden.
        """
        began = self._playing_since = self._events.now()
        try:
            with self._metrics.time("rollout"):
                yield
        finally:
            self._rollout.append((self._playing_since, self._events.now()))
            self._playing_since = None
            self._events.emit(RolloutEnded(process=CONTROLLER, began=began, step=self._step if step is None else step))

    def begin(self, step: int, phase: str) -> None:
        """Sets the step and the phase that begin now.

        In the first call, `step` is also the number of steps that earlier commands did. Later calls do not change the
        number of steps done on the screen: `flush` does, together with the figures of the step.
        """
        if self._done is None:
            self._done = step
        self._step, self._phase, self._groups = step, phase, 0

    def group_finished(self, group: GroupRecord) -> None:
        """Counts the episodes of a finished group, even if it is not trained on later."""
        metrics = self._metrics
        self._groups += 1
        metrics.add("rollout/groups")
        metrics.add("rollout/episodes", len(group.episodes))
        metrics.add("rollout/failed_episodes", len(group.episodes) - len(group.finished))
        for episode in group.episodes:
            tokens = _num_tokens(episode)
            self._finished_lengths.append(tokens)
            metrics.add("rollout/tokens", tokens)
            metrics.add("rollout/turns", len(episode.turns))
            metrics.mean("rollout/episode_s", episode.duration_s)
            for name, value in mean_metrics([episode]).items():
                metrics.mean(_path(name), value)
            for agent, reward in mean_rewards([episode]).items():
                metrics.mean(f"reward/{agent}", reward)

    def judged(
        self, effects: Mapping[AgentName, Mapping[Effect, int]], rewards: Mapping[AgentName, RewardParts]
    ) -> None:
        """Counts the filter's findings on each agent's credit groups, and averages the parts of its rewards.

        Groups that the filter drops count too.
        """
        for agent, counts in effects.items():
            for effect, count in counts.items():
                self._metrics.add(f"filter/{agent}/{effect}", count)
        for agent, parts in rewards.items():
            for part, mean in parts.means.items():
                self._metrics.mean(f"reward_part/{agent}/{part}", mean, weight=parts.turns)

    def credited(self, report: Mapping[AgentName, AgentReport]) -> None:
        """Counts each agent's credit groups by kind, their sizes, and the agent's rows without weight."""
        for agent, seen in report.items():
            for name, count in seen.counts.items():
                self._metrics.add(f"credit/{agent}/{name}", count)
            for size in seen.group_sizes:
                self._metrics.mean(f"credit/{agent}/group_size", size)

    def _diverged(self, batch: DivergenceCharged) -> None:
        """Records the divergence of a policy's rows from the reference policy, and its coefficient."""
        self._metrics.mean(f"train/{batch.policy}/kl_to_reference", batch.kl)
        self._metrics.mean(f"train/{batch.policy}/kl_coef", batch.coef)

    def _refilled(self, step: Refilled) -> None:
        """Counts the groups that were played to fill a step, and those that were dropped."""
        self._metrics.add("refill/generated", step.generated)
        self._metrics.add("refill/dropped", step.generated - step.kept)

    def _accumulated(self, done: MicroBatchDone) -> None:
        """Records the busy interval of a micro-batch."""
        self._training[done.process].append((done.began, done.ended))
        self._metrics.add("train/micro_batches")

    def _updated(self, update: Updated) -> None:
        """Records the busy interval of an update, and its figures."""
        policy, report = update.policy, update.report
        self._training[update.process].append((update.began, update.ended))
        self._lag.made(policy, update.version, update.ended)
        for name, value in (("loss", report["loss"]), ("grad_norm", report["grad_norm"]), *report["means"].items()):
            self._metrics.mean(f"train/{policy}/{name}", value)
        self._metrics.gauge(f"train/{policy}/learning_rate", report["learning_rate"])
        self._metrics.add(f"train/{policy}/samples", report["num_samples"])
        self._metrics.add("train/tokens", report["num_tokens"])

    def published(self, policy: PolicyName, version: Version) -> None:
        """Records the publish lag: every instance of the policy now serves a version, whose `Updated` came before."""
        self._metrics.mean(f"publish_lag_s/{policy}", self._lag.served(policy, version, self._events.now()))

    def taken(self, group: GroupRecord) -> None:
        """Records the lengths of a group's finished episodes, which training takes."""
        self._trained_lengths.extend(_num_tokens(episode) for episode in group.finished)

    def trained_on(self, policy: PolicyName, turns: Sequence[AnyTurn]) -> None:
        """Records the staleness of the turns that go into the policy's next update."""
        staleness = staleness_of(turns, self._versions.served[policy])
        if staleness:
            tokens = sum(turn.num_tokens for turn in turns)
            self._metrics.mean(f"staleness/{policy}/mean", staleness.mean, weight=tokens)
            self._stalest[policy] = max(self._stalest[policy], staleness.max)

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        """Records an evaluation. Its figures belong to the step that ended before it."""
        for name, value in evaluation.metrics.items():
            self._metrics.mean(f"eval/{_path(name)}", value)
        for agent, reward in evaluation.rewards.items():
            self._metrics.mean(f"eval/reward/{agent}", reward)
        success = evaluation.metrics.get("success")
        shown = "" if success is None else f": success {success:.3f}"
        self._progress.note(
            f"evaluation {when} training, {evaluation.episodes} held-out episodes, {evaluation.failed} failed{shown}"
        )

    def flush(self, step: int) -> None:
        """Writes the figures of the step that ended; `step` steps are done now. The screen then shows both together."""
        for policy, version in self._versions.served.items():
            self._metrics.gauge(f"version/{policy}", version)
        self._flush_overlap()
        self._flush_staleness()
        self._step_lag_ms = 0.0
        values = self._metrics.flush(step)
        if "rollout/groups" in values:  # False for the evaluation before the first step.
            self._values = values
        if "team/success" in values:
            self._successes.append(values["team/success"])
        self._step = self._done = step
        self._draw()

    def _flush_overlap(self) -> None:
        if self._playing_since is not None:  # Rollout continues: the rest of it belongs to the next step.
            now = self._events.now()
            self._rollout.append((self._playing_since, now))
            self._playing_since = now
        beside = overlap(self._training, self._rollout)
        if beside.hidden is not None:
            busy = union(interval for intervals in self._training.values() for interval in intervals)
            self._metrics.add("time/train_s", seconds(busy))
            self._metrics.add("overlap/training_s", beside.training_s)
            self._metrics.mean("overlap/training_hidden", beside.hidden)
        self._training.clear()
        self._rollout.clear()

    def _flush_staleness(self) -> None:
        for policy, versions in self._stalest.items():
            self._metrics.gauge(f"staleness/{policy}/max", versions)
        bias = length_bias([*self._trained_lengths], [*self._finished_lengths]) if self._stalest else None
        if bias:
            self._metrics.gauge("length_bias/ratio", bias.ratio)
            self._metrics.gauge("length_bias/ks", bias.ks)
        self._stalest.clear()

    def _lagged(self, delay_s: float) -> None:
        delay_ms = delay_s * 1000
        self._step_lag_ms = max(self._step_lag_ms, delay_ms)
        self._look_lag_ms = max(self._look_lag_ms, delay_ms)
        self._metrics.mean("lag/event_loop_ms", delay_ms)
        self._metrics.gauge("lag/event_loop_max_ms", self._step_lag_ms)

    async def _look(self) -> None:
        while True:
            self._usage = await self._pool.usage()
            self._note_queues()
            self._draw()
            await asyncio.sleep(TICK_S)

    def _note_queues(self) -> None:
        """Emits the queues for the timeline, if anything changed."""
        queues = {"running": self._running, "queued": self._queued, "lag_ms": round(self._look_lag_ms)}
        if queues != self._queues:
            self._queues = queues
            self._events.emit(QueueCounts(**queues))
        self._look_lag_ms = 0.0

    @property
    def _running(self) -> dict[str, int]:
        at_instances = _by_policy({name: use.running for name, use in self._usage.items()})
        return {policy: at_instances.get(policy, 0) for policy in self._pool.waiting}

    @property
    def _queued(self) -> dict[str, int]:
        """By policy, the calls that wait in the pool plus those that wait at their instance."""
        at_instances = _by_policy({name: use.queued for name, use in self._usage.items()})
        return {policy: waiting + at_instances.get(policy, 0) for policy, waiting in self._pool.waiting.items()}

    def _draw(self) -> None:
        elapsed = asyncio.get_running_loop().time() - self._started
        values = self._values
        view = ProgressView(
            step=self._done or 0,
            steps=self._steps,
            elapsed_s=elapsed,
            phase=f"{self._phase}, {self._groups} groups finished" if self._groups else self._phase,
            success=values.get("team/success"),
            success_curve=tuple(self._successes),
            rewards={name.removeprefix("reward/"): v for name, v in values.items() if name.startswith("reward/")},
            tokens_per_s=values.get("rollout/tokens", 0.0) / (values.get("time/step_s") or 1.0),
            running=self._running,
            queued=self._queued,
            versions=dict(self._versions.served.items()),
            time_shares=time_shares(values),
            training_hidden=values.get("overlap/training_hidden"),
            processes=self._processes(),
        )
        self._progress.update(view)


def _num_tokens(episode: Episode) -> int:
    return sum(turn.num_tokens for turn in episode.turns)


def _path(name: str) -> str:
    """Metric name of a figure that a workflow reported: `agent/...` is kept, other names are put under `team/`."""
    return name if name.startswith("agent/") else f"team/{name}"


def _by_policy(counts: Mapping[InstanceId, int]) -> dict[str, int]:
    """Sums the counts over the instances of each policy."""
    sums: Counter[str] = Counter()
    for instance, count in counts.items():
        sums[instance.policy] += count
    return dict(sums)
