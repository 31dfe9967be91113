"""Where tasks come from: the `tasks` section of a config."""

from typing import Annotated

from pydantic import Field

from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.table import HuggingFaceTasks, JsonlTasks

TaskSettings = Annotated[GeneratorTasks | JsonlTasks | HuggingFaceTasks, Field(discriminator="type")]
"""Chosen by `type`. `open(seed=..., base=...)` gives the TaskSource; relative paths start from `base`."""
