"""Rewards drawn by lot: they take the place of a workflow's rewards, in simulations whose replies have no meaning.

simulation.rewards: {success: 0.5, spread: 0.3}

task ──► its chance of success, from success - spread to success + spread
episode ──► succeeds with this chance: reward 1.0 for each of its turns, else 0.0
"""

import random
from dataclasses import replace

from pydantic import Field

from flexmarl.agents import Team, TeamSpec, Workflow
from flexmarl.records import Task
from flexmarl.settings import Settings


class DrawnRewards(Settings):
    """Rewards of simulated episodes. Tasks of a wide spread are often dropped as too easy or too hard."""

    success: float = Field(default=0.5, ge=0, le=1, description="Mean chance that an episode succeeds.")
    spread: float = Field(
        default=0.3, ge=0, le=1, description="How far a task's chance is from the mean, at most; kept within 0 and 1."
    )

    def draw(self, seed: int, task: str, trajectory: str) -> float:
        """Draws the reward of an episode, 0.0 or 1.0. The same arguments give the same reward."""
        middle = self.success + self.spread * random.Random(f"{seed}/{task}/chance").uniform(-1, 1)
        return float(random.Random(f"{seed}/{task}/{trajectory}").random() < min(max(middle, 0.0), 1.0))


def drawn(team: TeamSpec, rewards: DrawnRewards | None, seed: int) -> TeamSpec:
    """Returns the team with drawn rewards in place of those that its workflow gives; unchanged for None."""
    return team if rewards is None else replace(team, run=_overruled(team.run, rewards, seed))


def _overruled(run: Workflow, rewards: DrawnRewards, seed: int) -> Workflow:
    async def play(task: Task, team: Team) -> None:
        await run(task, team)
        reward = rewards.draw(seed, task.input_id, team.context.trajectory_id)
        team.replace_rewards(reward)
        team.report(success=reward)

    return play
