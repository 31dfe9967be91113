"""Decides what a proposer earns: most for tasks that are solved half of the time."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, by_episode, given, turn_of
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId


class Learnability(OutcomeTerm):
    """4 p (1 - p), where p is the share of the episode's attempts at the proposed task that solved it."""

    type: Literal["learnability"] = "learnability"
    agents: tuple[AgentName, ...] = Field(min_length=1)
    """The proposers."""
    solvers: tuple[AgentName, ...] = Field(min_length=1)
    """Trained agents whose turns are the attempts."""
    threshold: float = 0.5
    """An attempt with a higher outcome solved the task."""

    sees: ClassVar[Sees] = "episode"

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The same for all proposers of an episode. Raises CreditError where nobody attempted what they proposed."""
        earned: dict[SampleId, float] = {}
        for episode, played in by_episode(rows).items():
            proposed = [row for row in played if self.is_for(row.agent)]
            attempts = {_attempt(row): given(row) for row in played if row.agent in self.solvers}
            if proposed and not attempts:
                raise CreditError(
                    f"episode {episode}: no trained turn of {', '.join(self.solvers)}, so that what "
                    f"{proposed[0].agent} proposed has no solve rate; name agents that attempt it in every episode"
                )
            for row in proposed:
                solved = sum(outcome > self.threshold for outcome in attempts.values()) / len(attempts)
                earned[row.sample_id] = 4 * solved * (1 - solved)
        return earned


def _attempt(row: CreditRow) -> tuple[AgentName, int, str]:
    """Whose attempt a call is a part of; in a tree of turns, each candidate is one."""
    return row.agent, turn_of(row), str(row.tags.get("path", ""))
