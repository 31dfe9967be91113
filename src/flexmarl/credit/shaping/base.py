"""What the terms of a reward have in common."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from flexmarl.credit.interface import CreditRow
from flexmarl.records import AgentName, SampleId
from flexmarl.settings import Settings

Sees = Literal["row", "episode", "task"]
"""How much a term must see at once. With `task`, nothing of a task can be credited before all its episodes ended."""


class Term(Settings):
    """Something that the reward is made of. Its settings are the term; each reads the rewards as they were given."""

    agents: tuple[AgentName, ...] = ()
    """Whose turns it is for; none named: everybody's."""

    sees: ClassVar[Sees] = "row"
    follows_calls: ClassVar[bool] = False
    """Whether it goes from call to call, as if there were one way through the episode: not for trees of turns."""
    needs_branches: ClassVar[bool] = False
    """Whether it compares the candidates of a turn: for trees of turns alone."""

    @property
    def may_be_negative(self) -> bool:
        """Whether it can make a reward negative where no reward that was given is."""
        return False

    @property
    def name(self) -> str:
        """The part of the reward that it is logged as: its `type`."""
        return str(getattr(self, "type"))  # noqa: B009  # each kind has its own literal

    def is_for(self, agent: AgentName) -> bool:
        """Whether the agent's turns have it."""
        return not self.agents or agent in self.agents


class OutcomeTerm(Term):
    """Puts another number in the place of the outcome. An agent can have one such term."""

    @abstractmethod
    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The new outcomes. `rows`: the rewarded ones of one task, in the order of episodes and hops."""


class RowOutcome(OutcomeTerm):
    """One that needs no other row."""

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """Row by row."""
        return {row.sample_id: self.outcome(given(row), row) for row in rows}

    @abstractmethod
    def outcome(self, reward: float, row: CreditRow) -> float:
        """What `reward`, the outcome as it was given, becomes."""


class AddedTerm(Term):
    """Adds to the reward and leaves the outcome, which filters look at, as it is."""

    of_call: ClassVar[bool] = True
    """Whether what it adds was earned by the very call, as opposed to its episode."""

    @abstractmethod
    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """What is added; rows that are not in it get nothing. `rows` as in an OutcomeTerm."""


AnyTerm = OutcomeTerm | AddedTerm


def given(row: CreditRow) -> float:
    """The outcome of a rewarded row."""
    outcome = row.reward if row.outcome is None else row.outcome
    assert outcome is not None, "shaping is asked about rewarded rows alone"
    return outcome


def by_episode(rows: Sequence[CreditRow]) -> Mapping[str, list[CreditRow]]:
    """The rows of each episode, in their order."""
    episodes: dict[str, list[CreditRow]] = {}
    for row in rows:
        episodes.setdefault(row.episode, []).append(row)
    return episodes


def turn_of(row: CreditRow) -> int:
    """k: index of the team's turn, from 0."""
    return int(row.number("turn"))
