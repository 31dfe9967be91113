"""Decides which estimator judges a row: its agent's own, or the one of all other agents."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flexmarl.credit.estimators.group_relative import GroupRelative
from flexmarl.credit.interface import Credit, CreditRow, Estimator, Extra, GroupKey, Needs
from flexmarl.credit.keys import Group
from flexmarl.records import AgentName, CreditLine, SampleId

ORDER_OF_NEEDS: tuple[Needs, ...] = ("row", "group", "batch", "state")


def most(needs: Iterable[Needs]) -> Needs:
    """The one that sees most."""
    return ORDER_OF_NEEDS[max(map(ORDER_OF_NEEDS.index, needs))]


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
        return most(estimator.needs for estimator in self.estimators)

    @property
    def uses(self) -> frozenset[Extra]:
        """What any of them uses."""
        return frozenset[Extra]().union(*(estimator.uses for estimator in self.estimators))

    @property
    def key(self) -> GroupKey:
        """As grouped."""
        return self.grouping

    @property
    def learns_from_equal_rewards(self) -> bool:
        """Whether any of them does."""
        return any(estimator.learns_from_equal_rewards for estimator in self.estimators)

    @property
    def grouping(self) -> GroupKey:
        """One key for all, or one per agent where they have their own estimators."""
        others = self._others.grouping
        if not self._per_agent:
            return others
        keys = {"*": others} if isinstance(others, tuple) else dict(others)
        for agent, estimator in self._per_agent.items():
            key = estimator.grouping
            keys[agent] = key if isinstance(key, tuple) else key.get(agent, key.get("*", ()))
        return keys

    def compared(self, rows: Sequence[CreditRow]) -> Sequence[CreditRow]:
        """Each row with the reward that its estimator compares."""
        return [row for _, estimator, share in self._shares(rows) for row in estimator.compared(share)]

    def estimate(self, rows: Sequence[CreditRow], memory: Mapping[str, float] = {}) -> Credit:
        """Each row's credit by its estimator; those of a greedy play go to whoever uses them."""
        whole = Credit(advantages={}, weights={}, report={}, memory=memory)
        for _, estimator, share in self._shares(rows):
            seen = [row for row in share if not row.greedy or "greedy" in estimator.uses]
            whole = _joined(whole, estimator.estimate(seen, memory), before=memory)
        return whole

    @property
    def linear(self) -> bool:
        """Whether all of them are lines over scores that are known before a group is complete."""
        return all(isinstance(estimator, GroupRelative) and estimator.linear for estimator in self.estimators)

    def open_places(self, rows: Sequence[CreditRow]) -> dict[SampleId, tuple[Group, float]]:
        """Group and score of every sampled row; only if `linear`."""
        return {
            sample_id: (whose + group, score)
            for whose, estimator, share in self._shares(rows)
            if isinstance(estimator, GroupRelative)
            for sample_id, (group, score) in estimator.open_places(share).items()
        }

    def lines(self, rows: Sequence[CreditRow]) -> dict[Group, CreditLine]:
        """What each complete group makes of its scores; only if `linear`."""
        return {
            whose + group: line
            for whose, estimator, share in self._shares(rows)
            if isinstance(estimator, GroupRelative)
            for group, line in estimator.lines(share).items()
        }

    def _shares(self, rows: Sequence[CreditRow]) -> Iterator[tuple[Group, Estimator, Sequence[CreditRow]]]:
        """Each estimator that has rows, with what tells its groups from those of another one."""
        others = [row for row in rows if row.agent not in self._per_agent]
        if others:
            yield (), self._others, others
        for agent, estimator in self._per_agent.items():
            own = [row for row in rows if row.agent == agent]
            if own:
                yield (("estimator", agent),), estimator, own


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
