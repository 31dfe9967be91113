"""Where tasks come from: the `tasks` section of a config."""

from typing import Annotated

from pydantic import Field

from flexmarl.tasks.generator import GeneratorTasks
from flexmarl.tasks.huggingface import HuggingFaceTasks
from flexmarl.tasks.jsonl import JsonlTasks

TaskSettings = Annotated[GeneratorTasks | JsonlTasks | HuggingFaceTasks, Field(discriminator="type")]
"""Chosen by `type`. `open(seed=..., base=...)` gives the TaskSource; relative paths start from `base`."""
