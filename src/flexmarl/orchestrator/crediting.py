"""Runs crediting: finished groups are filtered, and their turns become samples with an advantage.

  finished group ──► judge ──► credit ──► samples of each policy ──► make_ready
                     │ drop    │ no weight                           rows READY
                     └─────────┴──► FILTERED, slot free

consumes    finished groups
waits for   the store; trainers, if credit needs their appraisal (appraisal.py)
produces    samples; rows that end FILTERED, with the reason
unblocked by the store
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit import Credit, CreditRow, CreditSettings, credit_rows
from flexmarl.credit.filters import Effect, OutcomeFilter
from flexmarl.credit.interface import AgentReport, Tokens
from flexmarl.credit.rows import Group
from flexmarl.credit.shaping.shape import RewardParts, reward_parts
from flexmarl.events.event import Events
from flexmarl.events.group_events import GroupFiltered, GroupsCredited
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.turn_rows import credit_row, open_row
from flexmarl.orchestrator.appraisal import Appraisal
from flexmarl.records import (
    AgentName,
    CreditedTurn,
    CreditLine,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    RowState,
    SampleId,
)
from flexmarl.rollout.admission import Admission

OnReport = Callable[[Mapping[AgentName, AgentReport]], None]
"""Called with the report on each agent's credit groups."""
NO_WEIGHT = "weight 0: nothing was sampled, or there is nothing to compare with"


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on a finished group: kept or dropped."""

    drop: str
    """Why nothing can be learned from the group; "" if it is kept."""
    effects: Mapping[AgentName, Mapping[Effect, int]] = field(default_factory=dict)
    """Number of each agent's credit groups with each effect; empty if no filter judged them."""
    parts: Mapping[AgentName, RewardParts] = field(default_factory=dict)
    """The parts that each agent's rewards add up from."""

    @property
    def trainable(self) -> bool:
        """True if the group could be trained on although the filter drops it."""
        return bool(self.effects)


@dataclass(frozen=True, slots=True)
class Credited:
    """The samples of a group, by policy."""

    group: GroupId
    samples: Mapping[PolicyName, Sequence[CreditedTurn]]
    """Empty if no row of the group has weight."""


class Crediting:
    """Judges and credits groups. Between two groups it keeps no state except the memory of the estimators."""

    def __init__(
        self,
        *,
        store: ExperienceStore,
        credit: CreditSettings,
        trained: Collection[PolicyName],
        admission: Admission,
        events: Events,
        appraisal: Appraisal | None = None,
        on_report: OnReport = lambda report: None,
    ) -> None:
        """`appraisal` asks trainers for values and log-probabilities; None if credit needs neither."""
        self._store = store
        self._settings = credit
        self.trained = frozenset(trained)
        self._admission = admission
        self._events = events
        self._appraisal = appraisal
        self._on_report = on_report
        self.memory: Mapping[str, float] = {}
        """State of the estimators after the last credit. A resumed run sets it from its checkpoint."""

    @property
    def batch_wide(self) -> bool:
        """True if credit compares all groups of a batch, so that none can be credited before the last has finished."""
        return self._settings.needs not in ("row", "group")

    @property
    def streams(self) -> bool:
        """True if rows are trained before their group is complete (streaming.py)."""
        return self._settings.streaming == "linear"

    @property
    def filter(self) -> OutcomeFilter | None:
        """The filter that drops groups from which nothing can be learned; None if all groups are kept."""
        return self._settings.filter

    def judge(self, group: GroupRecord) -> Judged:
        """Decides whether a finished group is kept, by its rows and the filter."""
        rows = self._rows(group)
        if all(row.greedy for row in rows):
            return Judged("no turn of a trained policy")
        if "greedy" in self._settings.uses and not (group.greedy and group.greedy.finished):
            return Judged(f"no baseline: the greedy play failed: {group.greedy.reason if group.greedy else 'missing'}")
        for decision in self._settings.decide(rows):
            drop = "" if decision.kept else f"{decision.reason}: {decision.because}"
            return Judged(drop, decision.effects, reward_parts(rows))
        return Judged("", parts=reward_parts(rows))

    def open_places(self, group: GroupRecord) -> Mapping[SampleId, tuple[Group, float]]:
        """Credit group and score of each row. They depend on the row's episode alone, so the group may be open."""
        return self._settings.open_places(self._rows(group))

    def lines(self, group: GroupRecord) -> Mapping[Group, CreditLine]:
        """The line of each credit group of a complete group: it turns scores into advantages."""
        return self._settings.lines(self._rows(group))

    async def drop(self, group: GroupRecord, because: str, *, but: Container[SampleId] = ()) -> None:
        """Ends a finished group and its rows as FILTERED. The caller ends the rows in `but`."""
        ids = [turn.sample_id for episode in group.finished for turn in episode.turns if turn.sample_id not in but]
        await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
        self.filtered(group.group, because)

    async def credit(self, groups: Sequence[GroupRecord], *, opened: Container[SampleId] = ()) -> list[Credited]:
        """Turns the groups, or parts of groups, into samples, comparing all that are given with one another.

        Rows that become no sample end FILTERED, except those in `opened`, which the caller ends.
        """
        rows: Sequence[CreditRow] = [row for group in groups for row in self._rows(group)]
        if self._appraisal:
            rows = await self._appraisal.fill(rows, self.memory)
        values = {row.sample_id: row.values for row in rows if row.values is not None}
        credit = self._settings.credit(rows, self.memory)
        self.memory = credit.memory
        self._on_report(credit.report)
        self._events.emit(
            GroupsCredited(
                groups=tuple(group.group for group in groups),
                report={agent: asdict(report) for agent, report in credit.report.items()},
                parts={agent: asdict(parts) for agent, parts in reward_parts(rows).items()},
                because=f"{type(self._settings.estimator).__name__} compares a {self._settings.needs} at a time",
            )
        )
        credited: list[Credited] = []
        for group in groups:
            samples, left_out = samples_of(group, credit, values)
            for because, ids in left_out.items():
                ended = [sample_id for sample_id in ids if sample_id not in opened]
                await self._store.settle(ended, Outcome(state=RowState.FILTERED, reason=because))
            credited.append(Credited(group.group, samples))
        return credited

    def end_batch(self, policy: PolicyName | None = None) -> None:
        """Notes that a batch is credited: the batch of `policy`, or, if None, the one that all policies share."""
        if self._appraisal:
            self.memory = self._appraisal.end_batch(self.memory, policy)

    async def make_ready(self, samples: Sequence[CreditedTurn]) -> None:
        """Writes the credit into the rows, and makes them READY."""
        await self.put_credit(samples)
        await self._store.settle([sample.turn.sample_id for sample in samples], Outcome(state=RowState.READY))

    async def put_credit(self, samples: Sequence[CreditedTurn]) -> None:
        """Writes the credit into the rows. Samples whose credit group is open get their score in place of it."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for sample in samples:
            rows[sample.turn.agent].append(open_row(sample) if sample.open_group else credit_row(sample))
        for agent, partial in rows.items():
            await self._store.put(agent, partial)

    def filtered(self, group: GroupId, because: str) -> None:
        """Ends a group all of whose rows have ended."""
        self._admission.move(group, GroupState.FILTERED)
        self._events.emit(GroupFiltered(group=group, because=because))

    def _rows(self, group: GroupRecord) -> Sequence[CreditRow]:
        return self._settings.shape(credit_rows(group, self.trained, self._settings.untrained_finish))


def samples_of(
    group: GroupRecord, credit: Credit, values: Mapping[SampleId, Tokens] = {}
) -> tuple[Mapping[PolicyName, Sequence[CreditedTurn]], Mapping[str, Sequence[SampleId]]]:
    """The group's samples by policy, and the ids of its other turns by the reason why they are no samples.

    `values` are the critic's, if there is one.
    """
    samples: dict[PolicyName, list[CreditedTurn]] = defaultdict(list)
    left_out: dict[str, list[SampleId]] = defaultdict(list)
    for episode in group.finished:
        weights = {turn.sample_id: credit.weights.get(turn.sample_id) for turn in episode.turns}
        tokens: dict[PolicyName, float] = defaultdict(float)
        for turn in episode.turns:
            tokens[turn.policy] += (weights[turn.sample_id] or 0.0) * turn.num_tokens
        for turn in episode.turns:
            weight, reward = weights[turn.sample_id], episode.rewards[turn.sample_id]
            if weight is None:
                left_out["not a trained policy's turn"].append(turn.sample_id)
            elif not weight or reward is None:
                left_out[NO_WEIGHT].append(turn.sample_id)
            else:
                sample = CreditedTurn(
                    turn=turn,
                    advantage=credit.advantages[turn.sample_id],
                    advantages=_per_token(credit.token_advantages, turn.sample_id),
                    returns=_per_token(credit.returns, turn.sample_id),
                    values=_per_token(values, turn.sample_id),
                    weight=weight,
                    reward=reward,
                    episode_tokens=tokens[turn.policy],
                )
                samples[turn.policy].append(sample)
    return samples, left_out


def _per_token(found: Mapping[SampleId, Tokens], sample_id: SampleId) -> NDArray[np.float64] | None:
    return np.array(found[sample_id], np.float64) if sample_id in found else None
