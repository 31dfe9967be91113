"""Runs one run, from its first publication to its last evaluation. The mode decides how a step is made.

  publish ──► evaluate ──► step ──► save ──► evaluate ──► step ──► ... ──► evaluate
                           └─ synchronous.py, asynchronous.py or per_policy.py

consumes    steps of a pipeline
waits for   the pipeline, the disk, evaluations
produces    checkpoints at rest, evaluations, metrics of every step
unblocked by every part in turn; any failure ends the run as an exception
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from typing import Protocol

from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.errors import cause_of
from flexmarl.events.run_events import Evaluated, StepEnded, StepStarted
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.parts import Parts
from flexmarl.orchestrator.saving import Saver
from flexmarl.orchestrator.settings import CheckpointSettings, EvaluateSettings
from flexmarl.records import CONTROLLER, GroupId

LEFT_BEHIND_S = 1.0
"""Time that tasks which workflows left behind get to end, at the end of a run."""


class Pipeline(Protocol):
    """The way in which a mode makes steps. The orchestrator calls `step` inside `playing`, one step at a time."""

    def playing(self) -> AbstractAsyncContextManager[None]:
        """Runs tasks that span several steps, such as rollout, while the block lasts. They have ended after it."""
        ...

    async def step(self, step: int, *, rest: bool) -> Sequence[GroupId]:
        """Makes a step. Returns the groups that were trained in it.

        With `rest`, nothing is trained or published between its end and the next step, and no gradient is left over.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Result of a whole run."""

    before: Evaluation | None
    after: Evaluation | None
    steps: int
    wall_s: float
    """Sum of the seconds that each process of the run took; a resumed run has several."""


class Orchestrator:
    """One run: publishes, steps, saves and evaluates in turn."""

    def __init__(
        self,
        parts: Parts,
        pipeline: Pipeline,
        *,
        steps: int,
        evaluate: EvaluateSettings,
        checkpoint: CheckpointSettings,
        start: RunState | None = None,
    ) -> None:
        """`start` is the state that a resumed run continues from. Its trainers hold that state already."""
        self._parts = parts
        self._pipeline = pipeline
        self._steps = steps
        self._evaluate = evaluate
        self._saver = Saver(
            parts.checkpoints,
            parts.trainers,
            checkpoint,
            events=parts.events,
            warn=parts.warn,
            prune=parts.prune,
        )
        if start:
            parts.crediting.memory = start.memory
        self._before = start.before if start else None
        self._earlier_s = start.wall_s if start else 0.0
        self._began = asyncio.get_running_loop().time()
        self.step = start.step if start else 0
        """Number of completed steps."""

    async def run(self) -> RunOutcome:
        """Trains to the last step. Raises the error that ended the run, without the exception groups around it."""
        try:
            return await self._run()
        except ExceptionGroup as group:
            raise cause_of(group) from group
        finally:
            await end_leftover_tasks(LEFT_BEHIND_S)

    async def _run(self) -> RunOutcome:
        parts = self._parts
        async with asyncio.TaskGroup() as tasks:
            for policy, session in parts.sessions.items():
                tasks.create_task(parts.publisher.publish(policy, session.version), name=f"publish/{policy}")
        if self.step == 0:
            self._before = await self._evaluated("before")
            parts.monitor.flush(self.step)
        if self.step < self._steps or parts.admission.active:  # A resumed run may only have active groups to end.
            await self._train()
        after = self._before
        if self.step:
            after = await self._evaluated("after")
            parts.monitor.flush(self.step)
        return RunOutcome(before=self._before, after=after, steps=self.step, wall_s=self._wall_s)

    async def _train(self) -> None:
        """Makes all steps. Rollout and balancing run during them, and end with the last one."""
        parts = self._parts
        async with asyncio.TaskGroup() as beside:
            watching = beside.create_task(parts.balancer.watch(), name="balance") if parts.balancer else None
            async with self._pipeline.playing():
                while self.step < self._steps:
                    await self._step()
                    await self._save_if_due()
                    if self.step < self._steps:
                        await self._evaluate_if_due()
                        parts.monitor.flush(self.step)
            if watching:
                watching.cancel()

    @property
    def _wall_s(self) -> float:
        return self._earlier_s + asyncio.get_running_loop().time() - self._began

    async def _step(self) -> None:
        parts, began = self._parts, self._parts.events.now()
        parts.events.emit(StepStarted(step=self.step, versions=parts.versions.served))
        parts.monitor.begin(self.step, "rollout and training")
        trained = await self._pipeline.step(self.step, rest=self._rests_after(self.step + 1))
        self.step += 1
        parts.events.emit(
            StepEnded(
                process=CONTROLLER,
                began=began,
                step=self.step - 1,
                trained=tuple(trained),
                versions=parts.versions.served,
            )
        )

    def _rests_after(self, step: int) -> bool:
        last = step == self._steps
        return last or self._saver.due(step, last=last) or self._is_evaluated(step)

    def _is_evaluated(self, step: int) -> bool:
        return bool(self._evaluate.tasks and self._evaluate.every) and step % self._evaluate.every == 0

    async def _save_if_due(self) -> None:
        parts = self._parts
        last = self.step == self._steps
        admission = parts.admission.snapshot()
        if self._saver.due(self.step, last=last):
            state = RunState(
                step=self.step,
                admission=admission,
                versions=dict(parts.versions.served),
                before=self._before,
                wall_s=self._wall_s,
                memory=dict(parts.crediting.memory),
            )
            with parts.monitor.time("checkpoint"):
                await self._saver.save(state, last=last)
        else:
            await self._saver.not_saved(admission)

    async def _evaluate_if_due(self) -> None:
        if self._is_evaluated(self.step):
            await self._evaluated("between", self._evaluate.every_tasks)

    async def _evaluated(self, when: str, num_tasks: int | None = None) -> Evaluation | None:
        parts = self._parts
        if not self._evaluate.tasks:
            return None
        began = parts.events.now()
        parts.monitor.begin(self.step, f"evaluating {when} training")
        with parts.monitor.time("evaluate"):
            evaluation = await parts.evaluator.run(num_tasks)
        parts.monitor.evaluated(when, evaluation)
        parts.events.emit(
            Evaluated(process=CONTROLLER, began=began, when=when, step=self.step, evaluation=asdict(evaluation))
        )
        return evaluation
