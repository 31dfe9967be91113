"""Decides what gradient accumulation took, from the micro-batches of a journal: the half of fit.py about trainers.

micro-batch    (micro_batch_s + sample_s rows) x how much others slow the machine
"""

from collections import defaultdict

import numpy as np

from flexmarl.simulator.costs import TrainerCosts
from flexmarl.simulator.crowd import Crowd
from flexmarl.simulator.facts import Facts, MicroBatch
from flexmarl.simulator.regression import Floats, nonnegative, relative_error, rounded

ROUNDS = 60
"""Turns between costs and slowdown; there are few micro-batches, and they settle soon."""


class TrainerFit:
    """Costs of accumulating, of all policies at once."""

    def __init__(self, facts: Facts) -> None:
        self._batches: defaultdict[str, list[MicroBatch]] = defaultdict(list)
        for batch in facts.micro_batches:
            self._batches[batch.policy].append(batch)
        everyone, engines = Crowd(facts.training().values()), Crowd(facts.serving().values())
        self._beside: dict[str, Floats] = {}
        for policy, batches in self._batches.items():
            edges = [np.array([batch.began, batch.ended]) for batch in batches]
            pairs = [(engines.mean(span)[0], max(0.0, everyone.mean(span)[0] - 1.0)) for span in edges]
            self._beside[policy] = np.array(pairs)
        self.per_engine = self.per_trainer = 0.0
        self._found = {policy: np.zeros(2) for policy in self._batches}
        for _ in range(ROUNDS if self._batches else 0):
            self._improve()

    def costs(self, policy: str) -> TrainerCosts:
        """What was found; a policy that is not trained has the defaults."""
        if policy not in self._found:
            return TrainerCosts()
        batch, sample = map(rounded, self._found[policy])
        return TrainerCosts(micro_batch_s=batch, sample_s=sample)

    def error(self, policy: str) -> float:
        """Relative error of the micro-batches' seconds."""
        if policy not in self._found:
            return 0.0
        return relative_error(self._slowness(policy) * (self._rows(policy) @ self._found[policy]), self._took(policy))

    def _improve(self) -> None:
        for policy in self._batches:
            self._found[policy] = nonnegative(self._slowness(policy)[:, None] * self._rows(policy), self._took(policy))
        alone = {policy: self._rows(policy) @ self._found[policy] for policy in self._batches}
        columns = [alone[policy][:, None] * self._beside[policy] for policy in self._batches]
        seconds = [self._took(policy) - alone[policy] for policy in self._batches]
        self.per_engine, self.per_trainer = nonnegative(np.concatenate(columns), np.concatenate(seconds))

    def _slowness(self, policy: str) -> Floats:
        return 1.0 + self._beside[policy] @ np.array([self.per_engine, self.per_trainer])

    def _rows(self, policy: str) -> Floats:
        return np.array([[1.0, batch.rows] for batch in self._batches[policy]])

    def _took(self, policy: str) -> Floats:
        return np.array([batch.ended - batch.began for batch in self._batches[policy]])
