"""Runs the feed: tasks become admitted groups.

consumes    the task source, by position
waits for   nothing: all groups of the step before have ended, so each of the step finds a free slot
produces    groups in the order of admission, one when rollout asks for it
unblocked by rollout, which asks when it has a free query slot
"""

from collections.abc import AsyncIterator

from flexmarl.observability.journal import Journal
from flexmarl.records import GroupRecord
from flexmarl.rollout.admission import Admission
from flexmarl.tasks import TaskSource


class Feed:
    """Draws tasks; the position in the source is the id of the next group."""

    def __init__(self, *, source: TaskSource, admission: Admission, groups: int, journal: Journal) -> None:
        self._source = source
        self._admission = admission
        self.num_groups = groups
        """Groups per step."""
        self._journal = journal

    async def groups(self, step: int) -> AsyncIterator[GroupRecord]:
        """The groups of one step. Raises SourceExhausted, naming the position, when a finite source ends."""
        for _ in range(self.num_groups):
            task = self._source.train(self._admission.next_group)
            verdict = self._admission.may_admit()
            group = self._admission.admit()
            self._journal.event("group_admitted", group=group, step=step, task=task.input_id, because=verdict.because)
            yield GroupRecord(group=group, task=task, step=step)
