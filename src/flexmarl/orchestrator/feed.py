"""Runs the feed: tasks become admitted groups. `Refill` decides how many a synchronous step needs.

  groups admitted ──► kept       another is admitted while kept + in flight < groups, up to the limit
                  └─► dropped    if the limit is reached: `on_shortfall`

Which groups a step admits does not depend on which of them ends first (docs/math.md, section 6).

consumes    the task source, by position
waits for   synchronous modes: groups in flight, while the step may have to replace one that is dropped;
            asynchronous modes: a free slot
produces    groups in the order of admission, one each time rollout asks
unblocked by rollout, which asks when it has a free query slot; `look_again`, which is called when a group ends
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from flexmarl.credit.filters import OutcomeFilter
from flexmarl.errors import EpisodeError
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupAdmitted
from flexmarl.orchestrator.crediting import Judged
from flexmarl.records import GroupId, GroupRecord, GroupState
from flexmarl.rollout.admission import Admission
from flexmarl.tasks import SourceExhausted, TaskSource


class Refill:
    """Counts the groups of one step, and says whether another is admitted for one that is dropped.

    Every admitted group is judged once.
    """

    def __init__(self, groups: int, settings: OutcomeFilter | None) -> None:
        """`groups` is P. If `settings` is None, nothing is filtered, and groups that fail are not replaced."""
        self.refills = settings is not None and settings.refill
        self.admitted = 0
        self.kept = 0
        self._judged = 0
        self._groups = groups
        self._target = groups
        """Number of groups to admit: P, and one more for each dropped group that can be replaced."""
        self._batches = settings.max_gen_batches if settings and settings.refill else 1
        self._limit = groups * self._batches
        self._on_shortfall = settings.on_shortfall if settings and settings.refill else "train_short"
        self._source_ended = ""
        self.in_order = self._on_shortfall == "unfiltered"
        """True if groups must be judged in the order of admission. The groups that are kept unfiltered are then the
        last dropped ones in that order, not those that ended last."""

    @property
    def dropped(self) -> int:
        """Number of groups that were judged and not kept."""
        return self._judged - self.kept

    @property
    def needs_another(self) -> bool:
        """True if a group must be admitted now."""
        return self.admitted < self._target

    @property
    def over(self) -> bool:
        """True if no more groups will be admitted, whether those in flight are kept or dropped."""
        return not self.needs_another and (self._target == self._limit or self._judged == self.admitted)

    @property
    def because(self) -> str:
        """Why the step admits no more groups."""
        if self.kept == self._groups:
            return f"{self.kept} groups are kept"
        limit = f"credit.filter.max_gen_batches={self._batches} times {self._groups} groups were generated"
        return f"{self.kept} of {self._groups} groups are kept: {self._source_ended or limit}"

    def admit(self) -> None:
        """Notes that a group was admitted."""
        self.admitted += 1

    def exhausted(self, because: str) -> bool:
        """Notes that there are no more tasks: the step trains on the groups that it has.

        Returns False, and changes nothing, if fewer than P groups were admitted.
        """
        if self.admitted < self._groups:
            return False
        self._source_ended, self._limit, self._target = because, self.admitted, self.admitted
        self._on_shortfall = "train_short"
        return True

    def keeps(self, judged: Judged) -> bool:
        """Decides whether a group is kept.

        Raises EpisodeError if the group is dropped, cannot be replaced, and `on_shortfall` is `error`.
        """
        if not judged.drop or self._target < self._limit:
            return not judged.drop
        if self._on_shortfall == "error":
            raise EpisodeError(
                f"a step of {self._groups} groups cannot be filled: {self.dropped + 1} of {self.admitted} that were "
                f"generated are dropped, the last one because: {judged.drop}. Choose tasks that are neither too easy "
                f"nor too hard, raise credit.filter.max_gen_batches={self._batches}, or use on_shortfall=train_short"
            )
        return self._on_shortfall == "unfiltered" and judged.trainable

    def judged(self, *, kept: bool) -> None:
        """Notes that a group was judged. If it was dropped and can be replaced, another one must be admitted."""
        self._judged += 1
        self.kept += kept
        if not kept and self._target < self._limit:
            self._target += 1


class Feed:
    """Draws tasks from the source, at the positions that admission gives."""

    def __init__(self, *, source: TaskSource, admission: Admission, groups: int, events: Events) -> None:
        self._source = source
        self._admission = admission
        self.num_groups = groups
        """P: number of groups in a step."""
        self._events = events
        self._changed = asyncio.Event()
        self._ended = False
        self.exhausted: SourceExhausted | None = None
        """The source's error when it has no new task; None before. A task may still be admitted again."""

    async def groups(self, step: int, refill: Refill) -> AsyncGenerator[GroupRecord, None]:
        """Yields the groups of one step, until `refill` is over.

        Raises SourceExhausted, naming the position, if a finite source ends before the step has `num_groups` groups.
        """
        while not refill.over:
            if not refill.needs_another:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                group = self._admit(step)
            except SourceExhausted as error:
                if not refill.exhausted(str(error)):
                    raise
            else:
                refill.admit()
                yield group

    async def endless(self, step: Callable[[], int]) -> AsyncGenerator[GroupRecord, None]:
        """Yields groups as slots become free; first those that were active when the run was saved.

        Ends after `end`, or when the source has ended and no task can be admitted again. `step` returns the current
        step.
        """
        for group in self._admission.active:
            if not self._ended:
                yield self._again(group, step())
        while not self._ended:
            if self._admission.may_admit().allowed:
                try:
                    group = self._admit(step())
                except SourceExhausted as error:
                    self.exhausted = error
                else:
                    yield group
                    continue
            if self.exhausted and not self._may_come_again():
                return
            await self._changed.wait()
            self._changed.clear()

    def look_again(self) -> None:
        """Wakes the feed: a group has ended, or its task will not be admitted again."""
        self._changed.set()

    def end(self) -> None:
        """Ends `endless`: no more groups are admitted."""
        self._ended = True
        self._changed.set()

    def _admit(self, step: int) -> GroupRecord:
        task = self._source.train(self._admission.next_position)
        verdict = self._admission.may_admit()
        group = self._admission.admit()
        self._events.emit(GroupAdmitted(group=group, step=step, task=task.input_id, because=verdict.because))
        return GroupRecord(group=group, task=task, step=step)

    def _again(self, group: GroupId, step: int) -> GroupRecord:
        task = self._source.train(self._admission.position(group))
        because = "it was active when the run was saved"
        self._events.emit(GroupAdmitted(group=group, step=step, task=task.input_id, because=because))
        return GroupRecord(group=group, task=task, step=step, attempt=self._admission.attempt(group))

    def _may_come_again(self) -> bool:
        """True if an active group is WAITING or RUNNING: it may become late, and its task be admitted again."""
        admission = self._admission
        return any(admission.state(group) in (GroupState.WAITING, GroupState.RUNNING) for group in admission.active)
