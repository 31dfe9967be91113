"""Two ranks of a policy in real runs: their files are those of one process, and a run goes on when one is lost."""

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

import flexmarl
from flexmarl.cli import app
from flexmarl.config import load_run
from flexmarl.events.journal import read_journal
from flexmarl.events.run_events import ProcessStarted, WorkerLost
from flexmarl.events.training_events import MicroBatchDone, Updated
from tests.ray.child_run import Left

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-ranks")]

# A large eps: without it, a gradient that is nothing but rounding moves a weight as far as any other.
POLICY = "policies.one.training={micro_batch: 3, optimizer: {learning_rate: 3e-2, eps: 1e-3}"
SMALL = [
    *("deterministic=true", "cluster.threads=1", "batch={groups: 2, episodes: 3}", "evaluate.tasks=0"),
    "checkpoint={every: 1, keep: 9}",
]


def words(ranks: int, steps: int) -> list[str]:
    """Overrides of a run with so many ranks."""
    backend = "ray" if ranks > 1 else "inline"
    return [*SMALL, f"cluster.backend={backend}", f"{POLICY}, ranks: {ranks}}}", f"steps={steps}"]


def same_within(one: Left, other: Left, *, steps: int, apart: float) -> None:
    assert one.consumed() == other.consumed()
    ours, theirs = one.weights(steps), other.weights(steps)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=apart)


def command(*given: object) -> None:
    found = CliRunner().invoke(app, [*map(str, given)])
    assert found.exit_code == 0, found.output


def test_checkpoints_move_from_one_rank_to_two_and_back_through_the_command_line(
    small_run: Path, tmp_path: Path
) -> None:
    command("train", small_run, *words(1, 3), f"out={tmp_path / 'straight'}")
    command("train", small_run, *words(1, 1), f"out={tmp_path / 'moved'}")
    (straight,), (moved,) = (list((tmp_path / name).iterdir()) for name in ("straight", "moved"))
    command("train", small_run, *words(2, 2), f"out={tmp_path / 'moved'}", "--resume", moved)
    started = {event.process for event in read_journal(moved / "journal.jsonl") if isinstance(event, ProcessStarted)}
    assert {name for name in started if name.kind == "rank"} == {"rank/0/0", "rank/0/1"}
    command("train", small_run, *words(1, 3), f"out={tmp_path / 'moved'}", "--resume", moved)
    same_within(Left(straight), Left(moved), steps=3, apart=1e-5)


@pytest.mark.deep
def test_a_run_goes_on_with_the_same_bits_when_a_rank_is_killed_and_when_one_hangs(
    small_run: Path, tmp_path: Path
) -> None:
    straight = flexmarl.train(load_run(small_run, [*words(2, 3), f"out={tmp_path / 'straight'}"]), show=False)
    ranks: dict[str, int] = {}
    killed: list[str] = []

    def started(event: ProcessStarted) -> None:
        ranks[event.process] = event.pid

    def kill(event: MicroBatchDone) -> None:
        if not killed:
            killed.append("rank/0/1")
            psutil.Process(ranks["rank/0/1"]).kill()

    def hang(event: Updated) -> None:
        if event.version == 2:
            killed.append("rank/0/0")
            os.kill(ranks["rank/0/0"], signal.SIGSTOP)

    before = psutil.Process().children(recursive=True)
    disturbed = flexmarl.train(
        load_run(small_run, [*words(2, 3), f"out={tmp_path / 'lost'}", "process_groups.call_timeout_s=20"]),
        on={ProcessStarted: started, MicroBatchDone: kill, Updated: hang},
        show=False,
    )
    lost = [event for event in read_journal(disturbed.folder / "journal.jsonl") if isinstance(event, WorkerLost)]
    assert killed == ["rank/0/1", "rank/0/0"], "witness: both happened"
    assert {event.process for event in lost} >= {*killed}
    assert any("call_timeout_s, 20 s" in event.because for event in lost)
    same_within(Left(straight.folder), Left(disturbed.folder), steps=3, apart=0.0)
    assert set(psutil.Process().children(recursive=True)) <= set(before), "nothing outlives the run"
