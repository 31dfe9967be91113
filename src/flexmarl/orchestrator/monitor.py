"""Runs the monitor: a live screen, the queues of the engines, and a probe of the event loop.

consumes    steps, evaluations, groups and figures, as they are reported
waits for   no report; the look at the queues and the probe wait for their intervals
produces    the live screen; the queues on the timeline; how late the event loop wakes a sleeping task; the lines of
            user code that keep it from all other work: a `time.sleep`, a loop without an await
unblocked by time
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from flexmarl.errors import cause_of
from flexmarl.events.event import Events
from flexmarl.events.metrics import Metrics, time_shares, tokens_per_s
from flexmarl.events.notices import EpisodeWaits, EvaluationStarted, FiguresWritten, GroupPlayed
from flexmarl.events.progress import Progress, ProgressView
from flexmarl.events.run_events import AlarmRaised, Evaluated, LoopBlocked, StepStarted, StoppedEarly
from flexmarl.events.serving_events import QueueCounts
from flexmarl.events.untrained import NotTrained, in_words
from flexmarl.inference.pool import InferencePool
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import CONTROLLER, EngineUse, InstanceId
from flexmarl.rollout.blocking_watch import REMEDY, STUCK_S, BlockingWatch

TICK_S = 0.25
"""Seconds between two looks at the queues. Each look also draws the screen."""
PROBE_S = 0.05
"""Seconds between two measurements. On a busy machine one takes 0.16 ms of an idle loop: 0.3 % of a core."""


ELSEWHERE = "or give workflows processes of their own: rollout.workers=2, on Ray"


async def measure_lag(note: Callable[[float], None]) -> None:
    """Passes to `note`, until cancelled, each delay in seconds with which the event loop woke this task.

    A call that blocks the loop shows as one long delay, a busy loop as many. In virtual time all delays are 0.
    """
    clock = asyncio.get_running_loop().time
    while True:
        due = clock() + PROBE_S
        await asyncio.sleep(PROBE_S)
        note(max(0.0, clock() - due))


class Monitor:
    """Shows a run while it goes on. It only watches: no loop waits for it, and none calls it."""

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
        trains_others: bool = False,
    ) -> None:
        """Listens to `events` from now on. `processes` returns the number of live processes; 0 if they are not counted.

        `metrics` get the event loop's delays. `trains_others`: a step trains other episodes than those that end in it.
        """
        self._name, self._steps, self._processes, self._trains_others = name, steps, processes, trains_others
        self._metrics, self._progress, self._events = metrics, progress, events
        self._pool, self._versions = pool, versions
        self._phase = "starting"
        self._done: int | None = None
        """Number of steps whose figures are complete; None before the first step or evaluation of this command."""
        self._groups = 0
        self._before = 0
        self._values: Mapping[str, float] = {}
        self._untrained = NotTrained()
        self._successes: list[float] = []
        self._usage: Mapping[InstanceId, EngineUse] = {}
        self._queues: Mapping[str, Any] = {}
        self._step_lag_ms = 0.0
        self._look_lag_ms = 0.0
        self._slow_places: set[str] = set()
        self._started = asyncio.get_running_loop().time()
        events.listen(StepStarted, lambda begun: self._begin(begun.step, "rollout and training"))
        events.listen(EvaluationStarted, lambda begun: self._begin(begun.step, f"evaluating {_when(begun)}"))
        events.listen(GroupPlayed, self._group_played)
        events.listen(Evaluated, self._evaluated)
        events.listen(FiguresWritten, self._figures_written)
        events.listen(StoppedEarly, lambda end: progress.note(f"stopped after step {end.step}: {end.because}"))
        events.listen(AlarmRaised, lambda alarm: progress.note(f"alarm: {alarm.because}; {alarm.remedy}"))
        events.listen(LoopBlocked, self._loop_blocked)
        events.listen(EpisodeWaits, self._episode_waits)

    async def watch(self) -> None:
        """Draws the screen and watches the queues and the event loop, until it is cancelled."""
        self._progress.start(self._name, self._steps)
        try:
            with BlockingWatch(self._events, self._stuck):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(measure_lag(self._lagged), name="lag")
                    tasks.create_task(self._look(), name="screen")
        except ExceptionGroup as group:
            raise cause_of(group) from group
        finally:
            self._progress.stop()

    def _begin(self, step: int, phase: str) -> None:
        """Sets the phase that begins now.

        In the first call, `step` is also the number of steps that earlier commands did. Later calls do not change the
        number of steps done on the screen: `_figures_written` does, together with the figures of the step.
        """
        if self._done is None:
            self._done = self._before = step
        self._phase, self._groups = phase, 0

    def _group_played(self, played: GroupPlayed) -> None:
        self._groups += 1

    def _evaluated(self, evaluated: Evaluated) -> None:
        found = evaluated.evaluation
        success = found["metrics"].get("success")
        shown = "" if success is None else f": success {success:.3f}"
        reasons = f" ({in_words(found['failures'])})" if found["failures"] else ""
        counts = f"{found['episodes']} held-out episodes, {found['failed']} failed{reasons}"
        self._progress.note(f"evaluation {_when(evaluated)}, {counts}{shown}")

    def _figures_written(self, figures: FiguresWritten) -> None:
        """Shows a step as done, together with its figures."""
        self._step_lag_ms = 0.0
        values = figures.values
        if figures.step > self._before:  # False for an evaluation before the first step of this command.
            self._values, self._untrained = values, figures.untrained
        if "team/success" in values:
            self._successes.append(values["team/success"])
        self._done = figures.step
        self._draw()

    def _loop_blocked(self, blocked: LoopBlocked) -> None:
        """Notes a line of user code the first time."""
        if blocked.place not in self._slow_places:
            self._slow_places.add(blocked.place)
            here = blocked.process == CONTROLLER
            self._progress.note(
                f"{blocked.place} kept all other episodes{'' if here else f' of {blocked.process}'} waiting for "
                f"{blocked.seconds:.1f} s; {REMEDY}{f'; {ELSEWHERE}' if here else ''}"
            )

    def _episode_waits(self, waits: EpisodeWaits) -> None:
        """Notes a line of user code the first time."""
        if waits.place not in self._slow_places:
            self._slow_places.add(waits.place)
            self._progress.note(
                f"an episode of task {waits.task} has waited for {waits.seconds:.0f} s at {waits.place}, and has no "
                f"call under way; it ends as timed out after rollout.episode_timeout_s={waits.timeout_s:g}"
            )

    def _stuck(self, place: str) -> None:
        self._progress.note(f"the run stands still: {place} has kept the event loop for {STUCK_S:g} s; {REMEDY}")

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
            ended=int(values.get("rollout/episodes", 0)) if self._trains_others and self._done else None,
            success_curve=tuple(self._successes),
            rewards={name.removeprefix("reward/"): v for name, v in values.items() if name.startswith("reward/")},
            tokens_per_s=tokens_per_s(values),
            running=self._running,
            queued=self._queued,
            versions=dict(self._versions.served.items()),
            time_shares=time_shares(values),
            training_hidden=values.get("overlap/training_hidden"),
            processes=self._processes(),
            untrained=self._untrained,
            before=self._before,
        )
        self._progress.update(view)


def _when(evaluation: EvaluationStarted | Evaluated) -> str:
    """When it is played, in words: `before training`, `after step 2`, `after training`."""
    between = evaluation.when == "between"
    return f"after step {evaluation.step}" if between else f"{evaluation.when} training"


def _by_policy(counts: Mapping[InstanceId, int]) -> dict[str, int]:
    """Sums the counts over the instances of each policy."""
    sums: Counter[str] = Counter()
    for instance, count in counts.items():
        sums[instance.policy] += count
    return dict(sums)
