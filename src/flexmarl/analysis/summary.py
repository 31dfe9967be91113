"""Summary of a run on disk, from its metrics and its journal: summary.json, curve.png and timeline.json.

The journal gives the history of the run's commands and processes. A process that is lost may be replaced, either by a
process of the same name or by an instance with a new name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from flexmarl.analysis.comparison import REWARD, Measured, difference, held_out_figures
from flexmarl.analysis.timeline import CommandTimes, render_timeline
from flexmarl.analysis.troubles import Troubles
from flexmarl.errors import FlexmarlError
from flexmarl.events.event import Event
from flexmarl.events.journal import read_run
from flexmarl.events.metrics import read_metrics
from flexmarl.events.run_events import Evaluated, ProcessEnded, ProcessStarted, WorkerLost
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.safe_json import json_text
from flexmarl.events.serving_events import InstanceLost, InstanceReplaced
from flexmarl.imports import Lazy
from flexmarl.records import WorkerId

if TYPE_CHECKING:
    from flexmarl.analysis import curve
else:
    curve = Lazy("flexmarl.analysis.curve")  # It imports matplotlib, which takes a quarter of a second.


@dataclass(slots=True, kw_only=True)
class History:
    """The commands and the processes of a run."""

    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, `pid` and `node` of each process that the last command started and did not lose."""
    lost: int = 0
    """How often a process was lost, in all commands."""
    replaced: int = 0
    """How many of the lost processes were replaced."""
    earlier_s: float = 0.0
    """Seconds that all commands before the last one took."""
    start_s: float = 0.0
    """Seconds that all commands took to start Ray and the workers."""
    missing: set[WorkerId] = field(default_factory=set)
    """Processes of the last command that were lost and are not replaced so far."""
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    """The newest evaluation after each number of steps."""
    troubles: Troubles = field(default_factory=Troubles)
    """Failures, filtered groups and alarms of all commands."""


def history_of(events: Iterable[Event]) -> History:
    """Reads the history from the events that `read_run` yields."""
    history, commands = History(), CommandTimes()
    for event in events:
        if commands.follow(event):
            history.processes, history.missing, history.earlier_s = {}, set(), commands.began
        if start := commands.start(event):
            history.start_s += start[1] - start[0]
        match event:
            case ProcessStarted():
                history.processes[event.process] = {"pid": event.pid, "node": event.node}
                _replace(history, event.process)
            case WorkerLost():
                _lose(history, event.process)
            case InstanceLost():
                _lose(history, WorkerId.engine(event.instance))
            case Evaluated():
                history.evaluations[event.step] = event
            case ProcessEnded():
                history.processes.pop(event.process, None)
            case InstanceReplaced():
                _replace(history, WorkerId.engine(event.replaces))
        history.troubles.note(event)
    return history


def _lose(history: History, process: WorkerId) -> None:
    """Counts a lost process once. Both the cluster (process) and the pool (instance) may report the same loss."""
    history.lost += process not in history.missing
    history.missing.add(process)
    history.processes.pop(process, None)


def _replace(history: History, process: WorkerId) -> None:
    history.replaced += process in history.missing
    history.missing.discard(process)


Figures = Mapping[str, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a whole run; as JSON it is summary.json."""

    eval: Mapping[str, Figures]
    """`before`: every figure of the evaluation before the first step, `success` among them; `after`: of the last one
    after a step. Empty without such an evaluation."""
    agents: Mapping[str, Figures]
    """By agent: `reward_before`, `reward_after`, and so on for its other figures. On held-out tasks if evaluated.
    What was not measured is absent, such as the rewards of an evaluation of which all episodes failed."""
    policies: Mapping[str, Mapping[str, int]]
    """By policy: its newest `version`."""
    wall_s: float
    """Seconds of all commands, if the caller gave those of the last one. Otherwise the sum over the steps."""
    time: Figures
    """Seconds by phase, over all commands. `start` is until Ray and the workers are ready. Phases may overlap."""
    steps: int
    tokens: int
    """Tokens sampled in training rollouts."""
    processes: Mapping[str, Mapping[str, Any]]
    """By process name: `pid` and `node`."""
    processes_lost: int
    processes_replaced: int
    training_hidden: float | None
    """Share of all training that was hidden behind rollout; None if nothing was trained."""
    event_loop_lag: Figures
    """`mean_ms` and `max_ms`; empty if it was not measured."""
    timeline: str
    """Path of timeline.json."""
    troubles: Mapping[str, Any] = field(default_factory=dict)
    """Failed episodes, filtered groups and skipped updates by reason, the last evaluation's failures, and alarms."""
    failures: str = ""
    """Path of the folder with the first failure of each kind; empty if none was kept."""
    held_out: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """`before` and `after`: the number of `episodes` of these evaluations, and of `tasks` if the episodes were kept."""
    intervals: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By figure of the evaluations, `before`, `after` and `change`, as far as measured: its `value`, `low` and `high`,
    and `how` the interval was found. `low` and `high` are null where the episodes were not kept."""


def summarise(
    steps: Mapping[int, Figures],
    history: History,
    *,
    timeline: str = "",
    failures: str = "",
    wall_s: float | None = None,
    held_out: Mapping[str, "HeldOut"] = MappingProxyType({}),
) -> Summary:
    """Computes the summary from the metrics of each step and the history.

    `wall_s`: seconds of the last command. `held_out`: the evaluations `before` and `after`.
    """
    evals = _ends(_evaluations(steps, history))
    evaluated = {when: evals.get(when, {}) for when in ("before", "after")}
    totals: dict[str, float] = {}
    latest: dict[str, float] = {}
    for values in steps.values():
        latest |= values
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value
    return Summary(
        eval=evaluated,
        agents=_agents(steps, **evaluated),
        policies={
            name.removeprefix("version/"): {"version": int(value)}
            for name, value in latest.items()
            if name.startswith("version/")
        },
        wall_s=round(totals.get("time/step_s", 0.0) if wall_s is None else history.earlier_s + wall_s, 3),
        time=({"start": round(history.start_s, 3)} if history.start_s else {})
        | {
            name.removeprefix("time/").removesuffix("_s"): round(totals[name], 3)
            for name in totals
            if name.startswith("time/") and name != "time/step_s"
        },
        steps=max(steps, default=0),
        tokens=int(totals.get("rollout/tokens", 0)),
        processes=history.processes,
        processes_lost=history.lost,
        processes_replaced=history.replaced,
        training_hidden=_mean_over(steps, "overlap/training_hidden", weight="overlap/training_s"),
        event_loop_lag=_lag(steps),
        timeline=timeline,
        troubles=history.troubles.as_json(totals),
        failures=failures,
        held_out={when: one.counts for when, one in held_out.items()},
        intervals=_intervals(held_out),
    )


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One evaluation, as the numbers that its figures are means of."""

    episodes: int
    figures: Mapping[str, Measured]

    @property
    def counts(self) -> dict[str, int]:
        """Number of episodes, and of tasks if it is known."""
        tasks = {task for measured in self.figures.values() for task in measured.tasks}
        return {"episodes": self.episodes} | ({"tasks": len(tasks)} if tasks else {})


def read_held_out(folder: RunFolder, history: History) -> dict[str, HeldOut]:
    """Reads the evaluations `before` and `after` of a run, as far as it has them; none if one kept cannot be read."""
    ends = _ends(history.evaluations)
    try:
        return {when: HeldOut(of.evaluation["episodes"], held_out_figures(folder, of)) for when, of in ends.items()}
    except FlexmarlError:  # Its episodes may be of an older format. A run does not fail at its end because of that.
        return {}


def _ends(evaluations: Mapping[int, T]) -> dict[str, T]:
    """`before`: the evaluation at step 0; `after`: the last later one. Neither stands in for the other."""
    found = {"before": evaluations[0]} if 0 in evaluations else {}
    return found | ({"after": evaluations[last]} if (last := max(evaluations, default=0)) else {})


def _intervals(held_out: Mapping[str, HeldOut]) -> dict[str, dict[str, Any]]:
    """By figure, its estimates before and after, and that of its change."""
    found: dict[str, dict[str, Any]] = {}
    for name in sorted({name for one in held_out.values() for name in one.figures}):
        measured = {when: one.figures[name] for when, one in held_out.items() if name in one.figures}
        estimates = {when: one.interval() for when, one in measured.items()}
        if len(measured) == 2:
            estimates["change"] = difference(measured["before"], measured["after"], same_tasks=True)
        found[name] = {when: asdict(estimate) for when, estimate in estimates.items()}
    return found


def render_summary(run_dir: Path, *, wall_s: float | None = None) -> Summary:
    """Writes summary.json, curve.png and timeline.json from the metrics and the journal of the run folder.

    `wall_s` is the seconds that the last command took.
    """
    folder = RunFolder(run_dir)
    render_pictures(run_dir)
    history = history_of(read_run(folder.journal))
    summary = summarise(
        read_metrics(folder.metrics),
        history,
        timeline=str(folder.timeline),
        failures=str(folder.failures) if folder.failures.is_dir() else "",
        wall_s=wall_s,
        held_out=read_held_out(folder, history),
    )
    folder.summary.write_text(json_text(asdict(summary), figures=True, indent=2) + "\n", encoding="utf-8")
    return summary


def render_pictures(run_dir: Path) -> None:
    """Writes curve.png and timeline.json from the files that exist. The run may have failed, or still be running."""
    folder = RunFolder(run_dir)
    if folder.metrics.exists():
        curve.draw_curve(read_metrics(folder.metrics), folder.curve, run_dir.name)
    if folder.journal.exists():
        render_timeline(run_dir)


def _evaluations(steps: Mapping[int, Figures], history: History) -> Mapping[int, Figures]:
    """Figures of every evaluation, by completed steps.

    The journal says what was measured, since metrics.jsonl may be gone, or have figures of an earlier play as well.
    """
    found = {step: figures for step, values in steps.items() if (figures := _evaluated(values))}
    for step, event in history.evaluations.items():
        figures = event.evaluation["metrics"] | {f"{REWARD}{k}": v for k, v in event.evaluation["rewards"].items()}
        # In the journal, a number that is not finite is a text.
        found[step] = {name: value for name, value in figures.items() if isinstance(value, int | float)}
    return found


def _evaluated(values: Figures) -> dict[str, float]:
    held_out = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    return {name.removeprefix("team/"): value for name, value in held_out.items()}


def _agents(steps: Mapping[int, Figures], before: Figures, after: Figures) -> dict[str, dict[str, float]]:
    """Figures of each agent before and after training.

    They are those of the evaluations; without one, means over the first and the last tenth of steps.
    """
    if not (before or after):
        series: dict[str, list[float]] = {}
        for values in steps.values():
            for name, value in values.items():
                series.setdefault(name, []).append(value)
        tenths = {name: max(1, len(of) // 10) for name, of in series.items()}
        if min(steps, default=0) <= 1:  # Otherwise the first steps' figures are gone.
            before = {name: fmean(of[: tenths[name]]) for name, of in series.items()}
        after = {name: fmean(of[-tenths[name] :]) for name, of in series.items()}
    agents: dict[str, dict[str, float]] = {}
    for name in sorted({*before, *after}):
        kind, _, rest = name.partition("/")
        if kind in ("reward", "agent"):
            agent, _, figure = rest.partition("/")
            figures = agents.setdefault(agent, {})
            for when, of in (("before", before), ("after", after)):
                if name in of:
                    figures[f"{figure or 'reward'}_{when}"] = of[name]
    return agents


def _mean_over(steps: Mapping[int, Figures], name: str, *, weight: str) -> float | None:
    weighted = [(values[name], values[weight]) for values in steps.values() if name in values]
    total = sum(weight for _, weight in weighted)
    return round(sum(value * weight for value, weight in weighted) / total, 4) if total else None


def _lag(steps: Mapping[int, Figures]) -> dict[str, float]:
    mean = _mean_over(steps, "lag/event_loop_ms", weight="time/step_s")
    if mean is None:
        return {}
    worst = max(values.get("lag/event_loop_max_ms", 0.0) for values in steps.values())
    return {"mean_ms": round(mean, 2), "max_ms": round(worst, 2)}
