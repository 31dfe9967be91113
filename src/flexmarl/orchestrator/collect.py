"""Runs collection: finished groups become the READY rows and the divisors of a batch.

  finished group ──► judge ──► keep until its release ──► credit ──► READY, counted in the divisors
                     └──► drop: FILTERED, and the step     └─────► FILTERED, if no row has weight
                          may need another group (feed.py)

`Collector` takes groups that were judged before, in the asynchronous modes; `StepCollector` those of a synchronous
step, or its episodes, if their rows can be released alone. Those that come while the store writes go together.

consumes    finished groups
waits for   the store; or for older groups (deterministic); or for the end of the batch (`sync`, batch-wide credit)
produces    READY rows for the training sessions, and each policy's divisors
unblocked by the next finished group, or the end of the batch

With streaming credit (docs/math.md, Streaming credit) rows are trained before their group is complete:

  episode ends ──► score of each row ──► READY ──► two gradient sums per credit group
  group ends   ──► credit ──► advantages into the rows, a line for the sums
              └──► drop   ──► rows FILTERED, sums dropped
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from flexmarl.credit.rows import NO_WEIGHT, group_name
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupReady
from flexmarl.orchestrator.crediting import MAX_TOGETHER, Credited, Crediting, Judged
from flexmarl.orchestrator.feed import Refill
from flexmarl.orchestrator.publish import Versions
from flexmarl.records import (
    CreditedTurn,
    CreditLine,
    Divisors,
    Episode,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    SampleId,
)
from flexmarl.rollout.admission import Admission
from flexmarl.training.aggregation import divisors_of
from flexmarl.training.session import TrainingSession


class Collector:
    """Collects one batch after another; between `open` and `close` it owns the batch's groups and divisors."""

    def __init__(self, *, crediting: Crediting, admission: Admission, versions: Versions, events: Events) -> None:
        self._crediting, self._admission, self._versions, self._events = crediting, admission, versions, events
        self._compared: list[GroupRecord] = []
        """Groups that wait for the end of the batch, to be credited together."""
        self._samples: dict[GroupId, dict[PolicyName, int]] = {}
        """Number of samples of each group that has some, by policy."""
        self._divisors: dict[PolicyName, Divisors] = {}

    @property
    def batch_wide(self) -> bool:
        """True if groups are credited when the batch is closed. `kept` is empty until then."""
        return self._crediting.batch_wide

    def open(self, step: int = 0) -> None:
        """Begins the batch of a step."""
        self._crediting.begin(step)
        self._samples = {}
        self._divisors = {policy: Divisors() for policy in self._crediting.trained}

    async def take(self, group: GroupRecord) -> None:
        """Takes a group that the filter kept. Checks that no token is older than the mode allows (law 3)."""
        turns = (turn for episode in group.finished for turn in episode.turns)
        self._versions.check(turns, max_staleness=self._admission.max_staleness)
        await self._collect([group])

    async def close(self) -> Mapping[PolicyName, Divisors]:
        """Ends the collection of the batch. Returns its divisors, for each trained policy."""
        compared, self._compared = self._compared, []
        if compared:
            await self._release([compared])
        self._crediting.end_batch()
        return self._divisors

    @property
    def resting(self) -> Mapping[PolicyName, str]:
        """The policies that are not trained in this batch, and why."""
        return self._crediting.resting

    @property
    def kept(self) -> Sequence[GroupId]:
        """Groups of this batch that have samples."""
        return list(self._samples)

    def settle_trained(self, groups: Sequence[GroupId]) -> Sequence[GroupId]:
        """Ends the kept groups of a batch as TRAINED, after its update. The next batch may be open already."""
        for group in groups:
            self._admission.move(group, GroupState.TRAINED)
        return groups

    async def _collect(self, groups: Sequence[GroupRecord]) -> None:
        if self.batch_wide:
            self._compared += groups
        else:
            await self._release([[group] for group in groups])

    async def _release(self, compared: Sequence[Sequence[GroupRecord]]) -> None:
        self._count(await self._crediting.release(compared))
        self._end([group for groups in compared for group in groups])

    def _count(self, released: Sequence[Credited]) -> None:
        for credited in released:
            for policy, samples in credited.samples.items():
                self._divisors[policy] += divisors_of(samples)
                counts = self._samples.setdefault(credited.group, {})
                counts[policy] = counts.get(policy, 0) + len(samples)

    def _end(self, groups: Sequence[GroupRecord]) -> None:
        """Reports each group as ready, or ends it as FILTERED, after all of it was credited."""
        for group in groups:
            if samples := self._samples.get(group.group):
                because = "all its episodes are terminal"
                self._events.emit(GroupReady(group=group.group, samples=samples, because=because))
            else:
                self._crediting.filtered(group.group, "no row has weight")


class Release(StrEnum):
    """The moment when rows of a synchronous step become READY."""

    BY_EPISODE = "by_episode"
    """An episode's rows, as soon as it has finished. Needs credit that no other episode can change."""
    AT_ONCE = "at_once"
    """A group's rows, as soon as it has finished."""
    IN_ORDER = "in_order"
    """A group's rows, when all older groups of the step have finished too: every run has the same micro-batches."""
    AT_END = "at_end"
    """All rows, when the step's rollout has ended."""


class StepCollector(Collector):
    """Collects the groups of synchronous steps, as they finish or fail. A step's groups are admitted after `open`."""

    def __init__(
        self,
        *,
        crediting: Crediting,
        admission: Admission,
        versions: Versions,
        events: Events,
        release: Release,
        streaming: "Streaming | None" = None,
    ) -> None:
        """With `streaming`, rows become READY at the end of their episode, whatever `release` is."""
        super().__init__(crediting=crediting, admission=admission, versions=versions, events=events)
        self._rule = Release.AT_END if crediting.batch_wide else release
        self._streaming = streaming
        self._turn = asyncio.Lock()
        """Held while groups or episodes are judged and written, so that none overtakes another while the store writes.
        The next holder takes all that came until then, up to `MAX_TOGETHER`. An error of its ends the step."""
        self._ended: list[GroupRecord] = []
        """Episodes that wait to be taken, each with its group, of which it is the only one here."""
        self._played: list[GroupRecord] = []
        """Groups that wait to be taken."""
        self._came: dict[GroupId, GroupRecord] = {}
        """Finished groups that are not judged yet, because older ones must be judged first."""
        self._judged: dict[GroupId, GroupRecord | None] = {}
        """Groups that are judged and not released; None in place of a group that failed or was dropped."""
        self.open()

    def open(self, step: int = 0) -> None:
        """Begins the batch of a step: the groups admitted from now on belong to it."""
        super().open(step)
        self._to_judge = self._to_release = GroupId(self._admission.next_group)
        self.refill = Refill(self._admission.law.groups, self._crediting.filter)
        """Decides whether the batch needs another group."""

    async def take_episode(self, group: GroupRecord, episode: Episode) -> None:
        """Takes a finished episode of a group that still plays. The whole group comes later, in `take`."""
        if self._rule is not Release.BY_EPISODE and self._streaming is None:
            return
        self._versions.check(episode.turns, max_staleness=self._admission.max_staleness)
        self._ended.append(replace(group, episodes=(episode,)))
        async with self._turn:
            ended, self._ended = self._ended[:MAX_TOGETHER], self._ended[MAX_TOGETHER:]
            if self._streaming:
                await self._streaming.take_episodes(ended)
            else:
                self._count(await self._crediting.release([[part] for part in ended]))

    async def take(self, group: GroupRecord) -> None:
        """Takes a group of this step that has finished playing, or has failed. Checks law 3, greedy plays included.

        Raises EpisodeError if the step cannot be filled.
        """
        turns = (turn for episode in group.plays for turn in episode.turns)
        self._versions.check(turns, max_staleness=self._admission.max_staleness)
        self._played.append(group)
        async with self._turn:
            played, self._played = self._played[:MAX_TOGETHER], self._played[MAX_TOGETHER:]
            for came in played:
                for due in self._due(came):
                    await self._judge(due)
            await self._release_due()

    async def close(self) -> Mapping[PolicyName, Divisors]:
        """Ends the collection of the batch: all its groups have come. Returns its divisors, for each trained policy."""
        await self._let_go(sorted(self._judged))
        return await super().close()

    def _due(self, group: GroupRecord) -> Iterator[GroupRecord]:
        """The groups to judge now that this one has come."""
        if not self.refill.in_order:
            yield group
            return
        self._came[group.group] = group
        while self._to_judge in self._came:
            self._to_judge = GroupId(self._to_judge + 1)
            yield self._came.pop(GroupId(self._to_judge - 1))

    async def _judge(self, group: GroupRecord) -> None:
        """Decides whether the group is trained on. If not, its slot is freed, and another one may be admitted."""
        judged = Judged("it failed")
        if group.finished:
            by_episode = self._rule is Release.BY_EPISODE  # Then no filter judges it: its rows are READY already.
            judged = Judged("") if by_episode else self._crediting.judge(group)
        kept = self.refill.keeps(judged)
        if group.finished and not kept:
            await (self._streaming or self._crediting).drop(group, judged)
        self.refill.judged(kept=kept)
        self._judged[group.group] = group if kept else None

    async def _release_due(self) -> None:
        """Releases the judged groups that the rule lets go now."""
        if self._rule is Release.IN_ORDER:
            first = self._to_release
            while self._to_release in self._judged:
                self._to_release = GroupId(self._to_release + 1)
            await self._let_go([GroupId(number) for number in range(first, self._to_release)])
        elif self._rule is not Release.AT_END:
            await self._let_go(list(self._judged))

    async def _let_go(self, judged: Sequence[GroupId]) -> None:
        await self._collect([group for number in judged if (group := self._judged.pop(number))])

    async def _release(self, compared: Sequence[Sequence[GroupRecord]]) -> None:
        groups = [group for some in compared for group in some]
        if self._rule is Release.BY_EPISODE:
            self._end(groups)
        elif self._streaming:
            self._count([await self._streaming.credit(group) for group in groups])
            self._end(groups)
        else:
            await super()._release(compared)


@dataclass(slots=True)
class _Open:
    """The rows of one group that were made READY before it was complete."""

    rows: dict[str, dict[PolicyName, list[SampleId]]] = field(default_factory=lambda: defaultdict(dict))
    """Ids of the rows, by name of their credit group and by policy."""
    scores: dict[SampleId, float] = field(default_factory=dict)


class Streaming:
    """Makes rows READY with a score, and closes their credit groups when their group is complete."""

    def __init__(self, crediting: Crediting, sessions: Mapping[PolicyName, TrainingSession]) -> None:
        """`sessions` train the rows, by policy."""
        self._crediting = crediting
        self._sessions = sessions
        self._open: dict[GroupId, _Open] = defaultdict(_Open)

    async def take_episodes(self, parts: Sequence[GroupRecord]) -> None:
        """Makes the rows of finished episodes READY, each with a score in place of an advantage.

        Each part is a group with one of its episodes.
        """
        samples: list[CreditedTurn] = []
        for part in parts:
            places, opened = self._crediting.open_places(part), self._open[part.group]
            for turn in part.episodes[0].turns:
                if turn.sample_id not in places:
                    continue
                credit_group, score = places[turn.sample_id]
                name = f"{part.group}: {group_name(credit_group)}"
                samples.append(CreditedTurn(turn=turn, advantage=score, open_group=name))
                opened.rows[name].setdefault(turn.policy, []).append(turn.sample_id)
                opened.scores[turn.sample_id] = score
        await self._crediting.make_ready(samples)

    async def drop(self, group: GroupRecord, judged: Judged) -> None:
        """Ends a complete group and its rows as FILTERED, also the rows that were accumulated already."""
        opened = self._open.pop(group.group, _Open())
        for name in opened.rows:
            await self._close(name, opened, None, judged.drop)
        await self._crediting.drop(group, judged, but=opened.scores)

    async def credit(self, group: GroupRecord) -> Credited:
        """Credits a complete group: writes the credit into its rows, and sends the credit lines to the sessions."""
        opened = self._open.pop(group.group, _Open())
        (credited,) = await self._crediting.credit([[group]], opened=opened.scores)
        samples = {sample.turn.sample_id: sample for of in credited.samples.values() for sample in of}
        lines = {f"{group.group}: {group_name(g)}": line for g, line in self._crediting.lines(group).items()}
        await self._crediting.put_credit(list(samples.values()))
        for name in opened.rows:
            line = lines[name]
            await self._close(name, opened, line if line.weight else None, NO_WEIGHT)
        return credited

    async def _close(self, name: str, opened: _Open, line: CreditLine | None, because: str) -> None:
        for policy, ids in opened.rows[name].items():
            await self._sessions[policy].close_group(name, ids, line, because)
