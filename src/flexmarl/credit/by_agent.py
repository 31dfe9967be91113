"""Decides which estimator judges a row: its agent's own, or the one of all other agents."""

from collections.abc import Mapping, Sequence

from flexmarl.credit.interface import Credit, CreditRow, Estimator, Extra, GroupKey, Needs
from flexmarl.records import AgentName

ORDER_OF_NEEDS: tuple[Needs, ...] = ("row", "group", "batch", "state")


class ByAgent:
    """Several estimators as one. An agent's rows never meet those of an agent with another estimator."""

    def __init__(self, others: Estimator, per_agent: Mapping[AgentName, Estimator]) -> None:
        self._others = others
        self._per_agent = per_agent

    @property
    def estimators(self) -> tuple[Estimator, ...]:
        """All of them."""
        return (self._others, *self._per_agent.values())

    @property
    def needs(self) -> Needs:
        """The most that any of them must see."""
        return ORDER_OF_NEEDS[max(ORDER_OF_NEEDS.index(estimator.needs) for estimator in self.estimators)]

    @property
    def uses(self) -> frozenset[Extra]:
        """What any of them uses."""
        return frozenset[Extra]().union(*(estimator.uses for estimator in self.estimators))

    @property
    def key(self) -> GroupKey:
        """One key for all, or one per agent where they have their own estimators."""
        if not self._per_agent:
            return self._others.key
        keys = {"*": self._others.key} if isinstance(self._others.key, tuple) else dict(self._others.key)
        for agent, estimator in self._per_agent.items():
            key = estimator.key
            keys[agent] = key if isinstance(key, tuple) else key.get(agent, key.get("*", ()))
        return keys

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Each row's credit by its estimator; those of a greedy play go to whoever uses them."""
        shares = [(self._others, [row for row in rows if row.agent not in self._per_agent])]
        shares += [(own, [row for row in rows if row.agent == agent]) for agent, own in self._per_agent.items()]
        whole = Credit(advantages={}, weights={}, report={}, memory=memory)
        for estimator, share in shares:
            if share:
                seen = [row for row in share if not row.greedy or "greedy" in estimator.uses]
                whole = _joined(whole, estimator.estimate(seen, memory), before=memory)
        return whole


def _joined(whole: Credit, part: Credit, *, before: Mapping[str, float]) -> Credit:
    changed = {name: value for name, value in part.memory.items() if before.get(name) != value}
    return Credit(
        advantages={**whole.advantages, **part.advantages},
        weights={**whole.weights, **part.weights},
        report={**whole.report, **part.report},
        token_advantages={**whole.token_advantages, **part.token_advantages},
        returns={**whole.returns, **part.returns},
        memory={**whole.memory, **changed},
    )
