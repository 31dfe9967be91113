"""Engines that answer after their modelled time beside real trainers: only these are processes of Ray."""

from pathlib import Path

import pytest

from tests.timed_run import play, processes

pytestmark = pytest.mark.ray


def test_timed_engines_live_in_the_controller_and_load_what_trainers_publish(small_run: Path, tmp_path: Path) -> None:
    folder = play(small_run, f"out={tmp_path}", "cluster.backend=ray")
    assert processes(folder) == ["controller", "trainer", "trainer"]
