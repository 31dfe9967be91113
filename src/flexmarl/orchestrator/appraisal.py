"""Runs appraisal: asks trainers for critic values and for the divergence from the reference policy, before credit.

  credit rows ──► trainers of their policies: appraise ──► rows with values, and rewards less beta KL per token

consumes    rows with their final rewards; trainers read the turns themselves
waits for   the answers of the trainers, all asked at the same time
produces    the rows, filled in; at the end of a batch, the KL coefficients of the next batch
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
from flexmarl.events.event import Events
from flexmarl.events.training_events import DivergenceCharged
from flexmarl.records import PolicyName, SampleId
from flexmarl.training.interface import Appraised, Trainer
from flexmarl.training.settings import TrainingSettings

Memory = Mapping[str, float]
"""Numbers that a run keeps from batch to batch. `kl_coef/{policy}` is the KL coefficient of a policy."""


class Appraisal:
    """Fills in the credit rows of policies whose settings ask for it. Other rows stay unchanged."""

    def __init__(
        self,
        *,
        trainers: Mapping[PolicyName, Trainer],
        training: Mapping[PolicyName, TrainingSettings],
        events: Events,
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
        said = {sample_id: appraised for call in calls for sample_id, appraised in call.result().items()}
        return [self._filled(row, said[row.sample_id], memory) if row.sample_id in said else row for row in rows]

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
    """Returns the row with its tokens' rewards less `price` [num_tokens]. Its outcome is the one before the price."""
    assert row.reward is not None, "what has no reward cannot pay"
    rewards = token_rewards(row) - price
    # `reward` must equal the sum of the token rewards to the last bit, because token estimators add these up.
    return replace(
        row.pays("kl", float(price.sum())), reward=float(rewards.sum()), token_rewards=tuple(rewards.tolist())
    )


def _name(policy: PolicyName) -> str:
    return f"kl_coef/{policy}"
