"""Decides what successful episodes earn for being quicker than the other successes of their task."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from flexmarl.credit.interface import Call, CreditRow
from flexmarl.credit.shaping.base import AddedTerm, Sees, by_episode, given
from flexmarl.credit.shaping.graph import longest_path
from flexmarl.errors import CreditError
from flexmarl.records import AgentName, SampleId


class CompletionTime(AddedTerm):
    """bonus clip((ref - T) / ref, -1, 1) for successes, 0 for failures; ref is the median T of the successes.

    T is the longest path through the calls of an episode, each costing what the model below says: calls at once shorten
    it. With one success there is nothing to compare: 0.
    """

    type: Literal["completion_time"] = "completion_time"
    bonus: float = Field(default=0.1, ge=0)
    """lambda: less than what a success is above a failure, so that no failure beats a success."""
    success: float = 1.0
    """Least outcome of a success; an agent's episode is one if all its turns there have it."""
    failure: float = 0.0
    """Largest outcome of a failure. Outcomes in between are an error."""
    prompt_token_s: float = Field(default=0.0002, ge=0)
    """c_p: of a token that is new in a prompt."""
    output_token_s: float = Field(default=0.02, ge=0)
    """c_d: of a sampled token."""

    sees: ClassVar[Sees] = "task"
    follows_calls: ClassVar[bool] = True
    of_call: ClassVar[bool] = False

    @model_validator(mode="after")
    def _successes_stay_ahead(self) -> "CompletionTime":
        lead = self.success - self.failure
        if self.bonus >= lead:
            raise ValueError(
                f"bonus: {self.bonus:g} must be less than success - failure = {lead:g}, "
                f"else a quick failure could beat a slow success"
            )
        return self

    @property
    def may_be_negative(self) -> bool:
        """Where a slow success may lose more than it has; failures lose nothing."""
        return self.bonus > self.success

    def added(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """Per agent, for every turn of an episode the same."""
        episodes = by_episode([row for row in rows if self.is_for(row.agent)])
        times = {episode: longest_path(played[0].calls, self.cost) for episode, played in episodes.items()}
        successes: dict[AgentName, list[CreditRow]] = {}
        for played in episodes.values():
            for agent in {row.agent: None for row in played}:
                own = [row for row in played if row.agent == agent]
                if {self._is_success(row) for row in own} == {True}:
                    successes.setdefault(agent, []).extend(own)
        earned = {row.sample_id: 0.0 for played in episodes.values() for row in played}
        for own in successes.values():
            compared = {row.episode for row in own if not row.greedy}
            if len(compared) > 1:
                reference = median(times[episode] for episode in compared)
                earned |= {row.sample_id: self.bonus * _ahead(times[row.episode], reference) for row in own}
        return earned

    def cost(self, call: Call) -> float:
        """Modelled seconds, so that the reward does not depend on the machine; those of tools are measured."""
        return call.new_prompt_tokens * self.prompt_token_s + call.num_tokens * self.output_token_s + call.tool_s

    def _is_success(self, row: CreditRow) -> bool:
        outcome = given(row)
        if self.failure < outcome < self.success:
            raise CreditError(
                f"sample {row.sample_id} of agent {row.agent} has outcome {outcome:g}, for completion_time neither "
                f"a success (>= {self.success:g}) nor a failure (<= {self.failure:g}); change one of these settings"
            )
        return outcome >= self.success


def _ahead(time: float, reference: float) -> float:
    return min(max((reference - time) / reference, -1.0), 1.0) if reference else 0.0
