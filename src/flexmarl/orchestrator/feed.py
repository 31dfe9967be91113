"""Runs the feed: tasks become admitted groups.

consumes    the task source, by position
waits for   synchronous: groups in flight, as long as the step may need another for one that is dropped;
            else for a free slot
produces    groups in the order of admission, one when rollout asks for it
unblocked by rollout, which asks when it has a free query slot; and by `look_again`, told by whoever ends a group
"""

import asyncio
from collections.abc import AsyncGenerator, Callable

from flexmarl.events.group_events import GroupAdmitted
from flexmarl.events.hub import Events
from flexmarl.orchestrator.refill import Refill
from flexmarl.records import GroupId, GroupRecord, GroupState
from flexmarl.rollout.admission import Admission
from flexmarl.tasks import SourceExhausted, TaskSource


class Feed:
    """Draws tasks; admission says at which position."""

    def __init__(self, *, source: TaskSource, admission: Admission, groups: int, events: Events) -> None:
        self._source = source
        self._admission = admission
        self.num_groups = groups
        """Groups per step."""
        self._events = events
        self._changed = asyncio.Event()
        self._ended = False
        self.exhausted: SourceExhausted | None = None
        """Why no new task will come; one that is admitted again may."""

    async def groups(self, step: int, refill: Refill) -> AsyncGenerator[GroupRecord, None]:
        """The groups of one step, until `refill` is over.

        Raises SourceExhausted, naming the position, when a finite source ends before there is one batch of them.
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
        """Groups as slots become free, first those that were active when the run was saved.

        Ends after `end`, and when the source has ended and no task can come again; `step` is the one being made.
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
        """A group has ended, or will never be played again."""
        self._changed.set()

    def end(self) -> None:
        """No more groups."""
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
        """Whether a group still plays: it may be late, and its task admitted again."""
        admission = self._admission
        return any(admission.state(group) in (GroupState.WAITING, GroupState.RUNNING) for group in admission.active)
