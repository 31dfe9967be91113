"""Runs crediting: finished groups are filtered, and their turns become samples with an advantage.

  finished group ──► judge ──► appraise ──► credit ──► samples of each policy ──► make_ready
                     │ drop                 │ no weight                           rows READY
                     └──────────────────────┴──► FILTERED, slot free

consumes    finished groups; trainers that are asked read the turns themselves
waits for   the store; trainers, all asked at the same time, if credit needs critic values or the divergence from the
            reference policy
produces    samples; rows that end FILTERED, with the reason; at the end of a batch, the next one's KL coefficients
unblocked by the store and the trainers
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import fsum

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit import CreditRow, CreditSettings, credit_rows
from flexmarl.credit.filters import Effect, OutcomeFilter
from flexmarl.credit.returns import token_rewards
from flexmarl.credit.rows import Group, samples_of
from flexmarl.credit.shaping.shape import reward_parts
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupFiltered, GroupsCredited
from flexmarl.events.notices import GroupJudged, RowsReady
from flexmarl.events.training_events import DivergenceCharged
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.turn_rows import credit_row, open_row
from flexmarl.records import (
    AgentName,
    CreditedTurn,
    CreditLine,
    FilterReason,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    RowState,
    SampleId,
)
from flexmarl.rollout.admission import Admission
from flexmarl.training.interface import Appraised, Trainer
from flexmarl.training.phases import PhaseSettings, resting
from flexmarl.training.settings import TrainingSettings

MAX_TOGETHER = 32
"""Most groups, or episodes, that are credited and written together. More would keep trainers waiting for the first."""
Memory = Mapping[str, float]
"""Numbers that a run keeps from batch to batch. `kl_coef/{policy}` is the KL coefficient of a policy."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on a finished group: kept or dropped."""

    drop: str
    """Why nothing can be learned from the group; "" if it is kept."""
    effects: Mapping[AgentName, Mapping[Effect, int]] = field(default_factory=dict)
    """Number of each agent's credit groups with each effect; empty if no filter judged them."""
    reason: FilterReason = FilterReason.NO_WEIGHT
    """The same as `drop`, to be counted. Means nothing if the group is kept."""

    @property
    def trainable(self) -> bool:
        """True if the group could be trained on although the filter drops it."""
        return bool(self.effects)


@dataclass(frozen=True, slots=True)
class Credited:
    """The rows of a group that will be trained on, with their credit, by policy."""

    group: GroupId
    samples: Mapping[PolicyName, Sequence[CreditedTurn]]
    """Empty if no row of the group has weight."""


class Crediting:
    """Judges and credits groups. It remembers the memory of the estimators, and the rows of the groups judged last."""

    def __init__(
        self,
        *,
        store: ExperienceStore,
        credit: CreditSettings,
        trained: Collection[PolicyName],
        admission: Admission,
        events: Events,
        appraisal: "Appraisal | None" = None,
        phases: Mapping[PolicyName, Sequence[PhaseSettings]] = {},
    ) -> None:
        """`appraisal` asks trainers for values and log-probabilities; None if credit needs neither.

        `phases` are those of each trained policy; a policy without any is trained in every step.
        """
        self._store = store
        self._settings = credit
        self.trained = frozenset(trained)
        self._phases = phases
        self.resting: Mapping[PolicyName, str] = {}
        """The trained policies that rest in the present batch, and why."""
        self._admission, self._events, self._appraisal = admission, events, appraisal
        self.memory: Memory = {}
        """State of the estimators after the last credit. A resumed run sets it from its checkpoint."""
        self._judged: dict[GroupId, tuple[GroupRecord, Sequence[CreditRow]]] = {}
        """The groups that were judged last, with their rows: most are credited right after they were judged."""

    def begin(self, step: int) -> None:
        """Begins the batch of a step: `training.phases` decides which policies rest in it."""
        reasons = {policy: resting(phases, step) for policy, phases in self._phases.items()}
        self.resting = {policy: because for policy, because in reasons.items() if because}

    @property
    def batch_wide(self) -> bool:
        """True if credit compares all groups of a batch, so that none can be credited before the last has finished."""
        return self._settings.needs not in ("row", "group")

    @property
    def filter(self) -> OutcomeFilter | None:
        """The filter that drops groups from which nothing can be learned; None if all groups are kept."""
        return self._settings.filter

    def judge(self, group: GroupRecord) -> Judged:
        """Decides whether a finished group is kept, by its rows and the filter."""
        rows = self._rows(group)
        if all(row.greedy for row in rows):
            because = next((self.resting[policy] for policy in self._resting_in(group)), "no turn of a trained policy")
            return Judged(because, reason=FilterReason.NO_TRAINED_TURN)
        if "greedy" in self._settings.uses and not (group.greedy and group.greedy.finished):
            because = f"no baseline: the greedy play failed: {group.greedy.reason if group.greedy else 'missing'}"
            return Judged(because, reason=FilterReason.NO_BASELINE)
        judged = Judged("")
        for decision in self._settings.decide(rows):  # One, since all rows are of one task; none without a filter.
            if decision.kept:
                judged = Judged("", decision.effects)
            else:
                because = f"{decision.reason}: {decision.because}"
                judged = Judged(because, decision.effects, FilterReason(decision.reason))
        parts = {agent: parts.figures for agent, parts in reward_parts(rows).items()}
        self._events.emit(GroupJudged(group=group.group, effects=judged.effects, parts=parts))
        return judged

    def open_places(self, group: GroupRecord) -> Mapping[SampleId, tuple[Group, float]]:
        """Credit group and score of each row. They depend on the row's episode alone, so the group may be open."""
        return self._settings.open_places(self._rows(group))

    def lines(self, group: GroupRecord) -> Mapping[Group, CreditLine]:
        """The line of each credit group of a complete group: it turns scores into advantages."""
        return self._settings.lines(self._rows(group))

    async def drop(self, group: GroupRecord, judged: Judged, *, but: Container[SampleId] = ()) -> None:
        """Ends a finished group that was judged, and its rows, as FILTERED. The caller ends the rows in `but`."""
        ids = [turn.sample_id for episode in group.finished for turn in episode.turns if turn.sample_id not in but]
        await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=judged.drop))
        self.filtered(group.group, judged.drop, judged.reason)

    async def credit(
        self, compared: Sequence[Sequence[GroupRecord]], *, opened: Container[SampleId] = ()
    ) -> list[Credited]:
        """Turns groups, or parts of groups, into samples. Those of one sequence are compared with one another.

        Rows that become no sample end FILTERED, except those in `opened`, which the caller ends.
        """
        each: list[Sequence[CreditRow]] = [
            [row for group in groups for row in self._rows(group)] for groups in compared
        ]
        if self._appraisal:
            filled = iter(await self._appraisal.fill([row for rows in each for row in rows], self.memory))
            each = [tuple(islice(filled, len(rows))) for rows in each]
        credited, ended = list[Credited](), defaultdict[str, list[SampleId]](list)
        for groups, rows in zip(compared, each, strict=True):
            values = {row.sample_id: row.values for row in rows if row.values is not None}
            parts = {row.sample_id: row.parts for row in rows}
            credit = self._settings.credit(rows, self.memory)
            self.memory = credit.memory
            event = GroupsCredited(
                groups=tuple(group.group for group in groups),
                report={agent: report.figures for agent, report in credit.report.items()},
                parts={agent: parts.figures for agent, parts in reward_parts(rows).items()},
                because=f"{type(self._settings.estimator).__name__} compares a {self._settings.needs} at a time",
            )
            self._events.emit(event)
            for group in groups:
                samples, left_out = samples_of(group, credit, values, parts, self.resting)
                credited.append(Credited(group.group, samples))
                for because, ids in left_out.items():
                    ended[because] += [sample_id for sample_id in ids if sample_id not in opened]
        for because, ids in ended.items():
            await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
        return credited

    async def release(self, compared: Sequence[Sequence[GroupRecord]]) -> list[Credited]:
        """Credits groups, or parts of groups, and makes their rows READY, those of `MAX_TOGETHER` groups together."""
        released = await self.credit(compared)
        for first in range(0, len(released), MAX_TOGETHER):
            some = [of for credited in released[first : first + MAX_TOGETHER] for of in credited.samples.values()]
            await self.make_ready([sample for samples in some for sample in samples])
        return released

    def end_batch(self, policy: PolicyName | None = None) -> None:
        """Notes that a batch is credited: the batch of `policy`, or, if None, the one that all policies share."""
        if self._appraisal:
            self.memory = self._appraisal.end_batch(self.memory, policy)

    async def make_ready(self, samples: Sequence[CreditedTurn]) -> None:
        """Writes the credit into the rows, and makes them READY."""
        if samples:
            await self.put_credit(samples)
            await self._store.settle([sample.turn.sample_id for sample in samples], Outcome(state=RowState.READY))
            self._events.emit(RowsReady(policies=frozenset(sample.turn.policy for sample in samples)))

    async def put_credit(self, samples: Sequence[CreditedTurn]) -> None:
        """Writes the credit into the rows. Samples whose credit group is open get their score in place of it."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for sample in samples:
            rows[sample.turn.agent].append(open_row(sample) if sample.open_group else credit_row(sample))
        for agent, partial in rows.items():
            await self._store.put(agent, partial)

    def filtered(self, group: GroupId, because: str, reason: FilterReason = FilterReason.NO_WEIGHT) -> None:
        """Ends a group all of whose rows have ended."""
        self._admission.move(group, GroupState.FILTERED)
        self._events.emit(GroupFiltered(group=group, because=because, reason=reason))

    def _resting_in(self, group: GroupRecord) -> list[PolicyName]:
        """The resting policies that have turns in a group."""
        return [turn.policy for play in group.finished for turn in play.turns if turn.policy in self.resting]

    def _rows(self, group: GroupRecord) -> Sequence[CreditRow]:
        judged, rows = self._judged.get(group.group, (None, ()))
        if judged is not group:
            trained = self.trained.difference(self.resting)
            rows = self._settings.shape(credit_rows(group, trained, self._settings.untrained_finish))
            self._judged[group.group] = group, rows
            if len(self._judged) > MAX_TOGETHER:
                del self._judged[next(iter(self._judged))]
        return rows


class Appraisal:
    """Fills in the credit rows of policies whose settings ask for it. Other rows stay unchanged."""

    def __init__(
        self, *, trainers: Mapping[PolicyName, Trainer], training: Mapping[PolicyName, TrainingSettings], events: Events
    ) -> None:
        """`training` must have an entry for every policy of `trainers`."""
        self._trainers = {policy: trainers[policy] for policy in trainers if training[policy].needs_appraisal}
        self._in_reward = {
            policy: kl for policy in self._trainers if (kl := training[policy].kl) is not None and kl.where == "reward"
        }
        self._events = events
        self._seen: dict[PolicyName, list[float]] = defaultdict(list)
        """By policy, the mean divergence of each row of this batch."""

    async def fill(self, rows: Sequence[CreditRow], memory: Memory) -> Sequence[CreditRow]:
        """Returns the rows with critic values, and with token rewards less the price of divergence.

        A trainer is asked about the rows of its policy, but not about greedy plays and empty responses. Raises
        TrainingError, or StoreError if a trainer cannot read the rows.
        """
        asked: dict[PolicyName, list[SampleId]] = defaultdict(list)
        for row in rows:
            if row.policy in self._trainers and row.num_tokens and not row.greedy:
                asked[row.policy].append(row.sample_id)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._ask(policy, asked[policy]), name=f"appraise/{policy}")
                for policy in sorted(asked)
            ]
        appraisals = {sample_id: appraised for call in calls for sample_id, appraised in call.result().items()}
        return [
            self._filled(row, appraisals[row.sample_id], memory) if row.sample_id in appraisals else row for row in rows
        ]

    def end_batch(self, memory: Memory, of: PolicyName | None = None) -> Memory:
        """Returns the memory for the next batch, with coefficients adapted to this batch.

        `of` limits this to the batch of one policy; None means all policies.
        """
        after = dict(memory)
        for policy in [one for one in sorted(self._seen) if of in (None, one)]:
            kls = self._seen.pop(policy)
            settings, coef = self._in_reward[policy], self._coef(policy, memory)
            kl = fsum(kls) / len(kls)  # `fsum` is exact, so the result does not depend on the order of the rows.
            following = settings.adapted(coef, kl, len(kls))
            if settings.target is not None:
                after[_name(policy)] = following
            self._events.emit(
                DivergenceCharged(
                    policy=policy,
                    kl=kl,
                    coef=coef,
                    next_coef=following,
                    because="it is fixed" if settings.target is None else f"training.kl.target is {settings.target:g}",
                )
            )
        return after

    async def _ask(self, policy: PolicyName, ids: Sequence[SampleId]) -> Mapping[SampleId, Appraised]:
        return dict(zip(ids, await self._trainers[policy].appraise(ids), strict=True))

    def _filled(self, row: CreditRow, appraised: Appraised, memory: Memory) -> CreditRow:
        if appraised.values is not None:
            row = replace(row, values=tuple(appraised.values.tolist()))
        if row.policy not in self._in_reward or appraised.divergence is None or row.reward is None:
            return row
        self._seen[row.policy].append(float(appraised.divergence.mean()))
        return paid(row, self._coef(row.policy, memory) * appraised.divergence)

    def _coef(self, policy: PolicyName, memory: Memory) -> float:
        return memory.get(_name(policy), self._in_reward[policy].coef)


def paid(row: CreditRow, price: NDArray[np.float64]) -> CreditRow:
    """Returns the row with its tokens' rewards less `price` [num_tokens]. Its outcome is the one before the price."""
    assert row.reward is not None, "what has no reward cannot pay"
    rewards = token_rewards(row) - price
    # `reward` must equal the sum of the token rewards to the last bit, because token estimators add these up.
    return replace(
        row.pays("kl", float(price.sum())), reward=float(rewards.sum()), token_rewards=tuple(rewards.tolist())
    )


def _name(policy: PolicyName) -> str:
    return f"kl_coef/{policy}"
