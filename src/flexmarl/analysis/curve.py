"""Curve of a run on one page: small panels, drawn by matplotlib from the values of metrics.jsonl.

Thin lines show single steps, thick lines their moving average, dots the evaluations on held-out tasks. An agent has the
same colour in every panel. The colours of numbered members (levels, hops) go from dark to light.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from flexmarl.analysis.timeline import natural
from flexmarl.events.metrics import time_shares, tokens_per_s

INK = "#2b2d33"
PALETTE = ("#2f6db3", "#d9772b", "#3f9b6c", "#a4508b", "#b8a12e", "#5aa7b8", "#8a5a44", "#6b6f7b")
STYLE: Any = {
    "font.size": 8.5,
    "text.color": INK,
    "axes.edgecolor": "#9a9da6",
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#d9dbe0",
    "grid.linewidth": 0.6,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
LABEL_GAP = 0.085
"""Least distance of two labels, as a share of a panel's height; less and they touch."""
CELL, TOP, BOTTOM, LEFT, BETWEEN = (4.2, 2.5), 0.65, 0.5, 0.55, 0.55
"""Inches: a panel with all around it; what is above and below all panels, left of each, and between two rows."""

Points = list[tuple[int, float]]


@dataclass(slots=True)
class Panel:
    """One small picture: points by the name of their line."""

    title: str
    train: dict[str, Points] = field(default_factory=dict)
    held_out: dict[str, Points] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the panel's lines, in natural order: `level_2` before `level_10`."""
        return sorted({*self.train, *self.held_out}, key=natural)

    @property
    def is_share(self) -> bool:
        """True if all values of the panel lie between 0 and 1."""
        return all(0 <= y <= 1 for points in (*self.train.values(), *self.held_out.values()) for _, y in points)


def panels_of(steps: Mapping[int, Mapping[str, float]]) -> list[Panel]:
    """Sorts the values of a run into panels by their names (docs/howto/metrics.md)."""
    success, reward = Panel("Success (share of episodes)"), Panel("Reward per agent (mean per turn)")
    shares = Panel("Team (mean per episode)")
    time, speed = Panel("Time (share of step; phases overlap)"), Panel("Speed (sampled tokens per second)")
    hidden = Panel("Training hidden behind rollout (share)")
    others: dict[str, Panel] = {}
    phases = {phase for values in steps.values() for phase in time_shares(values)}
    for step, values in steps.items():
        for name, value in values.items():
            match name.removeprefix("eval/").split("/"):
                case ["team", "success"]:
                    panel, line = success, "success"
                case ["overlap", "training_hidden"]:
                    panel, line = hidden, "training_hidden"
                case ["reward", agent]:
                    panel, line = reward, agent
                case ["agent", agent, metric]:
                    panel, line = others.setdefault(metric, Panel(_words(metric).capitalize() + " (by agent)")), agent
                case ["team", metric, member]:
                    panel, line = others.setdefault(metric, Panel(_words(metric).capitalize())), member
                case ["team", metric]:
                    panel, line = others.setdefault(metric, Panel(_words(metric).capitalize())), metric
                case _:
                    continue
            (panel.held_out if name.startswith("eval/") else panel.train).setdefault(line, []).append((step, value))
        if values.get("rollout/tokens") and values.get("time/step_s"):
            speed.train.setdefault("tokens", []).append((step, tokens_per_s(values)))
            for phase in phases:
                time.train.setdefault(phase, []).append((step, time_shares(values).get(phase, 0.0)))
    for metric, panel in list(others.items()):
        if panel.names == [metric] and panel.is_share:  # All shares with a single line go into one panel.
            shares.train |= panel.train
            shares.held_out |= panel.held_out
            del others[metric]
    if len(shares.names) == 1:
        shares.title = _words(shares.names[0]).capitalize()
    ordered = [success, reward, shares, *(others[metric] for metric in sorted(others)), time, hidden, speed]
    return [panel for panel in ordered if panel.names]


def draw_curve(steps: Mapping[int, Mapping[str, float]], path: Path, title: str) -> None:
    """Writes the picture to `path` as PNG."""
    panels = panels_of(steps)
    columns = min(3, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    agents = sorted({name for panel in panels if panel.title.startswith("Reward") for name in panel.names})
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(CELL[0] * columns, CELL[1] * rows + TOP + BOTTOM - BETWEEN), dpi=120)
        FigureCanvasAgg(figure)
        _leave_room(figure, panels)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel("step     thin: each step, thick: moving average, dots: held-out tasks", fontsize=8.5)
        for index, panel in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.set_xlim(min(steps), max(max(steps), min(steps) + 1))
            _draw(axes, panel, _colours(panel.names, agents))
        figure.savefig(path)


def _leave_room(figure: Figure, panels: Sequence[Panel]) -> None:
    """Places the panels. Matplotlib's own layouts measure every text, which takes as long as all the rest."""
    labels = {_label(name) for panel in panels if len(panel.names) > 1 for name in panel.names}
    points = (TextPath((0, 0), label, size=STYLE["font.size"]).get_extents().width for label in labels)
    (width, height), right = figure.get_size_inches(), 0.2 + max(points, default=0) / 72
    figure.subplots_adjust(left=LEFT / width, right=1 - right / width, wspace=1 / (CELL[0] / (LEFT + right) - 1))
    figure.subplots_adjust(top=1 - TOP / height, bottom=BOTTOM / height, hspace=1 / (CELL[1] / BETWEEN - 1))


def _draw(axes: Axes, panel: Panel, colours: Mapping[str, Any]) -> None:
    ends: dict[str, float] = {}
    for name in panel.names:
        if points := panel.train.get(name):
            x, y = zip(*points, strict=True)
            average = smooth(y)
            axes.plot(x, y, color=colours[name], linewidth=0.6, alpha=0.35)
            axes.plot(x, average, color=colours[name], linewidth=1.7)
            ends[name] = average[-1]
        if points := panel.held_out.get(name):
            x, y = zip(*points, strict=True)
            style = {"marker": "o", "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.7}
            axes.plot(x, y, color=colours[name], linestyle="none", zorder=3, clip_on=False, **style)
            ends.setdefault(name, y[-1])
    axes.set_title(panel.title, loc="left", fontsize=9.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if panel.is_share:
        axes.set_ylim(0, 1.02)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    elif axes.dataLim.ymin >= 0:
        axes.set_ylim(bottom=0)
    if len(ends) > 1:
        low, high = axes.get_ylim()
        places = spread([(end - low) / (high - low) for end in ends.values()], LABEL_GAP)
        for name, place in zip(ends, places, strict=True):
            axes.text(1.02, place, _label(name), color=colours[name], transform=axes.transAxes, va="center")


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving average over a twelfth of the run. At both ends of the run the window is cut off.

    >>> smooth([0.0, 1.0, 0.0])
    [0.0, 1.0, 0.0]
    """
    reach = len(values) // 24
    windows = (values[max(0, index - reach) : index + reach + 1] for index in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Moves places apart until neighbours are at least `gap` apart. Keeps their order and the middle of each cluster.

    >>> spread([0.5, 0.5, 0.9], gap=0.1)
    [0.45, 0.55, 0.9]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    clusters: list[tuple[float, list[int]]] = []  # (middle, members): a cluster is a block of labels that touch
    for index in order:
        middle, members = places[index], [index]
        while clusters and middle - clusters[-1][0] < gap * (len(members) + len(clusters[-1][1])) / 2 - 1e-12:
            before, others = clusters.pop()
            middle = (before * len(others) + middle * len(members)) / (len(others) + len(members))
            members = others + members
        clusters.append((middle, members))
    moved = list(places)
    for middle, members in clusters:
        for rank, index in enumerate(members):
            moved[index] = middle + gap * (rank - (len(members) - 1) / 2)
    return moved


def _colours(names: Sequence[str], agents: Sequence[str]) -> dict[str, Any]:
    if len(names) > 2 and all(any(c.isdigit() for c in name) for name in names):
        ramp = matplotlib.colormaps["viridis"]
        return {name: ramp(0.05 + 0.75 * index / (len(names) - 1)) for index, name in enumerate(names)}
    fixed = agents if set(names) <= {*agents} else names
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(fixed)}


def _words(name: str) -> str:
    return name.replace("_", " ")


def _label(name: str) -> str:
    """A long name's beginning and end, where names of one panel differ: 24 letters, which leave a panel its place."""
    return re.sub("^(.{11}).{2,}(.{12})$", r"\1…\2", _words(name))
