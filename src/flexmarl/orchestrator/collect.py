"""Runs collection: finished groups become samples with credit.

consumes    finished groups, in any order
waits for   nothing; or for older groups (deterministic); or for the end of rollout (`sync`, batch-wide credit)
produces    READY rows for the training sessions, and each policy's divisors
unblocked by the next finished group, or the end of rollout
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum

from flexmarl.credit import Credit, CreditRow, CreditSettings, credit_rows
from flexmarl.experience.divisors import divisors_of
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.rows import credit_row
from flexmarl.observability.journal import Journal
from flexmarl.orchestrator.versions import Versions
from flexmarl.records import (
    AgentName,
    Divisors,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    RowState,
    Sample,
    SampleId,
)
from flexmarl.rollout.admission import Admission


class Release(StrEnum):
    """When the samples of a finished group become ready."""

    AT_ONCE = "at_once"
    IN_ORDER = "in_order"
    """When all older groups of the step have come too: the same micro-batches in every run."""
    AT_END = "at_end"
    """When the step's rollout has ended."""


Ready = Callable[[PolicyName], None]
"""Called when rows of a policy became READY."""


class Collector:
    """Collects one step after another; between `open` and `close` it owns the step's groups and divisors."""

    def __init__(
        self,
        *,
        store: ExperienceStore,
        credit: CreditSettings,
        trained: Collection[PolicyName],
        admission: Admission,
        versions: Versions,
        release: Release,
        on_ready: Ready,
        journal: Journal,
    ) -> None:
        self._store = store
        self._credit = credit
        self._trained = frozenset(trained)
        self._admission = admission
        self._versions = versions
        self._batch_wide = credit.estimator.needs not in ("row", "group")
        self._release = Release.AT_END if self._batch_wide else release
        self._on_ready = on_ready
        self._journal = journal
        self._turn = asyncio.Lock()
        self._held: dict[GroupId, GroupRecord] = {}
        self._next = GroupId(admission.next_group)
        self._kept: list[GroupId] = []
        self._divisors: dict[PolicyName, Divisors] = {}

    def open(self) -> None:
        """Begins a step: the groups admitted from now on belong to it."""
        self._next = GroupId(self._admission.next_group)
        self._kept = []
        self._divisors = {policy: Divisors() for policy in self._trained}

    async def take(self, group: GroupRecord) -> None:
        """Takes a finished group. Every token must have been sampled at the step's version (law 3)."""
        self._versions.check_strict(turn for episode in group.episodes for turn in episode.turns)
        self._held[group.group] = group
        async with self._turn:  # One group at a time: while the store writes, the next one must not overtake.
            if self._release is Release.AT_ONCE:
                await self._pass_on([self._held.pop(group.group)])
            elif self._release is Release.IN_ORDER:
                while self._next in self._held:
                    ready = self._held.pop(self._next)
                    self._next = GroupId(self._next + 1)
                    await self._pass_on([ready])

    async def close(self) -> Mapping[PolicyName, Divisors]:
        """Ends the step's collection; the divisors of every trained policy's global batch."""
        held, self._held = [self._held[group] for group in sorted(self._held)], {}
        if held:
            await self._pass_on(held)
        return self._divisors

    def settle_trained(self) -> Sequence[GroupId]:
        """The step's groups that went into the update end as TRAINED."""
        for group in self._kept:
            self._admission.move(group, GroupState.TRAINED)
        return self._kept

    async def _pass_on(self, groups: Sequence[GroupRecord]) -> None:
        """Filter, credit, READY. Groups are judged one by one, so what came together makes no difference."""
        kept: list[tuple[GroupRecord, Sequence[CreditRow]]] = []
        for group in groups:
            if group.finished:
                rows = credit_rows(group, self._trained)
                because = self._reason_to_drop(rows)
                if because:
                    await self._drop(group, because)
                else:
                    kept.append((group, rows))
        estimator = self._credit.estimator
        for compared in [kept] if self._batch_wide and kept else [[one] for one in kept]:
            credit = estimator.estimate([row for _, rows in compared for row in rows])
            self._journal.event(
                "credited",
                groups=[group.group for group, _ in compared],
                report=credit.report,
                because=f"{type(estimator).__name__} compares a {estimator.needs} at a time",
            )
            for group, _ in compared:
                await self._settle(group, credit)

    def _reason_to_drop(self, rows: Sequence[CreditRow]) -> str:
        if not rows:
            return "no turn of a trained policy"
        if self._credit.filter is None:
            return ""
        (decision,) = self._credit.filter.decide(rows, key=self._credit.estimator.key)
        return "" if decision.kept else f"{decision.reason}: {decision.because}"

    async def _drop(self, group: GroupRecord, because: str) -> None:
        ids = [turn.sample_id for episode in group.finished for turn in episode.turns]
        await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
        self._admission.move(group.group, GroupState.FILTERED)
        self._journal.event("group_filtered", group=group.group, because=because)

    async def _settle(self, group: GroupRecord, credit: Credit) -> None:
        samples, left_out = samples_of(group, credit)
        for because, ids in left_out.items():
            await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
        for policy, ready in samples.items():
            await self._store_credit(ready)
            self._divisors[policy] += divisors_of(ready)
            self._on_ready(policy)
        if samples:
            self._kept.append(group.group)
        else:
            self._admission.move(group.group, GroupState.FILTERED)
        self._journal.event(
            "group_ready" if samples else "group_filtered",
            group=group.group,
            samples={policy: len(ready) for policy, ready in samples.items()},
            because="all its episodes are terminal" if samples else "no row has weight",
        )

    async def _store_credit(self, samples: Sequence[Sample]) -> None:
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for sample in samples:
            turn = sample.turn
            rows[turn.agent].append(credit_row(sample))
        for agent, partial in rows.items():
            await self._store.put(agent, partial)
        await self._store.settle([sample.turn.sample_id for sample in samples], Outcome(state=RowState.READY))


def samples_of(
    group: GroupRecord, credit: Credit
) -> tuple[Mapping[PolicyName, Sequence[Sample]], Mapping[str, Sequence[SampleId]]]:
    """The group's turns as training sees them, by policy; and those it does not see, by reason."""
    samples: dict[PolicyName, list[Sample]] = defaultdict(list)
    left_out: dict[str, list[SampleId]] = defaultdict(list)
    for episode in group.finished:
        weights = {turn.sample_id: credit.weights.get(turn.sample_id) for turn in episode.turns}
        tokens: dict[PolicyName, float] = defaultdict(float)
        for turn in episode.turns:
            tokens[turn.policy] += (weights[turn.sample_id] or 0.0) * len(turn.response_ids)
        for turn in episode.turns:
            weight, reward = weights[turn.sample_id], episode.rewards[turn.sample_id]
            if weight is None:
                left_out["not a trained policy's turn"].append(turn.sample_id)
            elif not weight or reward is None:
                left_out["weight 0: nothing was sampled, or there is nothing to compare with"].append(turn.sample_id)
            else:
                sample = Sample(
                    turn=turn,
                    advantage=credit.advantages[turn.sample_id],
                    weight=weight,
                    reward=reward,
                    episode_tokens=tokens[turn.policy],
                )
                samples[turn.policy].append(sample)
    return samples, left_out
