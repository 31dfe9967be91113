"""Runs the feed: tasks become admitted groups.

consumes    the task source, by position
waits for   synchronous modes: groups in flight, while the step may have to replace one that is dropped;
            asynchronous modes: a free slot
produces    groups in the order of admission, one each time rollout asks
unblocked by rollout, which asks when it has a free query slot; `look_again`, which is called when a group ends
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupAdmitted
from flexmarl.orchestrator.refill import Refill
from flexmarl.records import GroupId, GroupRecord, GroupState
from flexmarl.rollout.admission import Admission
from flexmarl.tasks import SourceExhausted, TaskSource


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
