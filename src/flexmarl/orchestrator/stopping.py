"""Decides by evaluations which step's policies are the best, and whether a run ends before its last step.

Both rules read the same history: the figures of every evaluation, by the number of completed steps. A checkpoint holds
it, so that a resumed run decides as an undisturbed one would.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flexmarl.errors import ConfigError
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.settings import FigureSettings, StopSettings

History = Mapping[int, Mapping[str, float]]
"""Figures of evaluations, by completed steps; see `figures_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A step that one of the rules chose, and why."""

    step: int
    because: str


def figures_of(evaluation: Evaluation) -> dict[str, float]:
    """All figures of an evaluation by name: what the workflow reported, and `reward/{agent}`.

    >>> figures_of(Evaluation(versions={}, episodes=8, failed=0, metrics={"success": 0.5}, rewards={"solver": 0.25}))
    {'success': 0.5, 'reward/solver': 0.25}
    """
    return {**evaluation.metrics, **{f"reward/{agent}": reward for agent, reward in evaluation.rewards.items()}}


def check_figure(key: str, settings: FigureSettings, evaluation: Evaluation) -> None:
    """Raises ConfigError that names `key` if an evaluation with finished episodes lacks the figure."""
    figures = figures_of(evaluation)
    if evaluation.failed < evaluation.episodes and settings.metric not in figures:
        raise ConfigError(
            f"{key}.metric is '{settings.metric}', which the evaluation does not have; it has: "
            f"{', '.join(sorted(figures)) or 'no figure'}"
        )


def best_of(history: History, settings: FigureSettings) -> Ruling | None:
    """Returns the earliest step with the best figure. None before the first step with a figure that is a number.

    Step 0, before training, does not count: it has no checkpoint.

    >>> best_of({0: {"success": 0.9}, 10: {"success": 0.5}, 20: {"success": 0.75}}, FigureSettings())
    Ruling(step=20, because='success 0.75 at step 20 is the highest of 2 evaluations')
    """
    values = {step: settings.value(figures) for step, figures in sorted(history.items()) if step > 0}
    values = {step: value for step, value in values.items() if not math.isnan(value)}
    if not values:
        return None
    best = max(values, key=lambda step: (settings.gain(values[step]), -step))
    extreme = "highest" if settings.mode == "max" else "lowest"
    because = f"{settings.metric} {values[best]:.4g} at step {best} is the {extreme} of {len(values)} evaluations"
    return Ruling(step=best, because=because)


def stop_after(history: History, settings: StopSettings) -> Ruling | None:
    """Returns the ruling that ends the run now, or None if it goes on.

    An evaluation is an improvement if it is better than the best before it by more than `min_delta`. The run ends when
    `patience` evaluations in a row were none. The evaluation before the first step sets the mark.

    >>> stop_after({0: {"success": 0.5}, 10: {"success": 0.25}, 20: {"success": 0.5}}, StopSettings(patience=2))
    Ruling(step=20, because='success has not been above 0.5, at step 0, in 2 evaluations (stop.patience)')
    """
    mark, marked_at, idle, step = math.nan, 0, 0, 0
    for step, figures in sorted(history.items()):
        value = settings.value(figures)
        better = not math.isnan(value) and (
            math.isnan(mark) or settings.gain(value) - settings.gain(mark) > settings.min_delta
        )
        if better:
            mark, marked_at, idle = value, step, 0
        elif step > 0:
            idle += 1
    if idle < settings.patience:
        return None
    beyond = "above" if settings.mode == "max" else "below"
    margin = f"{mark:.4g}" if not settings.min_delta else f"{mark:.4g} by more than {settings.min_delta:g}"
    because = f"{settings.metric} has not been {beyond} {margin}, at step {marked_at}, in {idle} evaluations"
    return Ruling(step=step, because=f"{because} (stop.patience)")
