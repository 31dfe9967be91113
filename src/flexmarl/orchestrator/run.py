"""Runs the joint orchestrator: one step after another, with synchronous semantics.

  feed ──► rollout ──► collect ──► training sessions ──► update ──► publish ──► next step
           (groups)    (credit)    (micro-batches)       (one per policy)

consumes    tasks
waits for   the step's groups to end, its ready samples to be accumulated, its weights to be acknowledged
produces    one update per active policy and step; evaluations; checkpoints
unblocked by every part in turn; any failure ends the step, and with it the run, as an exception
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flexmarl.errors import EpisodeError, cause_of
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.checkpoint import Checkpoints, RunState
from flexmarl.orchestrator.collect import Collector
from flexmarl.orchestrator.evaluate import Evaluation, Evaluator
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.monitor import Monitor
from flexmarl.orchestrator.publish import Publisher
from flexmarl.orchestrator.save import Prune, Saver
from flexmarl.orchestrator.settings import CheckpointSettings, EvaluateSettings
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import Divisors, GroupRecord, PolicyName
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.rollout import Rollout
from flexmarl.training.interface import Trainer
from flexmarl.training.session import TrainingSession


def _ignore(warning: str) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the orchestrator joins; `assemble` makes them."""

    feed: Feed
    admission: Admission
    rollout: Rollout
    collector: Collector
    trainers: Mapping[PolicyName, Trainer]
    sessions: Mapping[PolicyName, TrainingSession]
    publisher: Publisher
    versions: Versions
    evaluator: Evaluator
    checkpoints: Checkpoints
    journal: Journal
    monitor: Monitor
    warn: Callable[[str], None] = _ignore
    """Puts a line on the screen; the journal has it already."""
    prune: Prune | None = None
    """For a store whose size is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """What a whole run showed."""

    before: Evaluation | None
    after: Evaluation | None
    steps: int
    wall_s: float
    """Seconds of all processes that the run took, one resumed after the other."""


class Orchestrator:
    """One run."""

    def __init__(
        self,
        parts: Parts,
        *,
        steps: int,
        evaluate: EvaluateSettings,
        checkpoint: CheckpointSettings,
        start: RunState | None = None,
    ) -> None:
        """`start` is where a resumed run goes on; its trainers hold that state already."""
        self._parts = parts
        self._steps = steps
        self._evaluate = evaluate
        self._saver = Saver(
            parts.checkpoints,
            parts.trainers,
            checkpoint,
            journal=parts.journal,
            warn=parts.warn,
            prune=parts.prune,
        )
        self._before = start.before if start else None
        self._earlier_s = start.wall_s if start else 0.0
        self._began = asyncio.get_running_loop().time()
        self.step = start.step if start else 0
        """Steps done."""
        self._failures: list[str] = []

    async def run(self) -> RunOutcome:
        """Trains to the last step. Raises what ended the run, out of the groups of the tasks it came through."""
        try:
            return await self._run()
        except ExceptionGroup as group:
            raise cause_of(group) from group

    async def _run(self) -> RunOutcome:
        parts = self._parts
        for policy, session in parts.sessions.items():
            await parts.publisher.publish(policy, session.version)
        if self.step == 0:
            self._before = await self._evaluated("before")
            parts.monitor.flush(self.step)
        after = self._before
        if self.step and self.step >= self._steps:  # It was ended after its last step, while that was evaluated say.
            after = await self._evaluated("after")
            parts.monitor.flush(self.step)
        while self.step < self._steps:
            await self._step()
            await self._save_if_due()
            after = await self._evaluate_if_due()
            parts.monitor.flush(self.step)
        return RunOutcome(before=self._before, after=after, steps=self.step, wall_s=self._wall_s)

    @property
    def _wall_s(self) -> float:
        return self._earlier_s + asyncio.get_running_loop().time() - self._began

    async def _step(self) -> None:
        """Rollout, collection and training side by side; then one update per policy, published."""
        parts, began = self._parts, self._parts.journal.now()
        parts.journal.event("step_started", step=self.step, versions=parts.versions.served)
        parts.monitor.begin(self.step, "rollout and training")
        parts.collector.open()
        self._failures = []
        async with asyncio.TaskGroup() as tasks:
            for policy, session in parts.sessions.items():
                tasks.create_task(session.accumulate(), name=f"train/{policy}")
            with parts.monitor.rollout():
                await parts.rollout.play(parts.feed.groups(self.step), self._finished)
            divisors = await parts.collector.close()
            for session in parts.sessions.values():
                session.close_step()
        self._check_alive()
        await self._update(divisors)
        trained = parts.collector.settle_trained()
        self.step += 1
        parts.journal.event(
            "step_ended",
            process="controller",
            began=began,
            step=self.step - 1,
            trained=trained,
            versions=parts.versions.served,
        )

    async def _finished(self, group: GroupRecord) -> None:
        self._parts.monitor.group_finished(group)
        self._failures += [] if group.finished else [group.episodes[-1].reason]
        await self._parts.collector.take(group)

    def _check_alive(self) -> None:
        """A step in which every group failed would repeat for ever: a workflow, tool or engine is broken."""
        if len(self._failures) == self._parts.feed.num_groups:
            raise EpisodeError(
                f"step {self.step}: none of its {len(self._failures)} groups had a finished episode; "
                f"the last reason: {self._failures[-1]}"
            )

    async def _update(self, divisors: Mapping[PolicyName, Divisors]) -> None:
        parts = self._parts
        for policy, session in parts.sessions.items():
            old, began = session.version, asyncio.get_running_loop().time()
            new = await session.finish(divisors[policy])
            report = parts.trainers[policy].last_update
            if new == old or report is None:
                parts.journal.event("update_skipped", policy=policy, because="no weighted token in the step")
                continue
            parts.monitor.updated(policy, report, began)
            with parts.monitor.time("publish"):
                await parts.publisher.publish(policy, new)

    async def _save_if_due(self) -> None:
        parts = self._parts
        last = self.step == self._steps
        if self._saver.due(self.step, last=last):
            state = RunState(
                step=self.step,
                next_group=parts.admission.next_group,
                versions=dict(parts.versions.served),
                before=self._before,
                wall_s=self._wall_s,
            )
            with parts.monitor.time("checkpoint"):
                await self._saver.save(state, last=last)
        else:
            await self._saver.not_saved(parts.admission.next_group)

    async def _evaluate_if_due(self) -> Evaluation | None:
        if self.step == self._steps:
            return await self._evaluated("after")
        if self._evaluate.every and self.step % self._evaluate.every == 0:
            return await self._evaluated("between", self._evaluate.every_tasks)
        return None

    async def _evaluated(self, when: str, num_tasks: int | None = None) -> Evaluation | None:
        parts = self._parts
        if not self._evaluate.tasks:
            return None
        began = parts.journal.now()
        parts.monitor.begin(self.step, f"evaluating {when} training")
        with parts.monitor.time("evaluate"):
            evaluation = await parts.evaluator.run(num_tasks)
        parts.monitor.evaluated(when, evaluation)
        parts.journal.event(
            "evaluated", process="controller", began=began, when=when, step=self.step, evaluation=evaluation
        )
        return evaluation
