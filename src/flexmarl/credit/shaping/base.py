"""Base classes of the terms of a reward, and the helpers that terms share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from flexmarl.credit.interface import CreditRow, LaterCalls
from flexmarl.records import AgentName, SampleId
from flexmarl.settings import Settings

if TYPE_CHECKING:
    from flexmarl.credit.settings import CreditSettings

Sees = Literal["row", "episode", "task"]
"""Rows that a term must see at once. With `task`, no row of a task is credited before all its episodes ended."""


class Term(Settings):
    """Something that the reward is made of. Its settings class is the term.

    A term reads the rewards as the workflow gave them; only `reward_to_go` reads them after the other terms.
    """

    agents: tuple[AgentName, ...] = ()
    """Agents whose turns get the term; empty means all agents."""

    sees: ClassVar[Sees] = "row"
    follows_calls: ClassVar[bool] = False
    """True if it follows calls one by one, as if an episode were a single path. It cannot handle trees of turns."""
    needs_branches: ClassVar[bool] = False
    """True if it compares the candidates of a turn. It can handle only trees of turns."""

    @property
    def later_calls(self) -> LaterCalls | None:
        """How it adds up the rewards of later calls; None if it does not."""
        return None

    @property
    def first_by_last(self) -> float | None:
        """Weight of a path's first turn by the weight of its last, for a term that weighs turns by depth; else None."""
        return None

    @property
    def may_be_negative(self) -> bool:
        """True if it can make a reward negative although no given reward is."""
        return False

    @property
    def name(self) -> str:
        """Name of the part of the reward under which it is logged: its `type`."""
        return str(getattr(self, "type"))  # noqa: B009  # each kind has its own literal

    def is_for(self, agent: AgentName) -> bool:
        """True if the agent's turns get the term."""
        return not self.agents or agent in self.agents

    def misfits(self, where: str, credit: CreditSettings, agents: Collection[AgentName]) -> Iterator[str]:
        """Yields a sentence for each reason why this term, `credit.{where}`, does not fit the rest of `credit`.

        `agents` are the trained ones. The default fits everywhere.
        """
        yield from ()


class OutcomeTerm(Term):
    """Replaces the outcome by another number. An agent can have only one such term."""

    @abstractmethod
    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The new outcomes. `rows` are the rewarded rows of one task, in the order of episodes and hops."""


class RowOutcome(OutcomeTerm):
    """An outcome term that looks at each row alone."""

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The new outcome of each row, from `outcome`."""
        return {row.sample_id: self.outcome(given(row), row) for row in rows}

    @abstractmethod
    def outcome(self, reward: float, row: CreditRow) -> float:
        """The new outcome of `row`. `reward` is its given outcome."""


class AddedTerm(Term):
    """Adds to the reward. The outcome, which filters look at, does not change."""

    of_call: ClassVar[bool] = True
    """True if the call itself earned the added amount, False if its episode did."""

    @abstractmethod
    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The amount added to each row; a row that is missing gets nothing. `rows` are as in `OutcomeTerm.outcomes`."""


AnyTerm = OutcomeTerm | AddedTerm


def given(row: CreditRow) -> float:
    """The outcome of a rewarded row: its reward, if it has no separate outcome."""
    outcome = row.reward if row.outcome is None else row.outcome
    assert outcome is not None, "shaping is asked about rewarded rows alone"
    return outcome


def by_episode(rows: Sequence[CreditRow]) -> Mapping[str, list[CreditRow]]:
    """The rows of each episode, in their order."""
    episodes: dict[str, list[CreditRow]] = {}
    for row in rows:
        episodes.setdefault(row.episode, []).append(row)
    return episodes
