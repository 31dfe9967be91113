"""The interface of a task source."""

from typing import Literal, Protocol

from flexmarl.errors import ConfigError
from flexmarl.records import Task

Split = Literal["train", "held_out"]


class SourceExhausted(ConfigError):
    """A finite source was asked for a task past its end; the text names the position."""


class TaskSource(Protocol):
    """Tasks by position. The same settings and seed give the same task at the same position, in any process and for any
    order of calls. One integer is therefore all that a run must remember of its source."""

    @property
    def num_train(self) -> int | None:
        """Number of positions that `train` has, all epochs together; None: no end."""
        ...

    def train(self, index: int) -> Task:
        """The task at position `index`, from 0. Raises SourceExhausted past the end."""
        ...

    def held_out(self, n: int) -> tuple[Task, ...]:
        """The first n held-out tasks, or all if there are fewer; never trained on."""
        ...
