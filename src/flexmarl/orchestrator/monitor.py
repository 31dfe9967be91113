"""Runs the view of a run: what loops report becomes metrics by step, and a live screen.

consumes    finished groups, updates, evaluations, as they happen
waits for   nothing; the screen's ticker waits for its interval
produces    one line of metrics per step, and what is on screen
unblocked by time
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager

from flexmarl.inference.pool import InferencePool
from flexmarl.observability.metrics import Metrics, time_shares
from flexmarl.observability.progress import Progress, ProgressView
from flexmarl.orchestrator.evaluate import Evaluation, mean_metrics, mean_rewards
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import GroupRecord, LossReport, PolicyName
from flexmarl.training.interface import UpdateReport

TICK_S = 0.25
"""Between two looks at the queues: the screen is drawn no faster."""


class Monitor:
    """The one place that names figures. It only watches: nothing waits for it."""

    def __init__(
        self, *, name: str, steps: int, metrics: Metrics, progress: Progress, pool: InferencePool, versions: Versions
    ) -> None:
        self._name = name
        self._steps = steps
        self._metrics = metrics
        self._progress = progress
        self._pool = pool
        self._versions = versions
        self._phase = "starting"
        self._step = 0
        self._groups = 0
        self._values: Mapping[str, float] = {}
        self._successes: list[float] = []
        self._started = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Keeps the screen alive until it is cancelled."""
        self._progress.start(self._name, self._steps)
        try:
            while True:
                await self._draw()
                await asyncio.sleep(TICK_S)
        finally:
            self._progress.stop()

    def time(self, phase: str) -> AbstractContextManager[None]:
        """Counts the block's time as part of a phase: rollout, train, publish, evaluate, checkpoint."""
        return self._metrics.time(phase)

    def begin(self, step: int, phase: str) -> None:
        """What goes on from now."""
        self._step, self._phase, self._groups = step, phase, 0

    def group_finished(self, group: GroupRecord) -> None:
        """Counts a group's episodes, whatever becomes of it."""
        metrics = self._metrics
        self._groups += 1
        metrics.add("rollout/groups")
        metrics.add("rollout/episodes", len(group.episodes))
        metrics.add("rollout/failed_episodes", len(group.episodes) - len(group.finished))
        for episode in group.episodes:
            tokens = sum(len(turn.response_ids) for turn in episode.turns)
            metrics.add("rollout/tokens", tokens)
            metrics.add("rollout/turns", len(episode.turns))
            metrics.mean("rollout/episode_s", episode.duration_s)
            for name, value in mean_metrics([episode]).items():
                metrics.mean(_path(name), value)
            for agent, reward in mean_rewards([episode]).items():
                metrics.mean(f"reward/{agent}", reward)

    def accumulated(self, report: LossReport) -> None:
        """Counts a micro-batch's time."""
        self._metrics.add("train/micro_batches")
        self._metrics.add("time/train_s", report.duration_s)

    def updated(self, policy: PolicyName, report: UpdateReport) -> None:
        """Notes an update's figures."""
        for name, value in (("loss", report.loss), ("grad_norm", report.grad_norm), *report.means.items()):
            self._metrics.mean(f"train/{policy}/{name}", value)
        self._metrics.gauge(f"train/{policy}/learning_rate", report.learning_rate)
        self._metrics.add(f"train/{policy}/samples", report.num_samples)
        self._metrics.add("train/tokens", report.num_tokens)

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        """Notes an evaluation; it belongs to the step whose end it follows."""
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
        """Ends a step's figures; `step` steps are done."""
        for policy, version in self._versions.served.items():
            self._metrics.gauge(f"version/{policy}", version)
        values = self._metrics.flush(step)
        if "rollout/groups" in values:  # Else it was the evaluation before the first step.
            self._values = values
        if "team/success" in values:
            self._successes.append(values["team/success"])
        self._step = step

    async def _draw(self) -> None:
        usage = await self._pool.usage()
        elapsed = asyncio.get_running_loop().time() - self._started
        values = self._values
        view = ProgressView(
            step=self._step,
            steps=self._steps,
            elapsed_s=elapsed,
            phase=f"{self._phase}, {self._groups} groups finished" if self._groups else self._phase,
            success=values.get("team/success"),
            success_curve=tuple(self._successes),
            rewards={name.removeprefix("reward/"): v for name, v in values.items() if name.startswith("reward/")},
            tokens_per_s=values.get("rollout/tokens", 0.0) / (values.get("time/step_s") or 1.0),
            running=_by_policy({name: use.running for name, use in usage.items()}),
            queued=_by_policy({name: use.queued for name, use in usage.items()}),
            versions=dict(self._versions.served.items()),
            time_shares=time_shares(values),
        )
        self._progress.update(view)


def _path(name: str) -> str:
    """Where a figure that a workflow reported is found: an agent's own, or the team's."""
    return name if name.startswith("agent/") else f"team/{name}"


def _by_policy(counts: Mapping[str, int]) -> dict[str, int]:
    """Sums over the instances of each policy, which are named `{policy}/{number}`."""
    sums: Counter[str] = Counter()
    for instance, count in counts.items():
        sums[instance.rsplit("/", 1)[0]] += count
    return dict(sums)
