"""Runs crediting: finished groups are filtered, and their turns become samples with an advantage.

  finished group ──► keeps? ──► credit ──► samples of each policy ──► make_ready
                     │ no       │ no weight                           rows READY
                     └──────────┴──► FILTERED, slot free

consumes    finished groups
waits for   the store
produces    samples; rows that end FILTERED, with the reason
unblocked by the store
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from flexmarl.credit import Credit, CreditRow, CreditSettings, credit_rows
from flexmarl.experience.interface import ExperienceStore, Outcome, PartialRow
from flexmarl.experience.rows import credit_row
from flexmarl.observability.journal import Journal
from flexmarl.records import (
    AgentName,
    GroupId,
    GroupRecord,
    GroupState,
    PolicyName,
    RowState,
    Sample,
    SampleId,
)
from flexmarl.rollout.admission import Admission


@dataclass(frozen=True, slots=True)
class Credited:
    """What a group is to training."""

    group: GroupId
    samples: Mapping[PolicyName, Sequence[Sample]]
    """Empty: nothing in it has weight."""


class Crediting:
    """Judges groups; holds no state between them."""

    def __init__(
        self,
        *,
        store: ExperienceStore,
        credit: CreditSettings,
        trained: Collection[PolicyName],
        admission: Admission,
        journal: Journal,
    ) -> None:
        self._store = store
        self._settings = credit
        self.trained = frozenset(trained)
        self._admission = admission
        self._journal = journal

    @property
    def batch_wide(self) -> bool:
        """Whether all groups of a batch are compared, so that none can be credited before the last has come."""
        return self._settings.estimator.needs not in ("row", "group")

    async def keeps(self, group: GroupRecord) -> bool:
        """Whether a finished group teaches anything; if not, it and its rows end FILTERED."""
        because = self._reason_to_drop(credit_rows(group, self.trained))
        if because:
            ids = [turn.sample_id for episode in group.finished for turn in episode.turns]
            await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
            self.filtered(group.group, because)
        return not because

    async def credit(self, groups: Sequence[GroupRecord]) -> list[Credited]:
        """Compares the groups, or parts of groups, and ends the rows that training does not see."""
        estimator = self._settings.estimator
        credit = estimator.estimate([row for group in groups for row in credit_rows(group, self.trained)])
        self._journal.event(
            "credited",
            groups=[group.group for group in groups],
            report=credit.report,
            because=f"{type(estimator).__name__} compares a {estimator.needs} at a time",
        )
        credited: list[Credited] = []
        for group in groups:
            samples, left_out = samples_of(group, credit)
            for because, ids in left_out.items():
                await self._store.settle(ids, Outcome(state=RowState.FILTERED, reason=because))
            credited.append(Credited(group.group, samples))
        return credited

    async def make_ready(self, samples: Sequence[Sample]) -> None:
        """Puts the credit into the rows, and makes them READY."""
        rows: dict[AgentName, list[PartialRow]] = defaultdict(list)
        for sample in samples:
            rows[sample.turn.agent].append(credit_row(sample))
        for agent, partial in rows.items():
            await self._store.put(agent, partial)
        await self._store.settle([sample.turn.sample_id for sample in samples], Outcome(state=RowState.READY))

    def filtered(self, group: GroupId, because: str) -> None:
        """Ends a group all of whose rows have ended."""
        self._admission.move(group, GroupState.FILTERED)
        self._journal.event("group_filtered", group=group, because=because)

    def _reason_to_drop(self, rows: Sequence[CreditRow]) -> str:
        if not rows:
            return "no turn of a trained policy"
        if self._settings.filter is None:
            return ""
        (decision,) = self._settings.filter.decide(rows, key=self._settings.estimator.key)
        return "" if decision.kept else f"{decision.reason}: {decision.because}"


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
