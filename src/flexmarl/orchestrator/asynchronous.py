"""Runs the asynchronous modes: rollout never waits for an update, and steps train on the groups that it finishes.

Loop of `Stream`: groups play as slots become free, and wait in a window until they are taken.

  feed ──► rollout ──► judge ──► window ──► next()
   ▲                     │ drop               │
   └──── a slot is free ─┴─── (trained) ◄─────┘

consumes    tasks
waits for   a free slot. `next` waits for a finished group inside the window, and for the head until its deadline
produces    kept groups, in the window's order; groups that end as filtered, failed or expired
unblocked by the end of any group; the head's deadline; the end of the tasks

Loop of `Asynchronous`: one step trains on a batch of groups while other groups play.

  stream ──► credit ──► per policy: accumulate ──► update ──► serve ──► slots free
  (never waits)

At most S + ceil((W - 1) / P) + U versions lie between sampling and training (docs/math.md, section 9), and
`Collector.take` checks it.

consumes    kept groups, in the order of the window
waits for   P kept groups; each policy waits for its own rows and instances only
produces    one update of each active policy, served unless `pipeline.publish` defers it; then the slots are free
unblocked by the stream, which ends a group that blocks it for too long; any failure ends the step as an exception
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from flexmarl.errors import EpisodeError
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupExpired, GroupStopped, GroupTaken, LagChanged, RolloutEnded
from flexmarl.events.notices import EpisodesTaken, StepPlayed, TurnsTaken, phase
from flexmarl.events.safe_json import masked
from flexmarl.events.untrained import in_words
from flexmarl.experience.interface import ExperienceStore, Outcome
from flexmarl.experience.window import Window
from flexmarl.orchestrator.collect import Collector
from flexmarl.orchestrator.crediting import Crediting
from flexmarl.orchestrator.feed import Feed
from flexmarl.orchestrator.measured_lag import MeasuredLag
from flexmarl.orchestrator.publish import Updates
from flexmarl.orchestrator.settings import PipelineSettings
from flexmarl.records import CONTROLLER, Divisors, GroupId, GroupRecord, PolicyName, RowState
from flexmarl.rollout.admission import Admission
from flexmarl.rollout.rollout import Rollout
from flexmarl.tasks import SourceExhausted
from flexmarl.training.session import TrainingSession

LAST = "the run's last step was done"
FEWEST_BARREN = 64
"""Fewest groups in a row without a sample that end a run. With few slots, two rounds of failures may be chance."""
MARGIN_S = 0.001
"""Slack added to the timer: the rule compares with `>`, and a timer may fire exactly at the deadline."""


class Stream:
    """The groups of a run, from admission until `next` hands them out."""

    def __init__(
        self,
        *,
        feed: Feed,
        rollout: Rollout,
        crediting: Crediting,
        admission: Admission,
        store: ExperienceStore,
        settings: PipelineSettings,
        retries: int,
        events: Events,
        window: type[Window] = Window,
        lag: MeasuredLag | None = None,
    ) -> None:
        """`retries`: how often the task of a late group is admitted again if `settings.late` is `requeue`.

        `lag`: decides the lag after each step; None: it stays what it is.
        """
        self._feed, self._rollout, self._crediting = feed, rollout, crediting
        self._admission, self._store, self._events = admission, store, events
        self._settings, self._retries, self._lag = settings, retries, lag
        law = admission.law
        self._window = window(law.window, step=law.groups if law.steps_in_order else None)
        self._done: dict[GroupId, GroupRecord] = {}
        """Groups that have finished, were kept, and have not been taken."""
        self._late: dict[GroupId, str] = {}
        """Why each group was stopped; without those that have ended since."""
        self._changed = asyncio.Event()
        self._barren: list[str] = []
        """For each group since the last one with samples: why it has none."""
        self._bears = asyncio.Event()
        """Cleared while `_is_barren`: no more groups are admitted then."""
        self._bears.set()
        self._step = 0
        self._began = 0.0
        """When the step began; 0 in the first step of a command, which is not measured."""
        self._held_s = 0.0
        """Seconds of the step in which finished groups stood outside the window."""
        self._admitted: dict[GroupId, float] = {}
        """When each group that plays was admitted."""

    @asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        """Plays while the block lasts. Groups that are active at its end are stopped, and end as expired."""
        async with asyncio.TaskGroup() as tasks:
            self._playing = tasks.create_task(self._play(), name="rollout")
            self._playing.add_done_callback(lambda _: self._changed.set())
            yield
            self._feed.end()
            self._bears.set()
            for group in self._admission.active:
                self._stop(group, LAST)
        for group in self._admission.active:
            await self._expire(group, LAST, again=False)

    async def next(self, step: int) -> GroupRecord:
        """Waits for the next group of step `step`, and takes it from the window.

        Raises SourceExhausted if no group will come, and EpisodeError if too many groups in a row had no samples.
        """
        if step != self._step:
            self._step = step
            self._window.begin_step()
            self._measure()
        while (taken := self._window.take()) is None:
            self._check_alive()
            self._stop_late_head()
            began, held = asyncio.get_running_loop().time(), bool(self._done)
            await self._wait()
            self._held_s += held * (asyncio.get_running_loop().time() - began)
        self._events.emit(GroupTaken(group=taken.group, step=step, because=taken.because))
        return self._done.pop(taken.group)

    @property
    def num_waiting(self) -> int:
        """Number of finished groups that no step has taken."""
        return len(self._done)

    def give_back(self, group: GroupRecord) -> None:
        """Returns a group that was taken and not used. It ends as expired when the block of `playing` ends."""
        self._done[group.group] = group

    def taken(self, *, kept: bool) -> None:
        """Notes the fate of a taken group: it has samples if `kept`; otherwise it has ended without any."""
        if kept:
            self._barren.clear()
            self._bears.set()
        else:
            self._window.lacks_one()
            self._note_barren("no row has weight")
        self._feed.look_again()

    async def _play(self) -> None:
        began = self._events.now()
        try:
            with phase(self._events, "rollout"):
                await self._rollout.play(self._submitted(), self._finished)
        finally:
            self._events.emit(RolloutEnded(process=CONTROLLER, began=began, step=self._step))

    async def _submitted(self) -> AsyncIterator[GroupRecord]:
        async for group in self._feed.endless(lambda: self._step):
            self._admitted[group.group] = now = asyncio.get_running_loop().time()
            self._window.submitted(group.group, now)
            yield group
            # Without this wait, groups that fail at once would use up all tasks before `next` is called and raises.
            await self._bears.wait()

    def _measure(self) -> None:
        """Measures the step that has ended. The lag may change now, and with it admission and the window."""
        now, began, held_s = asyncio.get_running_loop().time(), self._began, self._held_s
        self._began, self._held_s = now, 0.0
        if self._lag is None or not began:
            return
        oldest = max((now - at for at in self._admitted.values()), default=0.0)
        ruling = self._lag.step_ended(now - began - held_s, oldest=oldest)
        if ruling:
            before = self._admission.law.lag
            self._admission.change(ruling.law)
            self._window.resize(ruling.law.window)
            self._feed.look_again()
            self._events.emit(LagChanged(step=self._step, before=before, lag=ruling.law.lag, because=ruling.because))

    async def _finished(self, group: GroupRecord) -> None:
        played_s = asyncio.get_running_loop().time() - self._admitted.pop(group.group)
        if self._lag and group.group not in self._late:
            self._lag.task_ended(played_s)
        if group.group in self._late:
            self._done[group.group] = group
            because = self._late.pop(group.group)
            await self._expire_late(group.group, because)
        elif not group.finished:
            self._window.ended(group.group)
            self._note_barren(masked(group.episodes[-1].reason_and_place))
        else:
            await self._judge(group)
        self._feed.look_again()
        self._changed.set()

    async def _judge(self, group: GroupRecord) -> None:
        judged = self._crediting.judge(group)
        if judged.drop:
            await self._crediting.drop(group, judged)
            self._window.ended(group.group)
            self._note_barren(f"credit.filter found it {judged.reason}")
        else:
            self._window.finished(group.group)
            self._done[group.group] = group

    async def _expire_late(self, group: GroupId, because: str) -> None:
        """Ends a stopped group. Its task is admitted again at most `retries` times, if `settings.late` asks for it."""
        if because == LAST or self._settings.late == "expire":
            await self._expire(group, because, again=False)
        else:
            verdict = self._admission.after_expiry(group, retries=self._retries)
            await self._expire(group, f"{because}; {verdict.because}", again=verdict.allowed)

    async def _expire(self, group: GroupId, because: str, *, again: bool) -> None:
        """Ends a group that will not be taken. The rows of its unfinished episodes have ended already."""
        played = self._done.pop(group, None)
        ids = [turn.sample_id for episode in played.finished for turn in episode.turns] if played else []
        await self._store.settle(ids, Outcome(state=RowState.EXPIRED, reason=because))
        self._admission.expire(group, again=again)
        self._events.emit(GroupExpired(group=group, again=again, because=because))

    def _stop_late_head(self) -> None:
        late = self._window.overdue(asyncio.get_running_loop().time(), self._settings.head_deadline_s)
        if late is not None:
            because = f"it held up others for longer than pipeline.head_deadline_s={self._settings.head_deadline_s:g}"
            if self._stop(late, because):
                self._window.ended(late)
                self._events.emit(GroupStopped(group=late, because=because))  # Its end may be a grace away.
                self._note_barren(because)

    def _stop(self, group: GroupId, because: str) -> bool:
        stopped = group not in self._late and self._rollout.stop(group, because)
        if stopped:
            self._late[group] = because
        return stopped

    async def _wait(self) -> None:
        """Waits until a group ends or the head is late."""
        head_at, due = self._window.head_at, None
        if head_at is not None:
            due = head_at + self._settings.head_deadline_s + MARGIN_S
            due = due if due > asyncio.get_running_loop().time() else None  # Otherwise the late head is about to end.
        self._changed.clear()
        try:
            async with asyncio.timeout_at(due):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _note_barren(self, because: str) -> None:
        self._barren.append(because)
        if self._is_barren:
            self._bears.clear()

    @property
    def _is_barren(self) -> bool:
        return len(self._barren) >= max(2 * self._admission.slots, FEWEST_BARREN)

    def _check_alive(self) -> None:
        """Raises an error where `next` would wait without end: the tasks are over, or group after group is barren."""
        if self._is_barren:
            reasons = in_words(dict(Counter(self._barren).most_common()))
            raise EpisodeError(
                f"step {self._step + 1}: the last {len(self._barren)} groups gave no sample to train on, because: "
                f"{reasons}; so many in a row are taken for all that will come. Mend the workflow, or choose "
                f"tasks that are neither too easy nor too hard, or credit.filter=null"
            )
        if self._playing.done() and self._feed.exhausted:
            raise SourceExhausted(f"step {self._step + 1} cannot be filled: {self._feed.exhausted}")


@dataclass(frozen=True, slots=True)
class _Closed:
    """A step's batch, when its collection is closed."""

    divisors: Mapping[PolicyName, Divisors]
    rests: bool
    """True if the newest weights must be served at the end of the step."""


class Asynchronous:
    """Steps in which all policies update together, while rollout continues."""

    def __init__(
        self,
        *,
        stream: Stream,
        feed: Feed,
        collector: Collector,
        sessions: Mapping[PolicyName, TrainingSession],
        updates: Updates,
        events: Events,
    ) -> None:
        self._stream, self._feed, self._collector = stream, feed, collector
        self._sessions, self._updates, self._events = sessions, updates, events

    def playing(self) -> AbstractAsyncContextManager[None]:
        """Plays while the block lasts."""
        return self._stream.playing()

    async def step(self, step: int, *, rest: Callable[[], bool]) -> Sequence[GroupId]:
        """Makes one step. Returns the groups that were trained in it. Training is at rest after every step."""
        closed: asyncio.Future[_Closed] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            for policy in self._sessions:
                tasks.create_task(self._train(policy, closed), name=f"train/{policy}")
            divisors = await self._collect(step)
            closed.set_result(_Closed(divisors, rests=not self._updates.defers or rest()))
            for session in self._sessions.values():
                session.close_step()
            self._events.emit(StepPlayed(step=step, pauses=False))
        trained = self._collector.settle_trained(self._collector.kept)
        self._feed.look_again()
        return trained

    async def _collect(self, step: int) -> Mapping[PolicyName, Divisors]:
        """Takes groups until P have samples; P groups, if they are credited together. Returns the batch's divisors."""
        collector, groups = self._collector, self._feed.num_groups
        collector.open()
        if collector.batch_wide:
            for _ in range(groups):
                await self._take(step)
            divisors = await collector.close()
            self._stream.taken(kept=bool(collector.kept))
        else:
            while len(collector.kept) < groups:
                group = await self._take(step)
                self._stream.taken(kept=group in collector.kept)
            divisors = await collector.close()
        return divisors

    async def _take(self, step: int) -> GroupId:
        """Takes the next group from the stream into the batch."""
        group = await self._stream.next(step)
        await self._collector.take(group)
        self._events.emit(EpisodesTaken(episodes=group.finished))
        for policy in self._sessions:
            turns = [turn for episode in group.finished for turn in episode.turns if turn.policy == policy]
            self._events.emit(TurnsTaken(policy=policy, turns=turns))
        return group.group

    async def _train(self, policy: PolicyName, closed: "asyncio.Future[_Closed]") -> None:
        await self._sessions[policy].accumulate()
        batch = await closed
        weights = await self._updates.update(
            policy, batch.divisors[policy], rests=batch.rests, backlog=self._stream.num_waiting / self._feed.num_groups
        )
        if weights:
            await self._updates.serve(weights)
