"""Sources of tasks. In: generators, files, datasets. Out: tasks by position, and environments to play them in."""

from flexmarl.records.scorers import SCORERS, scorer
from flexmarl.tasks.environment import Environment, EnvironmentSettings, StepResult, environment
from flexmarl.tasks.generator import TaskGenerator, task_generator
from flexmarl.tasks.interface import SourceExhausted, Split, TaskSource, check_disjoint
from flexmarl.tasks.settings import TaskSettings

__all__ = [
    "Environment",
    "EnvironmentSettings",
    "SCORERS",
    "SourceExhausted",
    "Split",
    "StepResult",
    "TaskGenerator",
    "TaskSettings",
    "TaskSource",
    "check_disjoint",
    "environment",
    "scorer",
    "task_generator",
]
