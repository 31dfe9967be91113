"""What every source of tasks can do."""

from typing import Literal, Protocol

from flexmarl.errors import ConfigError
from flexmarl.records import Task

Split = Literal["train", "held_out"]


class SourceExhausted(ConfigError):
    """A finite source was asked for a task past its end; the text names the position."""


class TaskSource(Protocol):
    """Tasks by position. The same settings and seed give the same task at the same position, in any process and order
    of asking: where a run stands in its source is one integer."""

    @property
    def num_train(self) -> int | None:
        """Positions that `train` has, all epochs together; None: it never ends."""
        ...

    def train(self, index: int) -> Task:
        """The task at position `index`, from 0. Raises SourceExhausted past the end."""
        ...

    def held_out(self, n: int) -> tuple[Task, ...]:
        """The first n held-out tasks, or all if there are fewer; never trained on."""
        ...
