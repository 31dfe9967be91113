"""Runs collection: finished groups become the READY rows and the divisors of a batch.

  finished group ──► judge ──► keep until its release ──► credit ──► READY
                     └──► drop: FILTERED, and the step may need another group (refill.py)

consumes    finished groups, in any order; also single episodes, if rows can be released before their group ends
waits for   nothing; or for older groups (deterministic); or for the end of the batch (`sync`, batch-wide credit)
produces    READY rows for the training sessions, and each policy's divisors
unblocked by the next finished group, or the end of the batch
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupReady
from flexmarl.orchestrator.crediting import Credited, Crediting, Judged
from flexmarl.orchestrator.refill import Refill
from flexmarl.orchestrator.streaming import Streaming
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import Divisors, Episode, GroupId, GroupRecord, GroupState, PolicyName
from flexmarl.rollout.admission import Admission
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.session import TrainingSession


class Release(StrEnum):
    """The moment when rows become READY."""

    BY_EPISODE = "by_episode"
    """An episode's rows, as soon as it has finished. Needs credit that no other episode can change."""
    AT_ONCE = "at_once"
    """A group's rows, as soon as it has finished."""
    IN_ORDER = "in_order"
    """A group's rows, when all older groups of the step have finished too: every run has the same micro-batches."""
    AT_END = "at_end"
    """All rows, when the step's rollout has ended."""


Ready = Callable[[PolicyName], None]
"""Called when rows of a policy became READY."""


class Collector:
    """Collects one batch after another; between `open` and `close` it owns the batch's groups and divisors."""

    def __init__(
        self,
        *,
        crediting: Crediting,
        admission: Admission,
        versions: Versions,
        release: Release,
        on_ready: Ready,
        events: Events,
    ) -> None:
        self._crediting = crediting
        self._admission = admission
        self._versions = versions
        self._release = Release.AT_END if crediting.batch_wide else release
        self._on_ready = on_ready
        self._events = events
        self._streaming: Streaming | None = None
        self._turn = asyncio.Lock()
        self._came: dict[GroupId, GroupRecord] = {}
        """Finished groups that are not judged yet, because older ones must be judged first."""
        self._kept: dict[GroupId, GroupRecord | None] = {}
        """Groups that are judged and not released; None in place of a group that failed or was dropped."""
        self._to_judge = self._to_release = GroupId(admission.next_group)
        """The next group to judge, and the next to release, where the order of admission counts."""
        self.refill = Refill(admission.law.groups, crediting.filter)
        """Decides whether the batch needs another group, in the synchronous modes."""
        self._samples: dict[GroupId, dict[PolicyName, int]] = {}
        """Number of samples of each group that has some, by policy."""
        self._divisors: dict[PolicyName, Divisors] = {}

    def open(self) -> None:
        """Begins a batch: in the synchronous modes the groups admitted from now on belong to it."""
        self._to_judge = self._to_release = GroupId(self._admission.next_group)
        self.refill = Refill(self._admission.law.groups, self._crediting.filter)
        self._samples = {}
        self._divisors = {policy: Divisors() for policy in self._crediting.trained}

    def stream_to(self, sessions: Mapping[PolicyName, TrainingSession]) -> None:
        """Switches to streaming credit, for good: rows become READY at the end of their episode.

        `sessions` then receive the credit line of each group when it is complete.
        """
        self._streaming = Streaming(self._crediting, sessions)

    async def take_episode(self, group: GroupRecord, episode: Episode) -> None:
        """Takes a finished episode of a group that still plays. The whole group comes later, in `take`."""
        if self._release is not Release.BY_EPISODE and self._streaming is None:
            return
        self._versions.check(episode.turns, max_staleness=0)
        async with self._turn:
            if self._streaming is None:
                await self._pass_on([replace(group, episodes=(episode,))])
            else:
                for policy in await self._streaming.take_episode(group, episode):
                    self._on_ready(policy)

    async def take(self, group: GroupRecord) -> Sequence[Judged]:
        """Takes a group of this step that has finished playing, or has failed. Checks law 3.

        Returns the verdicts on the groups that could be judged now. Raises EpisodeError if the step cannot be filled.
        """
        self._versions.check((turn for episode in group.plays for turn in episode.turns), max_staleness=0)
        async with self._turn:  # One group at a time: the next one must not overtake it while the store writes.
            judged = [await self._judge(due) for due in self._due(group)]
            await self._release_kept()
        return judged

    async def add(self, groups: Sequence[GroupRecord], *, max_staleness: int | None) -> None:
        """Adds groups that the filter kept. Their tokens must be at most `max_staleness` versions old (law 3)."""
        self._versions.check(
            (turn for group in groups for episode in group.finished for turn in episode.turns),
            max_staleness=max_staleness,
        )
        await self._pass_on(groups)
        self._end(groups)

    async def close(self) -> Mapping[PolicyName, Divisors]:
        """Ends the collection of the batch. Returns its divisors, for each trained policy."""
        kept = [group for _, group in sorted(self._kept.items()) if group]
        self._kept = {}
        for compared in [kept] if self._crediting.batch_wide and kept else [[group] for group in kept]:
            await self._collect(compared)
        self._crediting.end_batch()
        return self._divisors

    @property
    def kept(self) -> Sequence[GroupId]:
        """Groups of this batch that have samples."""
        return list(self._samples)

    def settle_trained(self, groups: Sequence[GroupId]) -> Sequence[GroupId]:
        """Ends the kept groups of a batch as TRAINED, after its update. The next batch may be open already."""
        for group in groups:
            self._admission.move(group, GroupState.TRAINED)
        return groups

    def _due(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """The groups to judge now that this one has come."""
        if not self.refill.in_order:
            yield group
            return
        self._came[group.group] = group
        while self._to_judge in self._came:
            self._to_judge = GroupId(self._to_judge + 1)
            yield self._came.pop(GroupId(self._to_judge - 1))

    async def _judge(self, group: GroupRecord) -> Judged:
        """Decides whether the group is trained on. If not, its slot is freed, and another one may be admitted."""
        judged = Judged("it failed")
        if group.finished:
            by_episode = self._release is Release.BY_EPISODE  # Then no filter judges it: its rows are READY already.
            judged = Judged("") if by_episode else self._crediting.judge(group)
        kept = self.refill.keeps(judged)
        if group.finished and not kept:
            await (self._streaming or self._crediting).drop(group, judged.drop)
        self.refill.judged(kept=kept)
        self._kept[group.group] = group if kept else None
        return judged

    async def _release_kept(self) -> None:
        """Credits and releases the kept groups that `_release` lets go now."""
        if self._release is Release.IN_ORDER:
            while self._to_release in self._kept:
                group = self._kept.pop(self._to_release)
                self._to_release = GroupId(self._to_release + 1)
                await self._collect([group] if group else [])
        elif self._release is not Release.AT_END:
            kept, self._kept = self._kept, {}
            for group in kept.values():
                await self._collect([group] if group else [])

    async def _collect(self, groups: Sequence[GroupRecord]) -> None:
        """Credits the groups and makes their rows READY, unless that was done episode by episode."""
        if groups and self._release is not Release.BY_EPISODE:
            await self._pass_on(groups)
        self._end(groups)

    async def _pass_on(self, groups: Sequence[GroupRecord]) -> None:
        if self._streaming:
            for group in groups:
                self._count(await self._streaming.credit(group))
            return
        for credited in await self._crediting.credit(groups):
            for policy, samples in credited.samples.items():
                await self._crediting.make_ready(samples)
                self._on_ready(policy)
            self._count(credited)

    def _count(self, credited: Credited) -> None:
        for policy, samples in credited.samples.items():
            self._divisors[policy] += divisors_of(samples)
            counts = self._samples.setdefault(credited.group, {})
            counts[policy] = counts.get(policy, 0) + len(samples)

    def _end(self, groups: Sequence[GroupRecord]) -> None:
        """Reports each group as ready, or ends it as FILTERED, after all of it was credited."""
        for group in groups:
            if group.group in self._samples:
                self._events.emit(
                    GroupReady(
                        group=group.group, samples=self._samples[group.group], because="all its episodes are terminal"
                    )
                )
            elif group.finished:
                self._crediting.filtered(group.group, "no row has weight")
