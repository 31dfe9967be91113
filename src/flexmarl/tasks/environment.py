"""What every environment can do: the state that a task is played in, when it has one."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import Field

from flexmarl.records import Task
from flexmarl.settings import Settings
from flexmarl.tasks.registry import Registry


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one action led to; what the agent sees of it comes from `observe`."""

    reward: float
    done: bool
    """The play is over: only `reset` and `restore` may follow."""


S = TypeVar("S", bound=Hashable)


class Environment(Protocol[S]):
    """One play at a time, called by one workflow. Everything random comes from the seed of `reset`.

    Any text is an action: what it does not understand it answers in the next observation, and perhaps with a penalty.
    EpisodeError is for its own faults, and for a `step` after the end.
    """

    def reset(self, seed: int) -> None:
        """Begins a play; equal seeds and actions give equal plays."""
        ...

    def observe(self) -> str:
        """What an agent sees now. Changes nothing."""
        ...

    def step(self, action: str) -> StepResult:
        """Plays one action."""
        ...

    def snapshot(self) -> S:
        """The whole state, its random stream included: immutable, hashable, and able to cross processes (pickle)."""
        ...

    def restore(self, snapshot: S) -> None:
        """Back to that state, also in another instance; the future is then the same as it was."""
        ...


EnvironmentFactory = Callable[..., Environment[Any]]
"""`(task, **params) -> Environment`; makes one instance for one episode."""

ENVIRONMENTS: Registry[EnvironmentFactory] = Registry("environment", setting="team.environment.name")
environment = ENVIRONMENTS.register
"""Decorator that makes a factory the environment of that name: `@environment("grid")`."""


class EnvironmentSettings(Settings):
    """The environment that every task of a run is played in."""

    name: str = Field(min_length=1)
    """Of the factory; its file is listed under `code`."""
    params: Mapping[str, Any] = Field(default={})
    """Its keyword parameters."""

    def resolve(self) -> Callable[[Task], Environment[Any]]:
        """The factory with its parameters. Raises ConfigError for an unknown name."""
        return partial(ENVIRONMENTS[self.name], **self.params)
