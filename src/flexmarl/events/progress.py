"""Progress on a console: live lines on a terminal; elsewhere, e.g. in a log file, one plain line per step."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flexmarl.events.untrained import NotTrained

REFRESH_INTERVAL_S = 0.5
"""Shortest time between two drawings. A drawing takes 3 to 5 ms of the event loop's time: at most 1 %."""
SPARKS = "▁▂▃▄▅▆▇█"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, characters that change the direction of writing, lone surrogates."""


def printable(text: str) -> str:
    r"""Escapes control characters: a terminal shows the returned text and does not obey it.

    >>> print(printable("\x1b[2J\u202eabc"))
    \x1b[2J\u202eabc
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)


class SafeConsole(Console):
    """Console of rich on which only rich itself controls the terminal, not the text that is printed.

    A notebook gets plain lines, as a log file does: rich would make an HTML object of each.
    """

    def __init__(self, *, quiet: bool = False, stderr: bool = False) -> None:
        super().__init__(markup=False, highlight=False, quiet=quiet, stderr=stderr, force_jupyter=False)

    @property
    def is_terminal(self) -> bool:
        """True if the output can move its cursor. Rich takes a file for a terminal that FORCE_COLOR asks to colour.

        Notebook kernels set FORCE_COLOR, so that each frame of a live panel would stay in the saved notebook.
        """
        said = self._environ.get("TTY_COMPATIBLE") == "1"
        return super().is_terminal and (said or getattr(self.file, "isatty", bool)())

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            part if part.control else Segment(printable(part.text), part.style) for part in buffer
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView:
    """All that the screen shows at one moment."""

    step: int
    """Steps completed."""
    steps: int
    elapsed_s: float
    phase: str = ""
    """Present phase of the run, e.g. `rollout 31/64 episodes`."""
    success: float | None = None
    """Success of the last completed step, 0 to 1."""
    ended: int | None = None
    """Episodes that ended in it, of which success and rewards are; None where a step trains just these."""
    success_curve: Sequence[float] = ()
    """One value per completed step, 0 to 1."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward by agent, of the last completed step."""
    tokens_per_s: float = 0.0
    running: Mapping[str, int] = field(default_factory=dict)
    """Calls in the engines, by policy."""
    queued: Mapping[str, int] = field(default_factory=dict)
    """Calls that wait for an engine, by policy."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Served version, by policy."""
    time_shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the last completed step that each phase took. Phases may overlap."""
    training_hidden: float | None = None
    """Share of training that was hidden behind rollout, of the last completed step."""
    processes: int = 0
    """Number of live processes; 0 if they are not counted."""
    untrained: NotTrained = field(default_factory=NotTrained)
    """The part of the last completed step that is not trained on."""
    before: int = 0
    """Steps that earlier commands of the run completed."""
    over: bool = False
    """True if the run has ended, well or not. Then `phase` is its last one, and nothing runs or waits any more."""

    @property
    def left_s(self) -> float | None:
        """Seconds that remain at this command's average pace so far; None before its first step, and at the end."""
        done = self.step - self.before
        return self.elapsed_s / done * (self.steps - self.step) if done > 0 and not self.over else None


class Progress(Protocol):
    """Shows the progress of a run. Called from one event loop; cheap enough to call at every event."""

    def start(self, run_name: str, steps: int) -> None:
        """Begins to show a run of `steps` steps."""
        ...

    def update(self, view: ProgressView) -> None:
        """Takes the newest view, and draws it when a drawing is due."""
        ...

    def note(self, text: str) -> None:
        """Prints a text that stays on screen: a long phase begins or ends, a checkpoint was written."""
        ...

    def stop(self) -> None:
        """Draws the last view, as one of a run that is over, and releases the terminal. A second call does nothing."""
        ...


class NullProgress:
    """Progress that shows nothing."""

    def start(self, run_name: str, steps: int) -> None:
        """Shows nothing."""

    def update(self, view: ProgressView) -> None:
        """Shows nothing."""

    def note(self, text: str) -> None:
        """Shows nothing."""

    def stop(self) -> None:
        """Shows nothing."""


class LineProgress:
    """One line per completed step, in plain ASCII: for logs."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0

    def start(self, run_name: str, steps: int) -> None:
        """Prints the run's name."""
        self.note(f"{run_name}: {steps} steps")

    def update(self, view: ProgressView) -> None:
        """Prints a line if a step was completed since the last line, or if a resumed run begins behind one."""
        if view.step > self._shown:
            self._shown = view.step
            self.note(line(view) if view.step > view.before else f"goes on after step {view.step}/{view.steps}")

    def note(self, text: str) -> None:
        """Prints the text."""
        self._console.out(text, highlight=False)

    def stop(self) -> None:
        """Does nothing."""


class LiveProgress:
    """A few lines at the bottom of the terminal, redrawn at most twice a second and at every completed step.

    The caller's thread draws, during its calls, by the caller's clock. Nothing runs in the background.
    """

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._name = ""
        self._view: ProgressView | None = None
        self._drawn_at = -math.inf
        self._drawn_step = -1

    def start(self, run_name: str, steps: int) -> None:
        """Begins to draw at the bottom of the terminal."""
        self._name = run_name
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()
        self.update(ProgressView(step=0, steps=steps, elapsed_s=0.0, phase="starting"))

    def update(self, view: ProgressView) -> None:
        """Keeps the view. Draws it if the last drawing is old enough or a step was completed."""
        self._view = view
        if view.step != self._drawn_step or self._clock() - self._drawn_at >= REFRESH_INTERVAL_S:
            self._draw()

    def note(self, text: str) -> None:
        """Prints the text above the live lines."""
        self._console.print(text, markup=False, highlight=False)

    def stop(self) -> None:
        """Leaves the last view on screen, which says that the run is over."""
        if self._live is not None:
            self._view = self._view and replace(self._view, over=True)
            self._draw()
            self._live.stop()
            self._live = None

    def _draw(self) -> None:
        if self._live is None or self._view is None:
            return
        self._drawn_at, self._drawn_step = self._clock(), self._view.step
        self._live.update(screen(self._name, self._view), refresh=True)


def progress_on(console: Console, clock: Callable[[], float]) -> Progress:
    """Returns LiveProgress on a terminal that can move its cursor, LineProgress elsewhere, NullProgress if quiet."""
    if console.quiet:
        return NullProgress()
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveProgress(console, clock) if live else LineProgress(console)


def line(view: ProgressView) -> str:
    """The view as one line.

    >>> line(ProgressView(step=2, steps=8, elapsed_s=30, success=0.5, rewards={"solver": 0.45}, tokens_per_s=3120))
    'step 2/8 | success 0.50 | reward solver 0.45 | 3120 tokens/s | 0:30, left 1:30'
    """
    parts = [f"step {view.step}/{view.steps}"]
    if view.ended is not None:  # The step has trained what was played before, some of it in earlier steps.
        parts.append(f"{view.ended or 'no'} episode{'' if view.ended == 1 else 's'} ended")
    if view.success is not None:
        parts.append(f"success {view.success:.2f}")
    if view.rewards:
        parts.append("reward " + ", ".join(f"{agent} {reward:.2f}" for agent, reward in view.rewards.items()))
    parts += view.untrained.lines
    if view.tokens_per_s:
        parts.append(f"{view.tokens_per_s:.0f} tokens/s")
    if view.training_hidden is not None:
        parts.append(f"{view.training_hidden:.0%} of training hidden")
    parts.append(duration(view.elapsed_s) + (f", left {duration(view.left_s)}" if view.left_s else ""))
    return " | ".join(parts)


def screen(name: str, view: ProgressView) -> RenderableType:
    """The view as live lines: progress, success, agents, policies, time."""
    head = Table.grid(padding=(0, 2))
    left = "" if view.left_s is None else f"  left {duration(view.left_s)}"
    processes = f"  {view.processes} processes" if view.processes else ""
    head.add_row(
        Text(name, "bold"),
        ProgressBar(total=max(view.steps, 1), completed=view.step, width=28, complete_style="cyan"),
        f"step {view.step}/{view.steps}",
        Text(f"{duration(view.elapsed_s)}{left}{processes}", "dim"),
    )
    success = Text("success  ", "dim")
    success.append(sparkline(view.success_curve, width=48), "green")
    success.append("" if view.success is None else f" {view.success:.2f}", "bold green")
    success.append(f"   {view.tokens_per_s:,.0f} tokens/s   ", "dim")
    if view.training_hidden is not None:
        success.append(f"{view.training_hidden:.0%} of training hidden   ", "dim")
    success.append(f"the run is over, its last phase: {view.phase}" if view.over else view.phase, "cyan")
    policies = sorted({*view.versions, *view.running, *view.queued})
    calls = {} if view.over else {"running": view.running, "queued": view.queued}
    columns: Mapping[str, Mapping[str, int]] = {"version": view.versions, **calls}
    tables = [
        _table(("agent", "reward"), ([agent, f"{reward:.3f}"] for agent, reward in view.rewards.items())),
        _table(
            ("policy", *columns),
            ([policy, *(str(column.get(policy, 0)) for column in columns.values())] for policy in policies),
        ),
        _table(
            ("time", "share of step"),
            ([phase, f"{bar(share, 12)} {share:4.0%}"] for phase, share in view.time_shares.items()),
        ),
    ]
    lost = [Text(" | ".join(view.untrained.lines), "yellow")] if view.untrained.lines else []
    return Group(head, success, *lost, Columns([table for table in tables if table.row_count], padding=(0, 4)))


def sparkline(values: Sequence[float], width: int) -> str:
    """Values between 0 and 1 as at most `width` blocks, the newest last. If there are more values, they are averaged.

    >>> sparkline([0.0, 0.5, 1.0], width=8)
    '▁▅█'
    """
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    return "".join(SPARKS[min(7, max(0, int(value * 8)))] if math.isfinite(value) else " " for value in values)


def bar(share: float, width: int) -> str:
    """A share, 0 to 1, as a bar of `width` characters.

    >>> bar(0.5, 4)
    '██  '
    """
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + " " * (width - filled)


def duration(seconds: float) -> str:
    """Minutes and seconds, with hours from one hour on: `3:07`, `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column.startswith("share") else "right")
    for row in rows:
        table.add_row(*row)
    return table
