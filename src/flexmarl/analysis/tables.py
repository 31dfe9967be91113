"""Tables on rich: the end of a training run; simulation reports, one, several side by side, or a sweep by row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from flexmarl.analysis.comparison import REWARD
from flexmarl.analysis.figures import SimulationReport
from flexmarl.analysis.intervals import Estimate, bounds
from flexmarl.analysis.summary import Summary
from flexmarl.analysis.timeline import natural
from flexmarl.analysis.troubles import trouble_rows
from flexmarl.events.progress import duration

MOST_QUEUES = 8
"""Most queues that are shown, longest first. A hundred policies would hide all other figures."""


AGENT = "agent/"
"""Begins the name of a figure of one agent among the figures of an evaluation, other than its reward."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of a table: its name, how its value is computed from a report, and how it is written."""

    name: str
    value: Callable[[SimulationReport], float | None]
    shown: Callable[[float], str]
    compared: bool = False
    """True if comparisons show the ratio of this figure to that of the first run."""


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if value >= 10 else f"{value:.3g} s"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _number(value: float) -> str:
    return f"{value:.3g}"


FIGURES = (
    Figure("step, mean", lambda run: run.step_s.mean, _seconds, compared=True),
    Figure("step, standard deviation", lambda run: run.step_s.std, _seconds),
    Figure("  rollout", lambda run: run.rollout_s, _seconds, compared=True),
    Figure("  training, visible", lambda run: run.training_s, _seconds, compared=True),
    Figure("  other", lambda run: run.other_s, _seconds, compared=True),
    Figure("training, hidden behind rollout", lambda run: run.hidden_s, _seconds),
    Figure("makespan of all steps", lambda run: run.makespan_s, _seconds, compared=True),
    Figure("lower bound of a step", lambda run: run.bound and run.bound.total_s, _seconds),
    Figure("step by lower bound", lambda run: run.bound_ratio, _number),
    Figure("sampled tokens per second", lambda run: run.tokens_per_s, _count, compared=True),
    Figure("turns", lambda run: run.turns, _count),
    Figure("utilisation", lambda run: run.utilisation, _share, compared=True),
    Figure("  rollout devices", lambda run: run.rollout_utilisation, _share),
    Figure("  training devices", lambda run: run.training_utilisation, _share),
    Figure("moves of instances", lambda run: run.moves, _count),
    Figure("swaps of trainers", lambda run: run.swaps, _count),
    Figure("staleness, mean in updates", lambda run: run.staleness_mean, _number),
    Figure("staleness, most", lambda run: run.staleness_most, _count),
    Figure("publication lag", lambda run: run.publish_lag_s, _seconds),
    Figure("length of trained by admitted groups", lambda run: run.length_bias and run.length_bias.ratio, _number),
    Figure("distance of their distributions", lambda run: run.length_bias and run.length_bias.ks, _number),
)
SWEPT = {
    "step, mean": "step",
    "  rollout": "rollout",
    "  training, visible": "visible training",
    "sampled tokens per second": "tokens per second",
    "utilisation": "devices busy",
    "step by lower bound": "by lower bound",
}
"""Figures that the table of a sweep shows, with their headings there."""


def report_table(title: str, report: SimulationReport) -> Table:
    """Table of one run, with the queues of its policies."""
    table = Table(title=title, box=box.SIMPLE_HEAD, show_header=False, title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("", style="dim")
    for figure in FIGURES:
        value = figure.value(report)
        if value is not None:
            table.add_row(figure.name, figure.shown(value), _remark(figure, report))
    table.add_section()
    longest = sorted(report.queues, key=lambda policy: (-report.queues[policy].mean, natural(policy)))
    for policy in longest[:MOST_QUEUES]:
        queue = report.queues[policy]
        table.add_row(f"queue of {policy}", f"{queue.mean:.1f}", f"at most {queue.most}")
    if len(longest) > MOST_QUEUES:
        table.add_row(f"and {len(longest) - MOST_QUEUES} shorter queues", "", "")
    return table


def comparison_table(reports: Mapping[str, SimulationReport]) -> Table:
    """Table of several runs side by side, with ratios to the first one."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("ratios: to the first")
    for name in reports:
        table.add_column(name, justify="right")
    first = next(iter(reports.values()))
    for figure in FIGURES:
        cells = [_compared(figure, report, None if report is first else first) for report in reports.values()]
        if any(cells):
            table.add_row(figure.name, *cells)
    return table


def sweep_table(keys: Sequence[str], rows: Mapping[tuple[str, ...], SimulationReport]) -> Table:
    """Table of a sweep, with a row for each combination of the values of `keys`.

    Nothing is cut: headings have a word in each line, and a word that is too long goes on in the next line.
    """
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for key in _short_names(keys):
        table.add_column(key, overflow="fold")
    figures = [figure for figure in FIGURES if figure.name in SWEPT]
    for figure in figures:
        table.add_column(SWEPT[figure.name].replace(" ", "\n"), justify="right", overflow="fold")
    for values, report in rows.items():
        table.add_row(*values, *(_compared(figure, report, None) for figure in figures))
    return table


def _short_names(keys: Sequence[str]) -> list[str]:
    """The last part of each dotted key; the whole key where two end alike.

    >>> _short_names(["batch.groups", "a.engine.slots", "b.engine.slots"])
    ['groups', 'a.engine.slots', 'b.engine.slots']
    """
    last = [key.rpartition(".")[2] for key in keys]
    return [name if last.count(name) == 1 else key for name, key in zip(last, keys, strict=True)]


def _remark(figure: Figure, report: SimulationReport) -> str:
    if figure.name == "step, mean":
        return f"{report.step_s.least:.1f} to {report.step_s.most:.1f} s, {report.steps} steps"
    if figure.name == "lower bound of a step" and report.bound:
        return f"{report.bound.because} binds"
    return ""


def _compared(figure: Figure, report: SimulationReport, first: SimulationReport | None) -> str:
    value = figure.value(report)
    if value is None:
        return ""
    base = figure.value(first) if first and figure.compared else None
    return f"{figure.shown(value)}  {value / base:.2f}x" if base else figure.shown(value)


def summary_table(summary: Summary) -> RenderableType:
    """The summary as a table: each figure before, after and the change; then time, processes and other costs."""
    return Group(_FigureTable(summary), _cost(summary))


@dataclass(frozen=True, slots=True)
class _FigureTable:
    """Each figure before, after and the change, with intervals: beside the figures if the screen is wide enough."""

    summary: Summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        beside = _before_and_after(self.summary, " ")
        if not beside.row_count:
            yield Text("  There are no figures before and after: no turn was rewarded.\n")
            return
        fits = console.measure(beside, options=options.update(width=10_000)).maximum <= options.max_width
        yield beside if fits else _before_and_after(self.summary, "\n")
        if any(bounds(Estimate(**one)) for of in self.summary.intervals.values() for one in of.values()):
            yield Text("  [low, high]: 95% interval. A change whose interval holds 0 may be chance.\n", "dim")


def _before_and_after(summary: Summary, between: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    held_out = any(summary.eval.values())
    steps = {} if held_out else {"before": "first step", "after": "last step"}
    for column in ("before", "after", "change"):
        table.add_column(
            "\n".join((steps.get(column, column), *_played(summary.held_out.get(column, {})))), justify="right"
        )

    def add_row(label: str, name: str, before: float | None, after: float | None) -> None:
        change = None if before is None or after is None else after - before
        of = summary.intervals.get(name, {})
        cells = [
            "-"
            if value is None
            else f"{value:{shown}}{between}{bounds(Estimate(**of[when]), '{:.3f}') if when in of else ''}"
            for when, value, shown in (("before", before, ".3f"), ("after", after, ".3f"), ("change", change, "+.3f"))
        ]
        bold = "bold" if name == "success" else ""
        table.add_row(label.replace("_", " "), *map(str.rstrip, cells), style=bold)

    before, after = summary.eval["before"], summary.eval["after"]
    for name in sorted({*before, *after}, key=lambda name: (name != "success", name)):
        if not name.startswith((REWARD, AGENT)):
            add_row(name, name, before.get(name), after.get(name))
    table.add_section()
    for agent, figures in summary.agents.items():
        for name in dict.fromkeys(key.rpartition("_")[0] for key in figures):
            path = f"{REWARD}{agent}" if name == "reward" else f"{AGENT}{agent}/{name}"
            add_row(f"{agent}: {name}", path, figures.get(f"{name}_before"), figures.get(f"{name}_after"))
    return table


def _played(counts: Mapping[str, int]) -> list[str]:
    """The number of held-out tasks, or of episodes if the tasks are not known."""
    kind = "tasks" if "tasks" in counts else "episodes"
    return [f"{counts[kind]} {kind}"] if counts else []


def _cost(summary: Summary) -> RenderableType:
    """Time, tokens, policies and processes of the run, a line for each."""
    outside = summary.wall_s - sum(summary.time.values())
    times = {**summary.time, **({"other": outside} if outside >= 1 else {})}
    phases = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in times.items())
    phases += "; they overlap" if outside <= -1 else ""
    rows = {
        "took": f"{summary.steps} steps, {summary.tokens:,} tokens in {duration(summary.wall_s)} ({phases})",
        "policies": ", ".join(f"{name} v{policy['version']}" for name, policy in summary.policies.items()),
    }
    if summary.training_hidden is not None:
        rows["overlap"] = f"{summary.training_hidden:.0%} of training hidden behind rollout"
    if lag := summary.event_loop_lag:
        rows["event loop"] = f"wakes {lag['mean_ms']:.1f} ms late on average, {lag['max_ms']:.0f} ms at most"
    if summary.processes:
        rows["processes"] = _processes(summary)
    rows |= trouble_rows(summary.troubles)
    if summary.failures:
        rows["tracebacks"] = f"the first of each kind: {summary.failures}"
    if summary.timeline:
        rows["timeline"] = f"open in ui.perfetto.dev: {summary.timeline}"
    table = Table.grid(padding=(0, 2))
    for name, text in rows.items():
        table.add_row(Text(f"  {name}", "dim"), Text(text, overflow="fold"))
    return table


def _processes(summary: Summary) -> str:
    nodes = {process["node"] for process in summary.processes.values()}
    count = f"{len(summary.processes)} on {len(nodes)} machine{'s' if len(nodes) > 1 else ''}"
    lost = f", {summary.processes_lost} lost, {summary.processes_replaced} replaced" if summary.processes_lost else ""
    names = ", ".join(f"{name} {process['pid']}" for name, process in summary.processes.items())
    return f"{count}{lost}: {names}"
