"""Run folder on disk: everything that one run leaves behind.

runs/math_team-20260131-142530/
  config.yaml        the settings, every default filled in
  journal.jsonl      every event and decision, with its reason
  experience.sqlite  every turn, with its reward and advantage
  commands/          what agents of the command line printed, if the workflow is a command
  failures/          the first failed episode of each kind, with its traceback
  metrics.jsonl      one line per step
  tensorboard/       the same for TensorBoard
  trackers.json      ids of the run in W&B and MLflow, if it is there
  evaluations/       a folder for each evaluation, e.g. step-0: its journal.jsonl and experience.sqlite
  checkpoints/       what --resume needs
  start/             models of policies that began as those of another run, if there are any
  summary.json       before, after, times, versions
  curve.png          the run at a glance
  timeline.json      who worked when; open it in ui.perfetto.dev
"""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flexmarl.errors import ConfigError

_OF_STEP = re.compile(r"step-(\d+)(?:-(\d+))?")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of the files of one run, e.g. `RunFolder(Path("runs/..."))`."""

    path: Path

    @property
    def config(self) -> Path:
        """Settings of the run."""
        return self.path / "config.yaml"

    @property
    def journal(self) -> Path:
        """Events and decisions."""
        return self.path / "journal.jsonl"

    @property
    def store(self) -> Path:
        """The experience store."""
        return self.path / "experience.sqlite"

    @property
    def failures(self) -> Path:
        """Folder of the failed episodes that were kept; it exists once an episode has failed."""
        return self.path / "failures"

    @property
    def metrics(self) -> Path:
        """Values by step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's folder."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """Ids of the run in other trackers."""
        return self.path / "trackers.json"

    @property
    def evaluations(self) -> Path:
        """Folder of evaluations. Each is a folder with a config, a journal and a store."""
        return self.path / "evaluations"

    def evaluations_of_steps(self) -> list[Path]:
        """The evaluations that `train` made, in the order of their steps; one that was played again comes later."""
        found = ((_OF_STEP.fullmatch(path.name), path) for path in self.evaluations.glob("step-*"))
        return [path for _, path in sorted(((int(of[1]), int(of[2] or 1)), path) for of, path in found if of)]

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """Figures of the whole run."""
        return self.path / "summary.json"

    @property
    def curve(self) -> Path:
        """Picture of the whole run."""
        return self.path / "curve.png"

    @property
    def timeline(self) -> Path:
        """Timeline of the run, for Perfetto."""
        return self.path / "timeline.json"


def make_run_folder(root: Path, name: str, now: datetime) -> RunFolder:
    """Makes the folder `{root}/{name}-{yyyymmdd-hhmmss}`. If it exists, `-2`, `-3`, ... is added to the name.

    Raises ConfigError if `name` has other characters than letters, digits, '.', '_' and '-'.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"name must be letters, digits, '.', '_' and '-', got {name!r}; use for example 'math_team'")
    stem = f"{name}-{now:%Y%m%d-%H%M%S}"
    number = 1
    while True:
        folder = RunFolder(root / (stem if number == 1 else f"{stem}-{number}"))
        try:
            folder.path.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            folder.checkpoints.mkdir()
            return folder
