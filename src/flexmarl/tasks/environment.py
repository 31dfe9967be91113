"""What every environment can do: the state that a task is played in, when it has one."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar


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
