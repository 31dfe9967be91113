"""Runs side by side: differences of rounding are none, and the table can be read in 80 columns."""

import io
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flexmarl.analysis.comparison import (
    Measured,
    RunFigures,
    compare_runs,
    difference,
    differing_settings,
    settings_in_short,
)
from flexmarl.analysis.intervals import share
from flexmarl.cli.compare import comparison, fitting

TASKS = tuple(f"sum-{number}" for number in range(8))
VALUES = st.lists(st.floats(0.1, 1.0), min_size=8, max_size=8)


def measured(values: Sequence[float]) -> Measured:
    return Measured(tuple(values), "episodes", TASKS)


@given(VALUES)
def test_a_difference_of_rounding_is_0_and_so_is_its_interval(values: list[float]) -> None:
    off = [math.nextafter(value, 2.0) for value in values]
    found = difference(measured(values), measured(off), same_tasks=True)
    assert (found.value, found.low or 0.0, found.high or 0.0) == (0.0, 0.0, 0.0)


@given(VALUES, st.floats(1e-9, 0.1))
def test_a_difference_that_is_none_of_rounding_stays(values: list[float], more: float) -> None:
    found = difference(measured(values), measured([value + more for value in values]), same_tasks=True)
    assert math.isclose(found.value, more, rel_tol=1e-6)


@given(st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8))
def test_the_interval_of_numbers_from_0_to_1_stays_there_and_holds_their_mean(values: list[float]) -> None:
    found = measured(values).interval()
    if found.low is not None and found.high is not None:
        assert 0.0 <= found.low <= found.value + 1e-12
        assert found.value - 1e-12 <= found.high <= 1.0


def test_a_share_of_attempts_near_0_has_the_interval_of_a_share() -> None:
    found = measured([0.5, *[0.0] * 7]).interval()
    assert found == share(0.5, 8)
    far = measured([-0.5, *[0.0] * 7]).interval()
    assert far.how == "t, 8 tasks"


def test_a_figure_takes_two_lines_of_80_columns_and_the_methods_are_notes() -> None:
    names = ("success, after - before", "tokens per turn, first tenth of the steps", "seconds per step")
    first, second = (measured([0.123456 * (number + task) for task in range(8)]) for number in (1, 2))
    runs = [RunFigures(name, dict.fromkeys(names, of)) for name, of in (("one", first), ("two", second))]
    table, notes = comparison(compare_runs(runs), 2, narrow=True)
    screen = io.StringIO()
    Console(file=screen, width=80).print(table)
    lines = [line for line in screen.getvalue().splitlines() if line.strip()]
    assert max(map(len, lines)) <= 80
    assert len(lines) == 2 + 2 + 2 + 2
    assert list(notes) == ["(1)"]
    assert "paired over 8 tasks" in notes["(1)"]


@pytest.mark.parametrize("width", [80, 200])
def test_no_interval_is_broken_on_a_screen_of_80_columns(width: int) -> None:
    names = ("success, after - before", "reward of adviser, after - before")
    first, second = (measured([0.123456 * (number + task % 3) for task in range(8)]) for number in (1, 2))
    runs = [RunFigures(name, dict.fromkeys(names, of)) for name, of in (("one", first), ("two", second))]
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    table, _ = fitting(compare_runs(runs), 2, console)
    console.print(table)
    lines = screen.getvalue().splitlines()
    assert all(line.count("[") == line.count("]") for line in lines)
    assert sum("[" in line for line in lines) == len(names)
    assert any(name in line for line in lines for name in names) == (width > 80)


def test_a_figure_that_a_run_lacks_is_a_dash() -> None:
    runs = [RunFigures("one", {"reward of a, after": measured([0.5] * 8)}), RunFigures("two", {})]
    table, _ = comparison(compare_runs(runs), 2)
    assert [list(column.cells) for column in table.columns][2:4] == [["-"], ["-"]]


def test_settings_of_one_run_alone_differ_too() -> None:
    one = {"name": "a", "steps": 8, "stop": None, "batch": {"groups": 4}}
    other = {"name": "b", "steps": 9, "stop": {"patience": 2}}
    assert differing_settings([one, other]) == {
        "batch.groups": (4, None),
        "stop.patience": (None, 2),
    }


def test_settings_that_explain_most_come_first_and_an_agent_of_one_run_alone_is_one_row() -> None:
    def run(mode: str, rate: float, groups: int, model: str, judge: Any = None) -> dict[str, Any]:
        solver = {"model": model, "instances": groups, "training": {"optimizer": {"learning_rate": rate}}}
        agents = {"solver": {"policy": "solver"}} | ({"judge": {"policy": "judge", "context": "none"}} if judge else {})
        return {
            "alarms": {"steps": groups},
            "batch": {"groups": groups},
            "credit": {"filter": groups},
            "mode": mode,
            "policies": {"solver": solver} | ({"judge": judge} if judge else {}),
            "tasks": {"seed": groups},
            "team": {"agents": agents},
        }

    runs = [run("sync", 0.1, 4, "small"), run("async", 0.2, 8, "large", {"model": "tiny", "instances": 1})]
    assert list(settings_in_short(runs, differing_settings(runs)).items()) == [
        ("mode", ("sync", "async")),
        ("tasks.seed", (4, 8)),
        ("policies.judge", (None, "tiny")),
        ("policies.solver.model", ("small", "large")),
        ("team.agents.judge", (None, "judge")),
        ("batch.groups", (4, 8)),
        ("policies.solver.training.optimizer.learning_rate", (0.1, 0.2)),
        ("credit.filter", (4, 8)),
        ("alarms.steps", (4, 8)),
        ("policies.solver.instances", (4, 8)),
    ]
