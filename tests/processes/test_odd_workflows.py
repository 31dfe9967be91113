"""Workflows that misbehave, in a real process: it ends when all others have played, and when it is told to."""

from pathlib import Path

import pytest

from flexmarl.events.run_events import RunFailed
from tests.odd_run import SIGTERM_S, OddRun
from tests.odd_workflows import ODDITIES

KINDS = tuple(ODDITIES)
TIMEOUT = "rollout.episode_timeout_s={}"
THREADS = {"leaves_a_thread", "waits_for_a_thread"}
"""Kinds at whose end the interpreter waits, which a fork leaves in another way."""


def test_a_run_in_which_every_seventh_episode_is_odd_ends_and_loses_no_other(small_run: Path, tmp_path: Path) -> None:
    patience = TIMEOUT.format(40)  # A busy machine needs 15 s for 400 episodes at once.
    with OddRun(small_run, tmp_path, KINDS, patience) as run:
        run.check_ended_well()


def test_sigterm_ends_a_run_within_ten_seconds_whatever_its_workflows_do(small_run: Path, tmp_path: Path) -> None:
    with OddRun(small_run, tmp_path, KINDS) as run:
        run.wait_until_all_have_begun()
        took_s = run.terminate()
        assert run.process.returncode == 130, run.said
        assert len(run.events(RunFailed)) == 1
    assert took_s < SIGTERM_S


def test_sigterm_ends_a_run_whose_workflow_never_awaits_and_says_where_it_stood(
    small_run: Path, tmp_path: Path
) -> None:
    with OddRun(small_run, tmp_path, ["blocks"]) as run:
        run.wait_until_all_have_begun()
        took_s = run.terminate()
        assert run.process.returncode == 130, run.said
        assert "in blocks" in run.said
        (event,) = run.events(RunFailed)
        assert "odd.py" in event.because
    assert took_s < SIGTERM_S


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_odd_workflow_ends_and_loses_no_other(small_run: Path, tmp_path: Path, kind: str) -> None:
    with OddRun(small_run, tmp_path, [kind] * 2, TIMEOUT.format(15), forked=kind not in THREADS) as run:
        run.check_ended_well()


@pytest.mark.deep
@pytest.mark.parametrize("kind", KINDS)
def test_sigterm_ends_a_run_of_any_odd_workflow_within_ten_seconds(small_run: Path, tmp_path: Path, kind: str) -> None:
    with OddRun(small_run, tmp_path, [kind] * 2, "steps=100000", forked=kind not in THREADS) as run:
        run.wait_until_all_have_begun()
        took_s = run.terminate()
        assert run.process.returncode == 130, run.said
    assert took_s < SIGTERM_S
