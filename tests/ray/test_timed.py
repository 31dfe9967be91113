"""Engines that answer after their modelled time beside real trainers: only these are processes of Ray."""

from pathlib import Path

import pytest

from flexmarl.events.run_folder import RunFolder
from tests.ray.child_run import Child
from tests.timed_run import OVERRIDES, check, play, processes

pytestmark = pytest.mark.ray


def test_timed_engines_take_no_room_on_a_ray_that_others_started(
    somebodys_ray: str, small_run: Path, tmp_path: Path, short_root: Path
) -> None:
    """It has two CPUs, which the trainers take. Six engines load through the node's agent what these publish."""
    joins = ["cluster.backend=ray", f"cluster.address={somebodys_ray}", f"out={tmp_path}"]
    child = Child("train", small_run, *OVERRIDES, *joins, cwd=tmp_path, temp=short_root)
    try:
        assert child.wait() == 0, child.stderr
    finally:
        child.close()
    (path,) = tmp_path.glob("sums-*")
    check(RunFolder(path))
    assert processes(RunFolder(path)).count("engine") == 0


def test_timed_engines_live_in_the_controller_and_load_what_trainers_publish(small_run: Path, tmp_path: Path) -> None:
    folder = play(small_run, f"out={tmp_path}", "cluster.backend=ray")
    assert processes(folder) == ["controller", "trainer", "trainer"]
