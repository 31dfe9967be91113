"""The interface and the settings of an environment: the state that a task is played in, if it has one."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import Field

from flexmarl.plugins import Registry
from flexmarl.records import Task
from flexmarl.settings import Settings
from flexmarl.tasks.interface import check_params


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one action. The agent sees its effect through `observe`."""

    reward: float
    done: bool
    """True if the play is over: only `reset` and `restore` may follow."""


S = TypeVar("S", bound=Hashable)


class Environment(Protocol[S]):
    """The state of one play at a time, called by one workflow. All randomness comes from the seed of `reset`.

    Any text is an action. If the environment does not understand an action, the next observation says so, and the
    reward may be a penalty. It raises EpisodeError for its own faults only, and for a `step` after the end.
    """

    def reset(self, seed: int) -> None:
        """Begins a play; equal seeds and actions give equal plays."""
        ...

    def observe(self) -> str:
        """The text that an agent sees now. Changes nothing."""
        ...

    def step(self, action: str) -> StepResult:
        """Plays one action."""
        ...

    def snapshot(self) -> S:
        """The whole state, its random stream included: immutable, hashable, and able to cross processes (pickle)."""
        ...

    def restore(self, snapshot: S) -> None:
        """Returns to the state of a snapshot, also of another instance. The same actions then give the same results."""
        ...


EnvironmentFactory = Callable[..., Environment[Any]]
"""`(task, **params) -> Environment`; makes one instance for one episode."""

ENVIRONMENTS: Registry[EnvironmentFactory] = Registry(
    "environment",
    setting="team.environment.name",
    group="environments",
    built_in={"textarena": "flexmarl.tasks.textarena:TextArenaGame"},
)
environment = ENVIRONMENTS.register
"""Decorator that makes a factory the environment of that name: `@environment("grid")`."""


class EnvironmentSettings(Settings):
    """The environment that every task of a run is played in."""

    name: str = Field(min_length=1)
    """Name of the factory; its file is listed under `code`."""
    params: Mapping[str, Any] = Field(default={})
    """Keyword parameters of the factory."""

    def resolve(self) -> Callable[[Task], Environment[Any]]:
        """The factory with its parameters. Raises ConfigError for an unknown name, or a wrong parameter."""
        factory = ENVIRONMENTS[self.name]
        check_params(factory, self.params, given=1, key="team.environment.params", name=self.name)
        return partial(factory, **self.params)
