"""Runs appraisal: what only trainers can say of turns, the critic's values and the reference policy's opinion.

  credit rows ──► trainers of their policies: appraise ──► rows with values, and rewards less beta KL per token

consumes    rows with their final rewards; trainers read the turns themselves
waits for   each trainer that has something to say; several at once
produces    the rows, filled in; at the end of a batch, the coefficients that the next one is credited with
unblocked by the trainers
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

import numpy as np
from numpy.typing import NDArray

from flexmarl.credit import CreditRow
from flexmarl.credit.returns import token_rewards
from flexmarl.events.hub import Events
from flexmarl.events.training_events import DivergenceCharged
from flexmarl.records import PolicyName, SampleId
from flexmarl.training.interface import Appraised, Trainer
from flexmarl.training.settings import TrainingSettings

Memory = Mapping[str, float]
"""What a run remembers from batch to batch; the coefficient of a policy is in it as `kl_coef/{policy}`."""


class Appraisal:
    """Fills credit rows in where settings of their policy ask for it; others pass as they are."""

    def __init__(
        self,
        *,
        trainers: Mapping[PolicyName, Trainer],
        training: Mapping[PolicyName, TrainingSettings],
        events: Events,
    ) -> None:
        """`training` has an entry for every policy of `trainers`."""
        self._trainers = {policy: trainers[policy] for policy in trainers if training[policy].needs_appraisal}
        self._in_reward = {
            policy: kl for policy in self._trainers if (kl := training[policy].kl) is not None and kl.where == "reward"
        }
        self._events = events
        self._seen: dict[PolicyName, list[float]] = defaultdict(list)
        """Mean divergence of each row of this batch."""

    async def fill(self, rows: Sequence[CreditRow], memory: Memory) -> Sequence[CreditRow]:
        """Returns the rows with values, and with token rewards that pay for divergence.

        Trainers are asked about sampled rows of their policy; greedy plays and empty responses are not among them.
        Raises TrainingError, or StoreError if a trainer cannot read them.
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
        said = {sample_id: appraised for call in calls for sample_id, appraised in call.result().items()}
        return [self._filled(row, said[row.sample_id], memory) if row.sample_id in said else row for row in rows]

    def end_batch(self, memory: Memory, of: PolicyName | None = None) -> Memory:
        """The memory for the next batch, with the coefficients that follow from this one: `of` a policy, or of all."""
        after = dict(memory)
        for policy in [one for one in sorted(self._seen) if of in (None, one)]:
            kls = self._seen.pop(policy)
            settings, coef = self._in_reward[policy], self._coef(policy, memory)
            kl = fsum(kls) / len(kls)  # Exact, so that the order in which rows came leaves no trace.
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

    def _filled(self, row: CreditRow, said: Appraised, memory: Memory) -> CreditRow:
        if said.values is not None:
            row = replace(row, values=tuple(said.values.tolist()))
        if row.policy not in self._in_reward or said.divergence is None or row.reward is None:
            return row
        self._seen[row.policy].append(float(said.divergence.mean()))
        return paid(row, self._coef(row.policy, memory) * said.divergence)

    def _coef(self, policy: PolicyName, memory: Memory) -> float:
        return memory.get(_name(policy), self._in_reward[policy].coef)


def paid(row: CreditRow, price: NDArray[np.float64]) -> CreditRow:
    """The row with its tokens' rewards less a price [num_tokens]; what it was before stays as its outcome."""
    assert row.reward is not None, "what has no reward cannot pay"
    rewards = token_rewards(row) - price
    # The sum of the tokens' rewards to the last bit, which is what estimators of tokens add up.
    return replace(
        row.pays("kl", float(price.sum())), reward=float(rewards.sum()), token_rewards=tuple(rewards.tolist())
    )


def _name(policy: PolicyName) -> str:
    return f"kl_coef/{policy}"
