"""Decides what each call is credited with: what came after it, and not what others had spent before."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import AddedTerm, Sees, by_episode, given
from flexmarl.credit.shaping.graph import descendants
from flexmarl.records import SampleId


class RewardToGo(AddedTerm):
    """G_i = p_i + sum over scope(i) of gamma^(h_j - h_i) p_j + gamma^(h_e - h_i) Z_e.

    p are the `process` parts, Z_e = outcome + `completion_time` comes with the episode's last call h_e. Reads the terms
    before it, and must be the last.
    """

    type: Literal["reward_to_go"] = "reward_to_go"
    gamma: float = Field(default=1.0, gt=0, le=1)
    """For each call in between; 1 leaves expected gradients as they are."""
    scope: Literal["descendants", "agent", "team"] = "descendants"
    """Whose p_j: those of calls that depend on this one, of the agent's later calls, or of all later calls."""

    sees: ClassVar[Sees] = "episode"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """What G_i is beyond p_i + Z_e, which the row has already. Rows as they are after the other terms."""
        earned: dict[SampleId, float] = {}
        for played in by_episode(rows).values():
            calls = played[0].calls
            later = descendants(calls)
            last = max((call.hop for call in calls), default=played[-1].hop)
            for row in played:
                to_come = sum(
                    self.gamma ** (other.hop - row.hop) * other.parts.get("process", 0.0)
                    for other in played
                    if self._counts(other, row, later)
                )
                terminal = given(row) + row.parts.get("completion_time", 0.0)
                earned[row.sample_id] = to_come + (self.gamma ** (last - row.hop) - 1) * terminal
        return earned

    def _counts(self, other: CreditRow, row: CreditRow, later: Mapping[int, frozenset[int]]) -> bool:
        match self.scope:
            case "descendants":
                return other.hop in later.get(row.hop, ())
            case "agent":
                return other.hop > row.hop and other.agent == row.agent
            case "team":
                return other.hop > row.hop
