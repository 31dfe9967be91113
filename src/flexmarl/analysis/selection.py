"""Decides which episodes of a run are shown.

step, agent, task, failed, episode     each leaves out what it does not name
best or worst                          of the finished ones that are left, by success or else reward; of equal ones
                                       those of the newest step come first
limit                                  of these, the first ones
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from flexmarl.analysis.conversations import EpisodeLine
from flexmarl.errors import ConfigError
from flexmarl.records import EpisodeStatus

MOST_NAMED = 3
"""Near names that an error gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeChoice:
    """Episodes that are asked for. None and False ask for all."""

    step: int | None = None
    """Number of the step, from 1, as on the line of the step."""
    agent: str | None = None
    task: str | None = None
    episode: str | None = None
    failed: bool = False
    best: int | None = None
    worst: int | None = None

    @property
    def all(self) -> bool:
        """True if nothing is left out."""
        return self == EpisodeChoice()

    def of(self, lines: Sequence[EpisodeLine], agents: Sequence[str]) -> list[EpisodeLine]:
        """Chooses among all episodes of a run with these agents.

        Raises ConfigError for a name or a number that the run does not have, and if nothing is left.
        """
        if self.best is not None and self.worst is not None:
            raise ConfigError("--best and --worst exclude each other; give one of them")
        _check("episode", self.episode, [line.episode for line in lines])
        _check("task", self.task, [line.task for line in lines])
        _check("agent", self.agent, agents)
        steps = sorted({line.step for line in lines if line.step is not None})
        if self.step is not None and self.step not in steps:
            there = f"the episodes are of steps {steps[0]} to {steps[-1]}" if steps else "no step has episodes"
            raise ConfigError(f"there is no episode of step {self.step}; {there}")
        chosen = [line for line in lines if self._takes(line)]
        if self.best is not None or self.worst is not None:
            chosen = self._extreme(chosen)
        if not chosen:
            ended = sum(line.failed for line in lines)
            raise ConfigError(f"no episode is left of {len(lines)}, {ended} of them failed; leave out a filter")
        return chosen

    def _takes(self, line: EpisodeLine) -> bool:
        return (
            self.step in (None, line.step)
            and self.task in (None, line.task)
            and self.episode in (None, line.episode)
            and (self.agent is None or self.agent in line.turns)
            and (line.failed or not self.failed)
        )

    def _extreme(self, lines: Iterable[EpisodeLine]) -> list[EpisodeLine]:
        """Ranks the finished episodes by score. Of equal scores the newest step comes first."""
        scored = [(line.score, line) for line in lines if line.status == EpisodeStatus.FINISHED]
        sign = 1 if self.best is None else -1
        ranked = sorted(
            ((sign * score, -(line.step or 0), line) for score, line in scored if score is not None),
            key=lambda ranks: ranks[:2],
        )
        return [line for *_, line in ranked[: self.best or self.worst]]


def _check(what: str, name: str | None, names: Sequence[str]) -> None:
    """Raises ConfigError with the nearest names if `name` is given and not among `names`."""
    if name is None or name in names:
        return
    near = get_close_matches(name, dict.fromkeys(names), MOST_NAMED, 0.0)
    raise ConfigError(
        f"there is no {what} '{name}'; near are: {', '.join(near) or 'none, because there is no episode'}"
    )
