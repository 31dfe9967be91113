"""Team: the agents of one episode, as a workflow is given them. WORKFLOWS: the workflows that a config can name."""

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cached_property
from typing import Any

from flexmarl.agents.caller import AgentSpec
from flexmarl.agents.context import EpisodeContext, Node, episode_seed
from flexmarl.agents.doors import Door
from flexmarl.agents.episode_log import Ledger, finite
from flexmarl.agents.seat import Seat
from flexmarl.errors import EpisodeError, is_unicode, writable
from flexmarl.plugins import Registry
from flexmarl.records import AgentName, SampleId, Task, Turn
from flexmarl.tasks import Environment


class Team:
    """Seats by name: `team.solver` or `team["solver"]`; iterating gives all, in the team's order."""

    def __init__(
        self, agents: Mapping[AgentName, AgentSpec], context: EpisodeContext, ledger: Ledger | None = None
    ) -> None:
        self.context = context
        self._agents = agents
        self._ledger = ledger or Ledger()
        self._seats: dict[AgentName, Seat] = {}
        """Seats that have been asked for; in a large team, most never are."""

    def fork(self, node: Node) -> "Team":
        """A copy of the team for a branch, with memories, environment, random numbers and metrics as they are now.

        The calls of the fork are tagged with `node`. Its turns also count as turns of this team, but rewards given in
        the fork reach only its own turns.
        """
        fork = Team(self._agents, replace(self.context, node=node), self._ledger.fork())
        for name, seat in self._seats.items():
            fork._seat(name).inherit(seat)
        if "environment" in vars(self):
            fork.environment.restore(self.environment.snapshot())
        fork.rng.setstate(self.rng.getstate())
        return fork

    def __getitem__(self, name: str) -> Seat:
        try:
            return self._seat(AgentName(name))
        except KeyError:
            raise EpisodeError(f"the team has no agent {name!r}; it has: {', '.join(self._agents)}") from None

    def __getattr__(self, name: str) -> Seat:
        # Copying and pickling look up underscored names before `_agents` exists.
        if name.startswith("_") or name not in self._agents:
            agents = ", ".join(self.__dict__.get("_agents", ()))
            raise AttributeError(f"the team has no agent {name!r}; it has: {agents}")
        return self._seat(AgentName(name))

    def __iter__(self) -> Iterator[Seat]:
        return map(self._seat, self._agents)

    def _seat(self, name: AgentName) -> Seat:
        """The agent's seat. Raises KeyError if the team has no such agent."""
        if name not in self._seats:
            self._seats[name] = Seat(self._agents, name, self.context, self._ledger)
        return self._seats[name]

    @cached_property
    def rng(self) -> random.Random:
        """Random numbers for the workflow, the same in every play of this trajectory."""
        return random.Random(episode_seed(self.context.run_seed, self.context.trajectory_id))

    def door(self) -> AbstractAsyncContextManager[Door]:
        """A block in which programs play the seats, at addresses of their own (docs/howto/gateway.md)."""
        if self.context.doors is None:
            raise EpisodeError("the workflow opens a door, but this run has no gateway; add the section `gateway: {}`")
        return self.context.doors.open(self._agents, self.context, self._ledger)

    @cached_property
    def environment(self) -> Environment[Any]:
        """This episode's environment, made at first use. The workflow resets it, with one seed for the whole group."""
        if self.context.environment is None:
            raise EpisodeError("the workflow asks for an environment, but this run has none")
        return self.context.environment(self.context.task)

    async def score(self, answer: str, *, reference: str | None = None) -> float:
        """The score of an answer to the episode's task, 1.0 for a full success, whatever its scorer waits for.

        `reference`: another one than the task's, such as tests that the agents may see.
        """
        task = self.context.task if reference is None else replace(self.context.task, reference=reference)
        return await self.context.scores.score(task, answer)

    def reward(self, reward: float, part: str = "outcome") -> None:
        """Adds to the reward of each turn, of all agents, at the end of the episode."""
        self._ledger.reward_team(reward, part)

    def replace_rewards(self, reward: float) -> None:
        """Replaces all rewards given so far, in forks too: each turn so far has this reward, and no other."""
        self._ledger.replace_rewards(reward)

    def report(self, **metrics: float) -> None:
        """Reports metrics of this episode; `success` is the team's score. A later value replaces an earlier one."""
        for name, value in metrics.items():
            if not is_unicode(name):
                raise EpisodeError(f"the metric {writable(name)!r} has no name that UTF-8 can encode")
            self._ledger.metrics[name] = finite(value, f"the metric {name!r}")

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics reported so far."""
        return dict(self._ledger.metrics)

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, in hop order."""
        return self._ledger.turns

    def rewards(self) -> dict[SampleId, float | None]:
        """Reward of every turn so far, in hop order; None if the workflow gave none."""
        return self._ledger.rewards()

    def total_reward(self) -> float:
        """Sum of the rewards given so far, without forks. Each counts once, however many turns it is for."""
        return self._ledger.total_reward()

    def parts(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that the reward of every turn adds up from, by name."""
        return self._ledger.parts()

    def call_rewards(self) -> dict[SampleId, Mapping[str, float]]:
        """The parts that the workflow gave with `reply.reward`."""
        return self._ledger.call_rewards()

    def never_awaited(self) -> list[tuple[str, int]]:
        """File and line of each act that was made and not awaited so far, those of forks included. They are closed."""
        return self._ledger.never_awaited()

    def untrained(self) -> dict[SampleId, str]:
        """The calls that were left out of training, each with the reason."""
        return dict(self._ledger.untrained)

    def signals(self) -> dict[SampleId, Mapping[str, float]]:
        """The signals found in every turn so far: `tool_error` ... in [0, 1], `tool_calls` and `tool_cost`."""
        return self._ledger.signals()


def reserved_names() -> frozenset[str]:
    """Names that no agent can have, because `team.name` means something else."""
    return frozenset({"context", *(name for name in vars(Team) if not name.startswith("_"))})


Workflow = Callable[[Task, Team], Awaitable[None]]
"""`async def run(task, team)`: how the agents interact on one task; an exception in it fails the episode."""

WORKFLOWS: Registry[Workflow] = Registry("workflow", setting="team.workflow.name", group="workflows")


def workflow(name: str) -> Callable[[Workflow], Workflow]:
    """Decorator that registers a workflow.

    @workflow("echo")
    async def echo(task: Task, team: Team) -> None:
        reply = await team.solver.act(task.prompt)
        team.solver.reward(task.score(reply.text))
    """
    return WORKFLOWS.register(name)
