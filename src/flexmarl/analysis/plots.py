"""Pictures of a run on matplotlib, from its journal: queues, instances and trainers, steps and lengths on one page.

`flexmarl simulate` draws simulation.png. The journal of a real run gives the same picture.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from flexmarl.analysis.curve import INK, PALETTE, STYLE
from flexmarl.analysis.facts import Facts
from flexmarl.analysis.figures import SimulationReport
from flexmarl.analysis.timeline import natural
from flexmarl.events.overlap import Interval, intersection, seconds, union

MOST_LINES = 8
"""Most areas in a picture. If there are more policies, the smaller ones are added up and drawn in grey."""
OTHERS = "all others"
FEWEST_TICKS, MOST_TICKS = 3, 9
COLUMNS = 600
"""Number of moments at which a picture is drawn. More would not show at its width in pixels."""
ROLLOUT, VISIBLE, REST = PALETTE[0], PALETTE[1], "#c9ccd3"


def draw_run(facts: Facts, path: Path, title: str) -> None:
    """Writes the picture of a run to `path` as PNG; writes nothing if no step has ended."""
    if facts.steps:
        with matplotlib.rc_context(STYLE | {"axes.axisbelow": True}):
            picture(facts, title).savefig(path)


def picture(facts: Facts, title: str) -> Figure:
    """The picture of a run in which at least one step has ended."""
    with matplotlib.rc_context(STYLE | {"axes.axisbelow": True}):
        figure = _figure((11.0, 9.2), title)
        grid = figure.add_gridspec(3, 2, height_ratios=(1.0, 1.15, 1.0))
        _draw_queues(figure.add_subplot(grid[0, :]), facts)
        _draw_pools(figure.add_subplot(grid[1, :]), facts)
        _draw_steps(figure.add_subplot(grid[2, 0]), facts)
        _draw_lengths(figure.add_subplot(grid[2, 1]), facts)
        return figure


def draw_sweep(key: str, rows: Mapping[str, Mapping[str, SimulationReport]], path: Path) -> None:
    """Writes step times over the values of a setting as PNG; a line for each combination of the other settings."""
    with matplotlib.rc_context(STYLE):
        figure = _figure((6.4, 3.6), f"step time by {key}")
        axes = figure.add_subplot(1, 1, 1)
        for index, (name, reports) in enumerate(rows.items()):
            values = list(reports)
            means = [report.step_s.mean for report in reports.values()]
            errors = [report.step_s.std / report.steps**0.5 for report in reports.values()]
            colour = PALETTE[index % len(PALETTE)]
            axes.errorbar(values, means, errors, color=colour, marker="o", markersize=4, capsize=2, label=name)
        axes.set_title("seconds, mean of the steps and its standard error", loc="left", fontsize=9.5)
        axes.set_ylim(bottom=0)
        axes.set_xlabel(key)
        if len(rows) > 1:
            axes.legend(frameon=False, fontsize=7.5)
        figure.savefig(path)


def level(intervals: Iterable[Interval], moments: Sequence[float]) -> list[int]:
    """For each moment, the number of intervals that it lies in.

    >>> level([(0.0, 2.0), (1.0, 3.0)], [0.5, 1.5, 2.5, 3.5])
    [1, 2, 1, 0]
    """
    pairs = list(intervals)
    begins, ends = sorted(begin for begin, _ in pairs), sorted(end for _, end in pairs)
    return [bisect_right(begins, moment) - bisect_right(ends, moment) for moment in moments]


def plain_ticks(low: int, high: int) -> list[int]:
    """A few whole numbers from `low` to `high`, for a logarithmic axis; both are at least 1.

    >>> plain_ticks(3, 400), plain_ticks(2, 30_000), plain_ticks(3, 4)
    ([5, 10, 20, 50, 100, 200], [3, 10, 30, 100, 300, 1000, 3000, 10000, 30000], [3, 4])
    """
    for digits in ((1, 2, 5), (1, 3), (1,)):
        ticks = [digit * 10**power for power in range(len(str(high))) for digit in digits]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MOST_TICKS:
            break
    if len(ticks) < FEWEST_TICKS:  # Less than a decade.
        ticks = [round(tick) for tick in MaxNLocator(MOST_TICKS // 2, integer=True).tick_values(low, high)]
    return sorted({tick for tick in ticks if low <= tick <= high})


def _figure(size: tuple[float, float], title: str) -> Figure:
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
    return figure


def _draw_queues(axes: Axes, facts: Facts) -> None:
    """Draws the waiting calls of each policy as stacked areas."""
    began, ended = _reach(facts)
    moments, places = _moments(began, ended), [counts.t for counts in facts.queue_counts]
    waiting: defaultdict[str, list[float]] = defaultdict(list)
    policies = sorted({policy for counts in facts.queue_counts for policy in counts.queued}, key=natural)
    for moment in moments:
        place = bisect_right(places, moment) - 1
        queued = facts.queue_counts[place].queued if place >= 0 else {}
        for policy in policies:
            waiting[policy].append(queued.get(policy, 0))
    any_waited = any(map(any, waiting.values()))
    _areas(axes, moments, waiting if any_waited else {}, began)
    axes.set_ylim(bottom=0)
    _head(axes, "Calls that wait for a slot, by policy", facts, began)
    if not any_waited:
        axes.set_yticks([])
        remark = "no call waited" if facts.queue_counts else "the queues were not counted"
        axes.text(0.5, 0.5, remark, transform=axes.transAxes, ha="center", va="center")


def _draw_pools(axes: Axes, facts: Facts) -> None:
    """Draws instances at work above the zero line and trainers at work below it."""
    began, ended = _reach(facts)
    moments = _moments(began, ended)
    policy_of = {call.instance: call.policy for call in facts.calls}
    serving: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(moments))
    for instance, busy in facts.serving().items():
        serving[policy_of[instance]] = [
            a + b for a, b in zip(serving[policy_of[instance]], level(busy, moments), strict=True)
        ]
    training: dict[str, list[int]] = {policy: level(busy, moments) for policy, busy in facts.training().items()}
    names = sorted({*serving, *training}, key=natural)
    _areas(axes, moments, {name: serving[name] for name in names}, began)
    below = {name: [-value for value in training.get(name, [0] * len(moments))] for name in names}
    _areas(axes, moments, below, began, labels=False)
    axes.axhline(0, color="#9a9da6", linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    _head(axes, "Instances at work (above) and trainers at work (below), by policy", facts, began)


def _draw_steps(axes: Axes, facts: Facts) -> None:
    """Draws a bar for each step: rollout, visible training, the rest; and hidden training as a line."""
    playing = facts.playing
    working = union(interval for busy in facts.training().values() for interval in busy)
    numbers = [step.step + 1 for step in facts.steps]
    whole = [[(step.began, step.ended)] for step in facts.steps]
    rollout = [seconds(intersection(step, playing)) for step in whole]
    trained = [seconds(intersection(step, working)) for step in whole]
    hidden = [seconds(intersection(intersection(step, working), playing)) for step in whole]
    visible = [total - overlapped for total, overlapped in zip(trained, hidden, strict=True)]
    rest = [seconds(step) - a - b for step, a, b in zip(whole, rollout, visible, strict=True)]
    below = [0.0] * len(numbers)
    for name, values, colour in (("rollout", rollout, ROLLOUT), ("training", visible, VISIBLE), ("other", rest, REST)):
        axes.bar(numbers, values, bottom=below, color=colour, width=0.8, label=name)
        below = [a + b for a, b in zip(below, values, strict=True)]
    axes.plot(numbers, hidden, color=INK, marker="o", markersize=3, linewidth=1, label="training, hidden")
    axes.set_title("Seconds of each step, by its number", loc="left", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.set_ylim(0, max(below) * 1.25)
    axes.legend(frameon=False, fontsize=7.5, ncols=4, loc="upper left", handlelength=1.2, columnspacing=1.2)


def _draw_lengths(axes: Axes, facts: Facts) -> None:
    """Draws the distribution of sampled tokens, over calls and over trajectories."""
    tokens: defaultdict[str, int] = defaultdict(int)
    for call in facts.calls:
        tokens[call.trajectory] += call.sampled_tokens
    axes.set_xscale("log")
    lengths = {"a call": [call.sampled_tokens for call in facts.calls], "a trajectory": [*tokens.values()]}
    for (name, values), colour in zip(lengths.items(), PALETTE, strict=False):
        values = sorted(max(1, value) for value in values)
        if values:
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            axes.step(values, shares, where="post", color=colour, linewidth=1.5, label=name)
    drawn = [max(1, value) for values in lengths.values() for value in values]
    axes.set_xticks(plain_ticks(min(drawn), max(drawn)) if drawn else [])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.02)
    axes.set_title("Share that sampled at most so many tokens", loc="left", fontsize=9.5)
    axes.legend(frameon=False, fontsize=7.5, loc="lower right")


def _areas(
    axes: Axes, moments: Sequence[float], values: Mapping[str, Sequence[float]], began: float, *, labels: bool = True
) -> None:
    shown = _most(values)
    colours = _colours(shown)
    below = [0.0] * len(moments)
    for name, line in shown.items():
        above = [a + b for a, b in zip(below, line, strict=True)]
        style: dict[str, Any] = {"color": colours[name], "linewidth": 0, "alpha": 0.85, "step": "post"}
        axes.fill_between([m - began for m in moments], below, above, label=name if labels else None, **style)
        below = above


def _most(values: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """At most MOST_LINES lines: the largest ones by name, and the sum of the others under OTHERS."""
    if len(values) <= MOST_LINES:
        return {name: list(line) for name, line in values.items()}
    largest = sorted(values, key=lambda name: -sum(map(abs, values[name])))[: MOST_LINES - 1]
    kept = {name: list(line) for name, line in values.items() if name in largest}
    rest = [line for name, line in values.items() if name not in largest]
    return kept | {OTHERS: [float(sum(column)) for column in zip(*rest, strict=True)]}


def _colours(names: Iterable[str]) -> dict[str, str]:
    named = [name for name in names if name != OTHERS]
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(named)} | {OTHERS: REST}


def _head(axes: Axes, title: str, facts: Facts, began: float) -> None:
    """Draws the title, the legend and the ends of the steps."""
    _, ended = _reach(facts)
    for step in facts.steps[:-1]:
        axes.axvline(step.ended - began, color="#9a9da6", linewidth=0.6, linestyle=(0, (2, 2)))
    axes.set_title(title, loc="left", fontsize=9.5)
    axes.set_xlim(0, ended - began)
    axes.set_xlabel("seconds; dashed: a step ends", fontsize=7.5)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), handlelength=1.0)


def _reach(facts: Facts) -> Interval:
    return facts.steps[0].began, facts.steps[-1].ended


def _moments(began: float, ended: float) -> list[float]:
    return [began + (ended - began) * place / COLUMNS for place in range(COLUMNS + 1)]
