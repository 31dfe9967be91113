"""A whole run in one process on the device: it trains, resumes, and in deterministic mode repeats itself."""

from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from flexmarl.assemble.commands import TrainCommand, assemble_run
from flexmarl.config import load_run
from flexmarl.errors import ConfigError


def trained(small_run: Path, out: Path, device: str, *overrides: str, resume_from: Path | None = None) -> TrainCommand:
    chosen = ["cluster.backend=inline", f"cluster.device={device}", f"out={out}", *overrides]
    run = assemble_run(load_run(small_run, chosen), resume_from=resume_from)
    run.train(Console(quiet=True))
    return run


def weights(run: TrainCommand, step: int) -> dict[str, list[float]]:
    found = load_file(run.folder / "checkpoints" / f"step-{step:05}" / "one" / "weights.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in found.items()}


@pytest.mark.parametrize("mode", ["microbatch", "colocated", "async"])
def test_every_kind_of_mode_trains(mode: str, small_run: Path, tmp_path: Path, device: str) -> None:
    run = trained(small_run, tmp_path, device, f"mode={mode}")
    assert weights(run, 2) != weights(run, 1)


def test_a_deterministic_run_repeats_itself_and_ends_the_same_after_it_was_resumed(
    small_run: Path, tmp_path: Path, device: str
) -> None:
    always = ["deterministic=true", "steps=3"]
    first, second = (trained(small_run, tmp_path / name, device, *always) for name in ("first", "second"))
    assert weights(first, 3) == weights(second, 3)
    begun = trained(small_run, tmp_path / "third", device, "deterministic=true", "steps=1")
    resumed = trained(small_run, tmp_path / "third", device, *always, resume_from=begun.folder)
    assert weights(resumed, 3) == weights(first, 3)


def test_a_device_that_is_not_there_is_refused_before_anything_starts(
    small_run: Path, tmp_path: Path, device: str
) -> None:
    works = "use cuda:0 to" if device == "cuda" else "use cluster.device=cpu"
    with pytest.raises(ConfigError, match=works):
        trained(small_run, tmp_path, "cuda:63")
    assert not list(tmp_path.iterdir())
