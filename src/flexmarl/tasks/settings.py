"""Settings of a task source: the `tasks` section of a config."""

from typing import Annotated

from pydantic import Field

from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.table import HuggingFaceTasks, JsonlTasks

TaskSettings = Annotated[GeneratorTasks | JsonlTasks | HuggingFaceTasks, Field(discriminator="type")]
"""Settings of a source, chosen by `type`. `open(seed=..., base=...)` opens it; relative paths start from `base`."""
