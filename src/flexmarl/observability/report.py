"""Report of a finished run: summary.json, the table before and after, and curve.png."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flexmarl.observability.curve import draw_curve
from flexmarl.observability.progress import duration
from flexmarl.observability.run_folder import RunFolder
from flexmarl.observability.sinks import read_metrics

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of a whole run; as JSON it is summary.json."""

    eval: Mapping[str, Figures]
    """`before` and `after`: every figure of the first and the last evaluation, `success` among them."""
    agents: Mapping[str, Figures]
    """By agent: `reward_before`, `reward_after`, and so on for its other figures; held-out where evaluated."""
    policies: Mapping[str, Mapping[str, int]]
    """By policy: `version`, its updates."""
    wall_s: float
    """Of the whole command, when the caller knows it; otherwise the sum over the steps."""
    time: Figures
    """Seconds by phase, over all steps; phases may overlap."""
    steps: int
    tokens: int
    """Sampled in training rollouts."""


def summarise(steps: Mapping[int, Figures], *, wall_s: float | None = None) -> Summary:
    """Draws the figures of a run together from its values by step."""
    evals = [_evaluated(values) for values in steps.values()]
    evals = [values for values in evals if values] or [{}]
    totals: dict[str, float] = {}
    latest: dict[str, float] = {}
    for values in steps.values():
        latest |= values
        for name, value in values.items():
            totals[name] = totals.get(name, 0.0) + value
    return Summary(
        eval={"before": evals[0], "after": evals[-1]},
        agents=_agents(steps, evals),
        policies={
            name.removeprefix("version/"): {"version": int(value)}
            for name, value in latest.items()
            if name.startswith("version/")
        },
        wall_s=round(totals.get("time/step_s", 0.0) if wall_s is None else wall_s, 3),
        time={
            name.removeprefix("time/").removesuffix("_s"): round(totals[name], 3)
            for name in totals
            if name.startswith("time/") and name != "time/step_s"
        },
        steps=max(steps, default=0),
        tokens=int(totals.get("rollout/tokens", 0)),
    )


def render_summary(run_dir: Path, *, wall_s: float | None = None) -> Summary:
    """Reads metrics.jsonl of the run folder, writes summary.json and curve.png into it, and returns the summary."""
    folder = RunFolder(run_dir)
    steps = read_metrics(folder.metrics)
    summary = summarise(steps, wall_s=wall_s)
    folder.summary.write_text(json.dumps(asdict(summary), indent=2) + "\n", encoding="utf-8")
    draw_curve(steps, folder.curve, run_dir.name)
    return summary


def summary_table(summary: Summary) -> RenderableType:
    """The summary for people: each figure before, after and the change, then what it took."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    before, after = summary.eval["before"], summary.eval["after"]
    for name in sorted({*before, *after}, key=lambda name: (name != "success", name)):
        if not name.startswith(("reward/", "agent/")):
            _add_row(table, name, before.get(name), after.get(name), bold=name == "success")
    table.add_section()
    for agent, figures in summary.agents.items():
        for name in [key.removesuffix("_before") for key in figures if key.endswith("_before")]:
            _add_row(table, f"{agent}: {name}", figures[f"{name}_before"], figures[f"{name}_after"])
    return Group(table, Text(_cost(summary)))


def _evaluated(values: Figures) -> dict[str, float]:
    held_out = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    return {name.removeprefix("team/"): value for name, value in held_out.items()}


def _agents(steps: Mapping[int, Figures], evals: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Held-out figures of each agent; where there are none, the mean of the first and the last tenth of training."""
    agents: dict[str, dict[str, float]] = {}
    names = {name.removeprefix("eval/") for values in steps.values() for name in values}
    for name in sorted(names):
        kind, _, rest = name.partition("/")
        if kind not in ("reward", "agent"):
            continue
        agent, _, figure = rest.partition("/")
        series = [values[name] for values in evals if name in values]
        tenth = 1
        if not series:
            series = [values[name] for values in steps.values() if name in values]
            tenth = max(1, len(series) // 10)
        figures = agents.setdefault(agent, {})
        figures[f"{figure or 'reward'}_before"] = fmean(series[:tenth])
        figures[f"{figure or 'reward'}_after"] = fmean(series[-tenth:])
    return agents


def _add_row(table: Table, name: str, before: float | None, after: float | None, *, bold: bool = False) -> None:
    change = "" if before is None or after is None else f"{after - before:+.3f}"
    cells = ["" if value is None else f"{value:.3f}" for value in (before, after)]
    table.add_row(name.replace("_", " "), *cells, change, style="bold" if bold else "")


def _cost(summary: Summary) -> str:
    phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in summary.time.items())
    versions = ", ".join(f"{name} v{policy['version']}" for name, policy in summary.policies.items())
    return f"  {summary.steps} steps, {summary.tokens:,} tokens in {duration(summary.wall_s)} ({phases})\n  {versions}"
