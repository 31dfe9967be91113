"""Engines that answer after their modelled time, in a real run of one process."""

from pathlib import Path

from tests.timed_run import play, processes


def test_timed_engines_serve_load_and_move_in_one_process(small_run: Path, tmp_path: Path) -> None:
    folder = play(small_run, f"out={tmp_path}")
    assert processes(folder) == ["controller"]
