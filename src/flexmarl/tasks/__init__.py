"""Sources of tasks. In: generators, files, datasets. Out: tasks by position, and environments to play them in."""

from typing import Annotated

from pydantic import Field

from flexmarl.records.scorers import SCORERS, scorer
from flexmarl.tasks.environment import Environment, EnvironmentSettings, StepResult, environment
from flexmarl.tasks.generator import GeneratorTasks, TaskGenerator, task_generator
from flexmarl.tasks.interface import SourceExhausted, Split, TaskSource, check_disjoint, shared_prompts
from flexmarl.tasks.table import HuggingFaceTasks, JsonlTasks

__all__ = ["Environment", "EnvironmentSettings", "JsonlTasks", "SCORERS", "SourceExhausted", "Split", "StepResult"]
__all__ += ["TaskGenerator", "TaskSettings", "TaskSource", "check_disjoint", "shared_prompts", "environment", "scorer"]
__all__ += ["task_generator"]

TaskSettings = Annotated[GeneratorTasks | JsonlTasks | HuggingFaceTasks, Field(discriminator="type")]
"""Settings of a source, chosen by `type`. `open(seed=..., base=...)` opens it; relative paths start from `base`."""
