import io
import re

import pytest
from rich.console import Console

from flexmarl.events.progress import (
    LineProgress,
    LiveProgress,
    NullProgress,
    ProgressView,
    SafeConsole,
    bar,
    duration,
    line,
    progress_on,
    sparkline,
)


def view(step: int, **changes) -> ProgressView:
    shown = {
        "steps": 8,
        "elapsed_s": 10.0 * step,
        "success": 0.5,
        "success_curve": [0.25] * step,
        "rewards": {"solver": 0.45, "verifier": 0.8},
        "tokens_per_s": 3120.4,
        "running": {"solver": 48},
        "queued": {"solver": 3},
        "versions": {"solver": step, "verifier": step},
        "time_shares": {"rollout": 0.93, "train": 0.42},
        "training_hidden": 0.83,
        "processes": 5,
    }
    return ProgressView(step=step, **(shown | changes))


@pytest.fixture(autouse=True)
def _a_terminal_that_moves_its_cursor(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=120, color_system=None), out


def test_a_log_gets_one_line_per_completed_step():
    out = io.StringIO()
    progress = progress_on(Console(file=out, width=20), lambda: 0.0)
    assert isinstance(progress, LineProgress)
    progress.start("math_team", 8)
    for step in (0, 0, 1, 1, 1, 2):
        progress.update(view(step))
    progress.note("evaluating 256 tasks [held-out]")
    progress.stop()
    assert out.getvalue().splitlines() == [
        "math_team: 8 steps",
        "step 1/8 | success 0.50 | reward solver 0.45, verifier 0.80 | 3120 tokens/s | 83% of training hidden | "
        "0:10, left 1:10",
        "step 2/8 | success 0.50 | reward solver 0.45, verifier 0.80 | 3120 tokens/s | 83% of training hidden | "
        "0:20, left 1:00",
        "evaluating 256 tasks [held-out]",
    ]
    assert out.getvalue().isascii()


def test_a_resumed_log_goes_on_where_it_stopped():
    out = io.StringIO()
    progress = LineProgress(Console(file=out))
    progress.update(ProgressView(step=5, steps=8, elapsed_s=0.0, before=5))
    progress.update(view(6))
    assert [text.split(" | ")[0] for text in out.getvalue().splitlines()] == ["goes on after step 5/8", "step 6/8"]


def test_a_terminal_shows_everything():
    console, out = terminal()
    progress = progress_on(console, lambda: 0.0)
    assert isinstance(progress, LiveProgress)
    progress.start("math_team", 8)
    progress.update(view(3, phase="rollout 31/64 episodes"))
    progress.note("checkpoint written")
    progress.stop()
    progress.stop()
    shown = out.getvalue()
    for part in (
        "math_team", "step 3/8", "0:30", "left 0:50", "rollout 31/64 episodes", "▃▃▃ 0.50", "3,120 tokens/s",
        "0.450", "0.800", "48", "queued", "93%", "42%", "checkpoint written",
        "83% of training hidden", "5 processes",
    ):  # fmt: skip
        assert part in shown


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_on(terminal()[0], lambda: 0.0), LineProgress)


def test_a_notebook_gets_lines_though_its_kernel_asks_for_colours(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    console = SafeConsole()
    with console.status("starting"):
        progress = progress_on(console, lambda: 0.0)
        assert isinstance(progress, LineProgress)
        progress.start("math_team", 8)
        progress.update(view(1))
        progress.stop()
    assert "step 1/8" in capsys.readouterr().out
    console.print("before", style="bold")
    assert capsys.readouterr().out == "before\n"


def test_the_screen_is_drawn_at_most_twice_a_second_and_at_every_step():
    now = [0.0]
    console, out = terminal()
    progress = LiveProgress(console, lambda: now[0])
    progress.start("run", 8)
    drawn = []
    for hundredth in range(1, 101):
        now[0] = hundredth / 100
        before = len(out.getvalue())
        progress.update(view(1 if hundredth >= 70 else 0))
        if len(out.getvalue()) > before:
            drawn.append(hundredth)
    progress.stop()
    assert drawn == [50, 70]


def test_the_last_view_is_left_on_screen_even_if_it_was_not_due():
    console, out = terminal()
    progress = LiveProgress(console, lambda: 0.0)
    progress.start("run", 8)
    progress.update(view(0, phase="first"))
    progress.update(view(0, phase="the very last"))
    assert "the very last" not in out.getvalue()
    progress.stop()
    assert "the very last" in out.getvalue()


def test_the_last_view_says_that_the_run_is_over_and_that_nothing_runs_or_waits():
    console, out = terminal()
    progress = LiveProgress(console, lambda: 0.0)
    progress.start("run", 8)
    progress.update(view(3, phase="evaluating after training"))
    frames = len(out.getvalue())
    progress.stop()
    last = out.getvalue()[frames:]
    assert "the run is over, its last phase: evaluating after training" in last
    assert re.search(r"solver +3\b", last), "versions stay"
    assert not {"running", "queued", "left", "48"} & set(last.split())


def test_nothing_is_known_before_the_first_step():
    console, out = terminal()
    progress = LiveProgress(console, lambda: 0.0)
    progress.start("run", 8)
    progress.stop()
    assert "step 0/8" in out.getvalue()
    assert not {"left", "hidden", "processes"} & set(out.getvalue().split())
    assert line(ProgressView(step=0, steps=8, elapsed_s=0.0)) == "step 0/8 | 0:00"


def test_nobody_sees_a_null_progress(capsys):
    progress = NullProgress()
    progress.start("run", 8)
    progress.update(view(1))
    progress.note("text")
    progress.stop()
    assert capsys.readouterr().out == ""


def test_a_long_curve_is_averaged_into_its_width():
    assert sparkline([0.0] * 50 + [1.0] * 50, width=4) == "▁▁██"
    assert sparkline([float("nan"), -1.0, 2.0], width=4) == " ▁█"


@pytest.mark.parametrize(("share", "drawn"), [(-1, "    "), (0.5, "██  "), (7, "████")])
def test_a_bar_stays_in_its_width(share, drawn):
    assert bar(share, 4) == drawn


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (187, "3:07"), (3723, "1:02:03")])
def test_durations_read_like_a_clock(seconds, text):
    assert duration(seconds) == text
