"""Pictures of runs: that they are drawn of what there is. How they look is for people to see."""

from pathlib import Path

import matplotlib.image
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.patches import Rectangle

from flexmarl.analysis.costs import CostSettings, EngineCosts
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.analysis.figures import Pools, report_of
from flexmarl.analysis.plots import MOST_LINES, MOST_TICKS, draw_run, draw_sweep, level, picture, plain_ticks
from flexmarl.events.serving_events import QueueCounts
from flexmarl.testing.scripted_run import ScriptedRun
from tests.unit.analysis.simulated_runs import AGENTS, simulated_run, take_turns


def test_a_simulated_run_is_drawn(tmp_path: Path) -> None:
    facts = simulated_run({"default": CostSettings(engine=EngineCosts(slots=2))})
    draw_run(facts, tmp_path / "simulation.png", "a run")
    height, width, _ = matplotlib.image.imread(tmp_path / "simulation.png").shape
    assert min(height, width) > 1000


def test_a_run_of_many_policies_is_drawn_without_queues(tmp_path: Path) -> None:
    many = {f"agent{number}": f"policy{number}" for number in range(MOST_LINES + 2)}
    facts = read_facts(ScriptedRun(take_turns, agents=many).play().events.all)
    facts.queue_counts.clear()
    draw_run(facts, tmp_path / "simulation.png", "many")
    assert (tmp_path / "simulation.png").exists()


def test_steps_count_from_1_as_on_the_screen_and_token_counts_are_few_plain_numbers() -> None:
    figure = picture(simulated_run({}), "a run")
    figure.canvas.draw()
    _, _, steps, lengths = figure.axes
    bars = {round(bar.get_x() + bar.get_width() / 2, 6) for bar in steps.patches if isinstance(bar, Rectangle)}
    assert bars == {1, 2, 3}
    labels = [text.get_text() for text in lengths.get_xticklabels(which="both")]
    assert 2 <= len(labels) <= MOST_TICKS
    assert all(label.isdigit() for label in labels), labels


def test_a_run_in_which_no_call_waited_says_so_and_has_no_scale() -> None:
    facts = simulated_run({})
    for waiting, remarks in ((None, ["the queues were not counted"]), (0, ["no call waited"]), (3, [])):
        counts = [] if waiting is None else [QueueCounts(t=1.0, running={}, queued={"solver": waiting}, lag_ms=0.0)]
        facts.queue_counts[:] = counts
        queues, *_ = picture(facts, "a run").axes
        assert [text.get_text() for text in queues.texts] == remarks
        assert bool(list(queues.get_yticks())) == bool(waiting)
        assert (queues.get_legend() is not None) == bool(waiting)


@given(st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)).map(sorted))
def test_ticks_are_few_and_on_the_axis(ends: list[int]) -> None:
    low, high = ends
    ticks = plain_ticks(low, high)
    assert ticks == sorted(set(ticks))
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) <= MOST_TICKS
    assert len(ticks) >= min(2, high - low + 1)


def test_nothing_is_drawn_of_a_run_that_ended_no_step(tmp_path: Path) -> None:
    draw_run(Facts(), tmp_path / "simulation.png", "nothing")
    assert not (tmp_path / "simulation.png").exists()


def test_a_sweep_is_drawn_with_a_line_for_each_other_setting(tmp_path: Path) -> None:
    report = report_of(read_facts(ScriptedRun(take_turns, agents=AGENTS).play().events.all), Pools(costs={}))
    assert report is not None
    draw_sweep("batch.groups", {name: {"4": report, "8": report} for name in ("", "b=2")}, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").exists()


def test_an_interval_counts_from_its_begin_to_its_end() -> None:
    assert level([(1.0, 2.0)], [0.9, 1.0, 1.9, 2.0]) == [0, 1, 1, 0]
