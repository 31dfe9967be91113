"""Engines that answer after their modelled time, in a real run of one process."""

from pathlib import Path

from flexmarl.assemble.simulation import simulate
from flexmarl.config import load_run
from flexmarl.events.journal import read_run
from flexmarl.events.run_folder import RunFolder
from flexmarl.events.serving_events import Moved
from tests.timed_run import OVERRIDES, play, processes, train


def test_timed_engines_serve_load_and_move_in_one_process(small_run: Path, tmp_path: Path) -> None:
    folder = play(small_run, f"out={tmp_path}")
    assert processes(folder) == ["controller"]


def test_the_real_run_and_the_simulated_one_move_the_same_instances_while_their_queues_are_the_same(
    small_run: Path, tmp_path: Path
) -> None:
    """Before the first answer, after two seconds, two decisions are made, on queues that are as long in both."""
    slow = [
        *OVERRIDES,
        *("steps=1", "batch={groups: 2, episodes: 4}", "policies.one.instances=1", "policies.two.instances=5"),
        "balance={rule: drain_time, poll_s: 0.5, move_s: 0.01}",
        "simulation.costs.default.engine.decode_s=4e-3",
        "simulation.replies={solver: {type: lengths, mean: 500, shape: constant}, writer: {type: lengths, mean: 1}}",
        *("team.agents.solver.sampling.max_tokens=600", f"out={tmp_path}"),
    ]
    settings = load_run(small_run, slow)
    real, simulated = first_moves(train(settings)), first_moves(RunFolder(simulate(settings)))
    assert real == simulated
    assert [to for _, to in real] == ["one", "one"], "witness"


def first_moves(folder: RunFolder) -> list[tuple[str, str]]:
    moves = [event for event in read_run(folder.journal) if isinstance(event, Moved)]
    return [(str(move.instance), move.to) for move in moves[:2]]
