"""Task source on a function: endless, and nothing to download.

    @task_generator("products")
    def product(seed: int, index: int, split: Split, *, digits: int = 2) -> Task: ...

The same arguments must give the same task, and no prompt may be in both splits.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import Field

from flexmarl.errors import ConfigError, boundary
from flexmarl.plugins import Registry
from flexmarl.records import Task
from flexmarl.settings import Settings
from flexmarl.tasks.interface import Split, check_params, checked_task


class TaskGenerator(Protocol):
    """Makes task number `index` of a split from its arguments alone; keyword-only parameters come from the config."""

    def __call__(self, seed: int, index: int, split: Split, **params: Any) -> Task:
        """Makes the task."""
        ...


GENERATORS: Registry[TaskGenerator] = Registry(
    "task generator",
    setting="tasks.name",
    group="task_generators",
    built_in={
        "reasoning_gym": "flexmarl.tasks.reasoning_gym:reasoning_gym",
        "textarena": "flexmarl.tasks.textarena:textarena",
    },
)
task_generator = GENERATORS.register
"""Decorator that makes a function the task generator of that name: `@task_generator("products")`."""


class GeneratorTasks(Settings):
    """Tasks from a function registered with `@task_generator`."""

    type: Literal["generator"] = "generator"
    name: str = Field(min_length=1)
    """Name of the generator; its file is listed under `code`."""
    params: Mapping[str, Any] = Field(default={})
    """Keyword parameters of the generator."""

    def open(self, *, seed: int, base: Path = Path(".")) -> "GeneratorSource":
        """Opens the source. Raises ConfigError for an unknown generator or parameter."""
        return GeneratorSource(self, seed=seed)


class GeneratorSource:
    """The tasks of one generator."""

    num_train = None

    def __init__(self, settings: GeneratorTasks, *, seed: int) -> None:
        self._generate = GENERATORS[settings.name]
        self._settings = settings
        self._seed = seed
        check_params(self._generate, settings.params, given=3, key="tasks.params", name=settings.name)

    def train(self, index: int) -> Task:
        """Training task number `index`."""
        return self._make(index, "train")

    def held_out(self, n: int) -> tuple[Task, ...]:
        """Held-out tasks number 0 to n - 1."""
        return tuple(self._make(index, "held_out") for index in range(n))

    def _make(self, index: int, split: Split) -> Task:
        where = f"tasks: generator '{self._settings.name}', {split} task {index}"
        with boundary(ConfigError, where):
            task = self._generate(self._seed, index, split, **self._settings.params)
        return checked_task(task, where)
