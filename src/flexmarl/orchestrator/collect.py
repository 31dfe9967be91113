"""Runs collection: finished groups become the READY rows and the divisors of a batch.

consumes    finished groups, in any order; single episodes, where credit looks at nothing else
waits for   nothing; or for older groups (deterministic); or for the end of the batch (`sync`, batch-wide credit)
produces    READY rows for the training sessions, and each policy's divisors
unblocked by the next finished group, or the end of the batch
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum

from flexmarl.experience.divisors import divisors_of
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.crediting import Credited, Crediting
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import Divisors, Episode, GroupId, GroupRecord, GroupState, PolicyName
from flexmarl.rollout.admission import Admission


class Release(StrEnum):
    """When the samples of a finished group become ready."""

    BY_EPISODE = "by_episode"
    """Those of an episode as soon as it has finished: no other episode can change its credit."""
    AT_ONCE = "at_once"
    IN_ORDER = "in_order"
    """When all older groups of the step have come too: the same micro-batches in every run."""
    AT_END = "at_end"
    """When the step's rollout has ended."""


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
        journal: Journal,
    ) -> None:
        self._crediting = crediting
        self._admission = admission
        self._versions = versions
        self._release = Release.AT_END if crediting.batch_wide else release
        self._on_ready = on_ready
        self._journal = journal
        self._turn = asyncio.Lock()
        self._held: dict[GroupId, GroupRecord] = {}
        self._next = GroupId(admission.next_group)
        self._samples: dict[GroupId, dict[PolicyName, int]] = {}
        """How many samples each kept group has."""
        self._divisors: dict[PolicyName, Divisors] = {}

    def open(self) -> None:
        """Begins a batch: in the synchronous modes the groups admitted from now on belong to it."""
        self._next = GroupId(self._admission.next_group)
        self._samples = {}
        self._divisors = {policy: Divisors() for policy in self._crediting.trained}

    async def take_episode(self, group: GroupRecord, episode: Episode) -> None:
        """Takes a finished episode of a group that still plays. Its group comes later, in `take`."""
        if self._release is Release.BY_EPISODE:
            self._versions.check(episode.turns, max_staleness=0)
            async with self._turn:
                await self._pass_on([replace(group, episodes=(episode,))])

    async def take(self, group: GroupRecord) -> None:
        """Takes a group of this step when it has finished playing, failed ones too (law 3 is checked)."""
        self._versions.check((turn for episode in group.plays for turn in episode.turns), max_staleness=0)
        self._held[group.group] = group
        async with self._turn:  # One group at a time: while the store writes, the next one must not overtake.
            if self._release is Release.AT_ONCE:
                await self._collect([self._held.pop(group.group)])
            elif self._release is Release.BY_EPISODE:
                self._end([self._held.pop(group.group)])
            elif self._release is Release.IN_ORDER:
                while self._next in self._held:
                    ready = self._held.pop(self._next)
                    self._next = GroupId(self._next + 1)
                    await self._collect([ready])

    async def add(self, groups: Sequence[GroupRecord], *, max_staleness: int | None) -> None:
        """Adds groups that the filter has kept, sampled at most `max_staleness` versions ago (law 3)."""
        self._versions.check(
            (turn for group in groups for episode in group.finished for turn in episode.turns),
            max_staleness=max_staleness,
        )
        await self._pass_on(groups)
        self._end(groups)

    async def close(self) -> Mapping[PolicyName, Divisors]:
        """Ends the batch's collection; the divisors of every trained policy's batch."""
        held, self._held = [self._held[group] for group in sorted(self._held)], {}
        if held:
            await self._collect(held)
        return self._divisors

    @property
    def kept(self) -> Sequence[GroupId]:
        """Groups of this batch that have samples."""
        return list(self._samples)

    def settle_trained(self, groups: Sequence[GroupId]) -> Sequence[GroupId]:
        """What a batch kept, and is in an update now, ends as TRAINED; the next batch may be open already."""
        for group in groups:
            self._admission.move(group, GroupState.TRAINED)
        return groups

    async def _collect(self, groups: Sequence[GroupRecord]) -> None:
        """Filter, credit, READY. Groups are judged one by one, so what came together makes no difference."""
        kept = [group for group in groups if group.finished and await self._crediting.keeps(group)]
        for compared in [kept] if self._crediting.batch_wide and kept else [[group] for group in kept]:
            await self._pass_on(compared)
            self._end(compared)

    async def _pass_on(self, groups: Sequence[GroupRecord]) -> None:
        for credited in await self._crediting.credit(groups):
            await self._make_ready(credited)

    async def _make_ready(self, credited: Credited) -> None:
        for policy, samples in credited.samples.items():
            await self._crediting.make_ready(samples)
            self._divisors[policy] += divisors_of(samples)
            counts = self._samples.setdefault(credited.group, {})
            counts[policy] = counts.get(policy, 0) + len(samples)
            self._on_ready(policy)

    def _end(self, groups: Sequence[GroupRecord]) -> None:
        """Says of each group what became of it, now that all of it was passed on."""
        for group in groups:
            if group.group in self._samples:
                self._journal.event(
                    "group_ready",
                    group=group.group,
                    samples=self._samples[group.group],
                    because="all its episodes are terminal",
                )
            elif group.finished:
                self._crediting.filtered(group.group, "no row has weight")
