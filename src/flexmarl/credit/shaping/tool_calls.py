"""Decides rewards by the number of tool calls: OTC (arXiv 2504.14870), where a success with fewer calls pays more.

In the formulas m is the number of tool calls that an agent ran in an episode, and n the least m among its successes in
the task.
"""

from collections.abc import Mapping, Sequence
from math import cos, pi, sin
from typing import ClassVar, Literal

from pydantic import Field

from flexmarl.credit.interface import CreditRow
from flexmarl.credit.shaping.base import OutcomeTerm, Sees, by_episode, given
from flexmarl.records import AgentName, SampleId


class Otc(OutcomeTerm):
    """alpha r_tool r: a positive outcome shrinks with the tool calls that its agent ran in the episode.

    With `form: ppo`, r_tool = cos(m pi / (2 m + c)): 1 without a call, and less for each. With `form: grpo`, calls are
    compared with the fewest that were enough: r_tool = sin(f pi / (2 n)) with f = 2 m n / (m + n), and
    r_tool = cos(m pi / (2 m + c)) if n = 0. It is 1 at m = n. r_tool is in (0, 1], so a success stays above 0.

    Outcomes that are not positive become alpha r: a punishment does not shrink with calls. n is that of the group. The
    paper keeps the least of all earlier groups of a task, too; the two agree where no task is played twice.
    """

    type: Literal["otc"] = "otc"
    form: Literal["ppo", "grpo"] = "grpo"
    """grpo: calls are compared with those of the task's other episodes. ppo: each episode is judged alone."""
    alpha: float = Field(default=1.0, gt=0)
    """Weight of the outcome."""
    c: float = Field(default=1.0, gt=0)
    """How slowly r_tool falls where no call is needed. A common choice is the largest number of calls of an episode."""
    threshold: float = 0.5
    """An agent's episode is a success if all its outcomes in it are higher."""

    sees: ClassVar[Sees] = "task"
    follows_calls: ClassVar[bool] = True

    def outcomes(self, rows: Sequence[CreditRow]) -> Mapping[SampleId, float]:
        """The new outcomes. All turns of an agent in an episode have the same r_tool."""
        plays = [play for played in by_episode(rows).values() for play in _by_agent(played).values()]
        least: dict[AgentName, int] = {}
        for play in plays:
            if self._is_success(play) and not play[0].greedy:
                agent = play[0].agent
                least[agent] = min(least.get(agent, calls_of(play)), calls_of(play))
        earned: dict[SampleId, float] = {}
        for play in plays:
            calls = calls_of(play)
            share = self.share(calls, 0 if self.form == "ppo" else least.get(play[0].agent, calls))
            earned |= {row.sample_id: self.alpha * given(row) * (share if given(row) > 0 else 1.0) for row in play}
        return earned

    def share(self, calls: int, least: int) -> float:
        """r_tool of an episode with m = `calls`, where n = `least`.

        >>> Otc().share(2, 2), Otc(c=2.0).share(1, 0)
        (1.0, 0.7071067811865476)
        """
        if not least:
            return cos(calls * pi / (2 * calls + self.c))
        return sin(calls * pi / (calls + least))  # f pi / (2 n), with f = 2 m n / (m + n).

    def _is_success(self, play: Sequence[CreditRow]) -> bool:
        return all(given(row) > self.threshold for row in play)


def calls_of(play: Sequence[CreditRow]) -> int:
    """Tool calls that were run for these turns."""
    return round(sum(row.signals.get("tool_calls", 0.0) for row in play))


def _by_agent(rows: Sequence[CreditRow]) -> Mapping[AgentName, list[CreditRow]]:
    plays: dict[AgentName, list[CreditRow]] = {}
    for row in rows:
        plays.setdefault(row.agent, []).append(row)
    return plays
