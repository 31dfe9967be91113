"""Folders for evaluations: each keeps what an evaluation played, and is read like a run's.

runs/RUN/evaluations/
  step-0/                  of `train`: the evaluation after so many steps; step-8-2 if it was played again
  eval-20260131-142530/    of `flexmarl eval runs/RUN`
    config.yaml            the settings that it was played with
    journal.jsonl          its tasks, the end of each episode, the result
    experience.sqlite      its turns
"""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from flexmarl.assemble.blueprint import Blueprint
from flexmarl.config import RunSettings
from flexmarl.errors import StoreError, boundary
from flexmarl.events.event import Event, Events
from flexmarl.events.journal import Journal
from flexmarl.events.run_folder import RunFolder
from flexmarl.experience.backends.sqlite import DurableStore
from flexmarl.experience.turn_rows import TURN_COLUMNS
from flexmarl.orchestrator.evaluation import EvaluationPlace


class KeptEvaluations:
    """Keeps the evaluations of a run in folders of their own: the first and the newest ones."""

    def __init__(self, blueprint: Blueprint, folder: RunFolder, clock: Callable[[], float]) -> None:
        """`clock` gives the run's time in seconds."""
        self._blueprint, self._folder, self._clock = blueprint, folder, clock
        self._keep = blueprint.settings.evaluate.keep if blueprint.settings.store.type == "sqlite" else 0

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[EvaluationPlace | None]:
        """Opens the folder of the evaluation after `step` steps; None if no evaluation is kept.

        Raises StoreError if it cannot be made.
        """
        if not self._keep:
            yield None
            return
        with boundary(StoreError, f"making room for an evaluation in {self._folder.evaluations}"):
            path = self._next(step)
        async with OneEvaluation(path, self._blueprint, self._clock)(step) as kept:
            yield kept
        with boundary(StoreError, f"removing older evaluations from {self._folder.evaluations}"):
            first, *others = self._folder.evaluations_of_steps()
            for old in others[: len(others) + 1 - self._keep]:
                shutil.rmtree(old)
            if self._keep == 1 and first != path:
                shutil.rmtree(first)

    def _next(self, step: int) -> Path:
        """Makes a folder that no evaluation has used."""
        number = 1
        while True:
            path = self._folder.evaluations / (f"step-{step}" if number == 1 else f"step-{step}-{number}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return path


@dataclass(frozen=True, slots=True)
class OneEvaluation:
    """Keeps one evaluation in a folder that has nothing, or the settings only."""

    path: Path
    blueprint: Blueprint
    clock: Callable[[], float]

    @asynccontextmanager
    async def __call__(self, step: int) -> AsyncIterator[EvaluationPlace]:
        """Opens its store and its journal."""
        folder, events = RunFolder(self.path), Events(self.clock)
        if not folder.config.exists():
            write_settings(self.blueprint.settings, folder)
        async with AsyncExitStack() as stack:
            agents = list(self.blueprint.team.agents)
            store = DurableStore.create(folder.store, agents=agents, columns=TURN_COLUMNS)
            stack.push_async_callback(store.close)
            journal = Journal(folder.journal)
            stack.callback(journal.close)
            events.listen(Event, journal.write)
            yield EvaluationPlace(store, events)


def write_settings(settings: RunSettings, folder: RunFolder) -> None:
    """Writes config.yaml, whole or not at all: without it, a run that was killed can be neither resumed nor read."""
    written = folder.config.with_suffix(".partial")
    written.write_text(yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    written.replace(folder.config)
