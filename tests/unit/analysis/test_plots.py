"""Pictures of runs: that they are drawn of what there is. How they look is for people to see."""

from pathlib import Path

import matplotlib.image

from flexmarl.analysis.costs import CostSettings, EngineCosts
from flexmarl.analysis.facts import Facts, read_facts
from flexmarl.analysis.figures import Pools, report_of
from flexmarl.analysis.plots import MOST_LINES, draw_run, draw_sweep, level
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
