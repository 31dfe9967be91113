"""Runs one run, from its first publication to its last evaluation. The mode decides how a step is made.

  publish ──► evaluate ──► step ──► save ──► evaluate ──► step ──► ... ──► evaluate
                           └─ synchronous.py, asynchronous.py or per_policy.py

consumes    steps of a pipeline
waits for   the pipeline, the disk, evaluations
produces    checkpoints at rest, evaluations, metrics of every step
unblocked by every part in turn; any failure ends the run as an exception; a `StopRequest` ends it at a step boundary
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from flexmarl.agents.workflow_tasks import end_leftover_tasks
from flexmarl.errors import cause_of
from flexmarl.events.event import Events
from flexmarl.events.notices import EvaluationStarted, StepSettled, phase
from flexmarl.events.run_events import Evaluated, Resumed, StepEnded, StepStarted, StoppedEarly
from flexmarl.orchestrator.balance import Balancer
from flexmarl.orchestrator.checkpoint import RunState
from flexmarl.orchestrator.crediting import Crediting
from flexmarl.orchestrator.evaluation import Evaluation, Evaluator
from flexmarl.orchestrator.publish import Updates, Versions
from flexmarl.orchestrator.references import References
from flexmarl.orchestrator.saving import Saver
from flexmarl.orchestrator.settings import EvaluateSettings, FigureSettings, StopSettings
from flexmarl.orchestrator.stopping import check_figure, stop_after
from flexmarl.records import CONTROLLER, GroupId
from flexmarl.rollout.admission import Admission

LEFT_BEHIND_S = 1.0
"""Time that tasks which workflows left behind get to end, at the end of a run."""


class Pipeline(Protocol):
    """The way in which a mode makes steps. The orchestrator calls `step` inside `playing`, one step at a time."""

    def playing(self) -> AbstractAsyncContextManager[None]:
        """Runs tasks that span several steps, such as rollout, while the block lasts. They have ended after it."""
        ...

    async def step(self, step: int, *, rest: Callable[[], bool]) -> Sequence[GroupId]:
        """Makes a step. Returns the groups that were trained in it.

        `rest` is called before anything of the next step is trained, or played ahead. If it returns True, nothing is
        trained or published between the end of this step and the next one, and no gradient is left over. A pipeline
        that rests after every step need not call it.
        """
        ...


class StopRequest:
    """A request to end the run at its next step boundary. Used from one event loop."""

    def __init__(self) -> None:
        self.because = ""
        """The one who made it; "" if nobody did."""
        self._limit: asyncio.Timeout | None = None

    def make(self, because: str) -> None:
        """Makes the request. A second call does nothing."""
        if not self.because:
            self.because = because
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Leaves the block when the request is made, or at once if it is made already. One block at a time."""
        limit = asyncio.timeout(0 if self.because else None)
        try:
            async with limit as self._limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._limit = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """Result of a whole run."""

    before: Evaluation | None
    after: Evaluation | None
    evaluations: Mapping[int, Evaluation]
    """Every evaluation, by completed steps."""
    steps: int
    wall_s: float
    """Sum of the seconds that each process of the run took; a resumed run has several."""
    stopped: str = ""
    """The one who stopped the run before its end; "" if it did all its steps and evaluations."""


class RunProgress:
    """How far a run is: its completed steps, and what a checkpoint holds of its groups, versions and estimators."""

    def __init__(
        self,
        *,
        admission: Admission,
        versions: Versions,
        crediting: Crediting,
        references: References,
        events: Events,
        start: RunState | None = None,
    ) -> None:
        """`start` is the state that a resumed run continues from. `admission` and `versions` hold it already."""
        self.admission, self.versions = admission, versions
        self._crediting, self.references = crediting, references
        if start:
            crediting.memory = start.memory
            next_group, active = GroupId(start.admission.next_group), start.replayed
            events.emit(Resumed(step=start.step, versions=start.versions, next_group=next_group, active=active))
        self.step = start.step if start else 0
        """Number of completed steps."""
        self.before = start.before if start else None
        """The evaluation before the first step."""
        self.evaluations = dict(start.evaluations) if start else {}
        """Figures of every evaluation so far, by completed steps."""
        self._earlier_s = start.wall_s if start else 0.0
        self._began = asyncio.get_running_loop().time()

    @property
    def wall_s(self) -> float:
        """Sum of the seconds that each process of the run took so far."""
        return self._earlier_s + asyncio.get_running_loop().time() - self._began

    def state(self) -> RunState:
        """The state to save, at a step boundary."""
        return RunState(
            step=self.step,
            admission=self.admission.snapshot(),
            versions=self.versions.served,
            before=self.before,
            wall_s=self.wall_s,
            memory=dict(self._crediting.memory),
            evaluations=dict(self.evaluations),
            resets=self.references.steps,
        )

    async def reset_references(self) -> None:
        """Resets the references that are due after the completed steps and their evaluations."""
        await self.references.reset(self.step, self.evaluations, self.versions.served)


class Orchestrator:
    """One run: publishes, steps, saves and evaluates in turn."""

    def __init__(
        self,
        *,
        progress: RunProgress,
        pipeline: Pipeline,
        updates: Updates,
        evaluator: Evaluator,
        saver: Saver,
        balancer: Balancer | None,
        events: Events,
        steps: int,
        evaluate: EvaluateSettings,
        best: FigureSettings | None = None,
        stop: StopSettings | None = None,
        request: StopRequest | None = None,
    ) -> None:
        """`balancer` is None if no instances are moved. `best`: the figure of the best checkpoint.

        `stop` ends the run when its evaluations say so, `request` when somebody does.
        """
        self._progress, self._pipeline, self._updates = progress, pipeline, updates
        self._evaluator, self._saver, self._balancer = evaluator, saver, balancer
        self._events, self._steps, self._evaluate = events, steps, evaluate
        self._compared = {key: figure for key, figure in (("checkpoint.best", best), ("stop", stop)) if figure}
        self._compared |= progress.references.compared
        self._stop, self._request = stop, request or StopRequest()
        self._latest: tuple[int, Evaluation | None] = (-1, None)
        """The newest evaluation of this command on all tasks that are compared, and its step."""
        self._at_rest = True
        """False if something of the next step has begun."""
        self._saved = progress.step
        """The step of the newest checkpoint."""

    async def run(self) -> RunOutcome:
        """Evaluates, trains and evaluates again; returns early if the run is stopped, and the outcome says why.

        Raises the error that ended the run, without the exception groups around it.
        """
        try:
            async with self._saver.beside():
                return await self._run()
        except ExceptionGroup as group:
            raise cause_of(group) from group
        finally:
            await end_leftover_tasks(LEFT_BEHIND_S)

    async def _run(self) -> RunOutcome:
        progress = self._progress
        await self._updates.begin()
        if progress.step == 0:
            progress.before = await self._evaluated("before")
            self._events.emit(StepSettled(step=self._progress.step))
        # A resumed run may only have active groups to end.
        if (self._goes_on or progress.admission.active) and not self._request.because:
            await self._train()
        after = progress.before
        if progress.step and self._compared and self._latest[0] == progress.step:  # It was stopped by it.
            after = self._latest[1]
        elif progress.step:
            after = await self._evaluated("after")
            if not self._request.because:
                await self._saver.keep_best(progress.state())
            if not self._goes_on:  # Otherwise it was stopped after a step that is settled.
                self._events.emit(StepSettled(step=self._progress.step))
        done = not self._goes_on and (after is not None or not self._evaluate.tasks)
        return RunOutcome(
            before=progress.before,
            after=after,
            evaluations=dict(progress.evaluations),
            steps=progress.step,
            wall_s=progress.wall_s,
            stopped="" if done else self._request.because,
        )

    async def _train(self) -> None:
        """Makes all steps. Rollout and balancing run during them, and end with the last one."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._balancer.watch(), name="balance") if self._balancer else None
            async with self._pipeline.playing():
                if self._compared and self._progress.step and self._progress.step not in self._progress.evaluations:
                    await self._evaluate_if_due()  # The run was killed between its checkpoint and its evaluation.
                while self._goes_on and not self._stops:
                    await self._step()
                    await self._save_if_due()
                    if self._progress.step < self._steps:
                        await self._evaluate_if_due()
                        self._events.emit(StepSettled(step=self._progress.step))
                if self._request.because and self._saved < self._progress.step:
                    await self._save_if_due()
            if watching:
                watching.cancel()

    async def _step(self) -> None:
        step, began = self._progress.step, self._events.now()
        self._events.emit(StepStarted(step=step, versions=self._progress.versions.served))
        self._at_rest = True
        trained = await self._pipeline.step(step, rest=self._rest)
        self._progress.step += 1
        served = self._progress.versions.served
        await self._progress.reset_references()
        self._events.emit(
            StepEnded(process=CONTROLLER, began=began, step=step, trained=tuple(trained), versions=served)
        )

    @property
    def _stops(self) -> bool:
        """True if the run ends before another step. If that has begun already, it is made, too."""
        return bool(self._request.because) and self._at_rest

    def _rest(self) -> bool:
        """True if the run rests after the present step. The pipeline asks before it begins anything of the next."""
        step = self._progress.step + 1
        last = step == self._steps or bool(self._request.because)
        self._at_rest = last or self._saver.due(step, last=last) or self._is_evaluated(step)
        self._at_rest = self._at_rest or self._progress.references.due(step)
        return self._at_rest

    def _is_evaluated(self, step: int) -> bool:
        return bool(self._evaluate.tasks and self._evaluate.every) and step % self._evaluate.every == 0

    async def _save_if_due(self) -> None:
        state, last = self._progress.state(), self._progress.step == self._steps or self._stops
        if self._saver.due(state.step, last=last):
            await self._saver.save(state, last=last)
            self._saved = state.step
        else:
            await self._saver.not_saved(state.admission)

    @property
    def _goes_on(self) -> bool:
        stopped = self._stop and stop_after(self._progress.evaluations, self._stop)
        return self._progress.step < self._steps and not stopped

    async def _evaluate_if_due(self) -> None:
        if not self._is_evaluated(self._progress.step):
            return
        if await self._evaluated("between", self._evaluate.every_tasks) is None:
            return  # The run was stopped.
        await self._progress.reset_references()
        state = self._progress.state()
        await self._saver.keep_best(state)
        if self._stop and (ruling := stop_after(state.evaluations, self._stop)):
            self._events.emit(StoppedEarly(step=state.step, because=ruling.because))
            if self._saver.due(state.step, last=True):
                await self._saver.save(state, last=True)

    async def _evaluated(self, when: str, num_tasks: int | None = None) -> Evaluation | None:
        if not self._evaluate.tasks or self._request.because:
            return None
        step, began, evaluation = self._progress.step, self._events.now(), None
        self._events.emit(EvaluationStarted(when=when, step=step))
        with phase(self._events, "evaluate"):
            async with self._request.ending():
                evaluation = await self._evaluator.run(num_tasks, when=when, step=step)
        if evaluation is None:  # The run was stopped. Nothing of an evaluation is needed to go on.
            return None
        self._events.emit(
            Evaluated(process=CONTROLLER, began=began, when=when, step=step, evaluation=asdict(evaluation))
        )
        for key, figure in self._compared.items():
            check_figure(key, figure, evaluation)
        self._progress.evaluations[step] = evaluation
        self._latest = (step, evaluation)
        return evaluation
