"""Decides by evaluations which step's policies are the best, and whether a run ends before its last step.

Both rules read the same history: every evaluation, by the number of completed steps. A checkpoint holds it, so that a
resumed run decides as an undisturbed one would.

A failed episode never makes an evaluation look better. It counts 0 for `success`, and for every other figure as the
worst value that an episode of this evaluation or of an earlier one had (`compared`).
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flexmarl.errors import ConfigError
from flexmarl.orchestrator.evaluation import Evaluation
from flexmarl.orchestrator.settings import SUCCESS, FigureSettings, StopSettings
from flexmarl.training.kl import ResetSettings

History = Mapping[int, Evaluation]
"""Evaluations, by completed steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """A step that one of the rules chose, and why."""

    step: int
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure of one evaluation as the rules compare it."""

    value: float
    """NaN if the evaluation lacks the figure."""
    remark: str = ""
    """Value of the failed episodes, in words; "" if none failed, or if the figure counts them itself."""


def figures_of(evaluation: Evaluation) -> dict[str, float]:
    """All figures of an evaluation by name: what the workflow reported, and `reward/{agent}`.

    >>> figures_of(Evaluation(versions={}, episodes=8, failed=0, metrics={"success": 0.5}, rewards={"solver": 0.25}))
    {'success': 0.5, 'reward/solver': 0.25}
    """
    return {**evaluation.metrics, **{f"reward/{agent}": reward for agent, reward in evaluation.rewards.items()}}


def compared(history: History, settings: FigureSettings) -> Iterator[tuple[int, Compared]]:
    """Yields the figure of every evaluation with its step, in order. A later evaluation changes no earlier figure.

    >>> whole = Evaluation(versions={}, episodes=4, failed=0, metrics={"score": 0.5}, ranges={"score": (-1.0, 1.0)})
    >>> broken = Evaluation(versions={}, episodes=4, failed=2, metrics={"score": 1.0}, ranges={"score": (1.0, 1.0)})
    >>> [figure.value for _, figure in compared({0: whole, 10: broken}, FigureSettings(metric="score"))]
    [0.5, 0.0]
    """
    worst = math.nan
    for step, evaluation in sorted(history.items()):
        value = settings.value(figures_of(evaluation))
        seen = [worst, *evaluation.ranges.get(settings.metric, (value, value))]
        worst = min((bound for bound in seen if not math.isnan(bound)), key=settings.gain, default=math.nan)
        remark = ""
        if evaluation.failed and settings.metric != SUCCESS and not math.isnan(value):
            share = evaluation.failed / evaluation.episodes
            value = (1 - share) * value + share * worst
            remark = f" ({evaluation.failed} of {evaluation.episodes} episodes failed; each counts as {worst:.4g})"
        yield step, Compared(value=value, remark=remark)


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

    >>> half, all = (Evaluation(versions={}, episodes=8, failed=0, metrics={"success": value}) for value in (0.5, 1.0))
    >>> best_of({0: all, 10: half, 20: half}, FigureSettings())
    Ruling(step=10, because='success 0.5 at step 10 is the highest of 2 evaluations')
    """
    found = {step: figure for step, figure in compared(history, settings) if step > 0 and not math.isnan(figure.value)}
    if not found:
        return None
    best = max(found, key=lambda step: (settings.gain(found[step].value), -step))
    extreme, figure = "highest" if settings.mode == "max" else "lowest", found[best]
    because = f"{settings.metric} {figure.value:.4g} at step {best} is the {extreme} of {len(found)} evaluations"
    return Ruling(step=best, because=f"{because}{figure.remark}")


def none_better(history: History, settings: FigureSettings) -> str:
    """Says that no evaluation was better than the one before the first step; "" if one was, or if a figure is missing.

    >>> half, all = (Evaluation(versions={}, episodes=8, failed=0, metrics={"success": value}) for value in (0.5, 1.0))
    >>> none_better({0: all, 10: half}, FigureSettings())
    'success 0.5 at step 10 is the highest of 1 evaluations, and not above 1, before training'
    """
    best, figures = best_of(history, settings), dict(compared(history, settings))
    if best is None or 0 not in figures:
        return ""
    mark = figures[0].value
    if math.isnan(mark) or settings.gain(figures[best.step].value) > settings.gain(mark):
        return ""
    return f"{best.because}, and not {'above' if settings.mode == 'max' else 'below'} {mark:.4g}, before training"


def reset_after(history: History, step: int, since: int, settings: ResetSettings) -> str:
    """The reason to reset a policy's reference after `step` completed steps; "" if it stays. `since`: its last reset.

    >>> half = Evaluation(versions={}, episodes=8, failed=0, metrics={"success": 0.5})
    >>> reset_after({0: half}, 20, 10, ResetSettings(every=10))
    '10 steps have passed since step 10 (kl.reset.every)'
    >>> reset_after({0: half, 10: half, 20: half}, 20, 10, ResetSettings(patience=1))
    'success has not been above 0.5, at step 10, in 1 evaluations (kl.reset.patience)'
    """
    if settings.every is not None and step - since >= settings.every:
        return f"{settings.every} steps have passed since step {since} (kl.reset.every)"
    if settings.patience is None or step not in history:
        return ""
    figure = StopSettings(metric=settings.metric, patience=settings.patience, min_delta=settings.min_delta)
    ruling = stop_after({at: one for at, one in history.items() if at >= since}, figure, "kl.reset.patience")
    return ruling.because if ruling else ""


def stop_after(history: History, settings: StopSettings, key: str = "stop.patience") -> Ruling | None:
    """Returns the ruling that ends the run now, or None if it goes on.

    An evaluation is an improvement if it is better than the best before it by more than `min_delta`. The run ends when
    `patience` evaluations in a row were none. The evaluation before the first step sets the mark. `key` is the setting
    that the reason names.

    >>> half = Evaluation(versions={}, episodes=8, failed=0, metrics={"success": 0.5})
    >>> stop_after({0: half, 10: half, 20: half}, StopSettings(patience=2))
    Ruling(step=20, because='success has not been above 0.5, at step 0, in 2 evaluations (stop.patience)')
    """
    mark, marked_at, idle, step = math.nan, 0, 0, 0
    for step, figure in compared(history, settings):
        better = not math.isnan(figure.value) and (
            math.isnan(mark) or settings.gain(figure.value) - settings.gain(mark) > settings.min_delta
        )
        if better:
            mark, marked_at, idle = figure.value, step, 0
        elif step > 0:
            idle += 1
    if idle < settings.patience:
        return None
    beyond = "above" if settings.mode == "max" else "below"
    margin = f"{mark:.4g}" if not settings.min_delta else f"{mark:.4g} by more than {settings.min_delta:g}"
    because = f"{settings.metric} has not been {beyond} {margin}, at step {marked_at}, in {idle} evaluations"
    return Ruling(step=step, because=f"{because} ({key})")
