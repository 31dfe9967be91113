"""Workflows that misbehave, in the ray world: the run ends when all others have played, and when it is told to."""

from pathlib import Path

import pytest

from flexmarl.events.run_events import RunFailed
from tests.odd_run import SIGTERM_S, OddRun
from tests.odd_workflows import ODDITIES

pytestmark = pytest.mark.ray

RAY = "cluster.backend=ray"


@pytest.mark.deep
def test_sigterm_ends_a_run_within_ten_seconds_whatever_its_workflows_do(small_run: Path, tmp_path: Path) -> None:
    with OddRun(small_run, tmp_path, tuple(ODDITIES), RAY) as run:
        run.wait_until_all_have_begun()
        took_s = run.terminate()
        assert run.process.returncode == 130, run.said
        assert len(run.events(RunFailed)) == 1
    assert took_s < SIGTERM_S


@pytest.mark.deep
def test_a_run_of_all_odd_workflows_ends_and_loses_no_other_episode(small_run: Path, tmp_path: Path) -> None:
    with OddRun(small_run, tmp_path, tuple(ODDITIES), RAY, "rollout.episode_timeout_s=20") as run:
        run.check_ended_well()
